#include "bench/collectives/run.h"

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "bench/collectives/measuring.h"
#include "bench/collectives/report.h"
#include "bench/collectives/run_json.h"
#include "comm/launcher/launcher.h"
#include "memory/check.h"
#include "memory/ledger.h"

namespace collectives {
namespace {

constexpr auto kDeadline = std::chrono::seconds(60);

// A file without a name, which the process of rank 0 shares with this one.
class Mailbox {
 public:
  Mailbox() : file_(std::tmpfile(), &std::fclose) {
    ZP_CHECK(file_ != nullptr, "no temporary file for the figures; see the free space of /tmp");
  }

  void put(const std::string& text) {
    const size_t written = std::fwrite(text.data(), 1, text.size(), file_.get());
    ZP_CHECK(written == text.size() && std::fflush(file_.get()) == 0,
             "the figures could not be written; see the free space of /tmp");
  }

  std::string take() {
    std::rewind(file_.get());
    std::string text;
    for (int c = std::fgetc(file_.get()); c != EOF; c = std::fgetc(file_.get())) {
      text.push_back(static_cast<char>(c));
    }
    return text;
  }

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

Run drive(Team& team, const Flags& flags, std::ostream& table) {
  Run run{.ranks = team.size(), .absent = team.absent()};
  print_heading(table, run);
  measure(team, flags, [&](const std::vector<Measurement>& row) {
    print_row(table, row);
    run.measurements.insert(run.measurements.end(), row.begin(), row.end());
  });
  team.dismiss();
  return run;
}

// What each rank's process does.
void take_part(const Flags& flags, std::ostream& table, Mailbox& mailbox) {
  // More threads than cores would measure the scheduler.
  at::set_num_threads(1);
  const zeropage::comm::Place place = zeropage::comm::read_place();
  zeropage::memory::Ledger::process()->set_owner(
      c10::str("rank ", place.rank, "/", place.world_size));
  Team team(place, zeropage::comm::open_store(place, kDeadline), flags);
  if (team.rank() == 0) {
    mailbox.put(to_json(drive(team, flags, table)).dump());
  } else {
    team.follow();
  }
}

}  // namespace

Run run(int ranks, const Flags& flags, std::ostream& table) {
  Mailbox mailbox;
  const int failed = zeropage::comm::launch_function(
      [&] {
        take_part(flags, table, mailbox);
        return 0;
      },
      {.ranks = ranks, .output = zeropage::comm::LaunchOptions::Output::kRankZeroBare});
  ZP_CHECK(failed == 0, ranks, " ranks: a rank failed; it says why above");
  return run_from_json(nlohmann::json::parse(mailbox.take()));
}

}  // namespace collectives
