// Times collectives over every transport, interleaved, and judges what it measured.
// collectives --help.
#include <fstream>
#include <iostream>

#include <nlohmann/json.hpp>

#include "bench/collectives/flags.h"
#include "bench/collectives/report.h"
#include "bench/collectives/run.h"
#include "bench/collectives/run_json.h"
#include "memory/check.h"

namespace {

constexpr int kRuntimeError = 1;
constexpr int kIndent = 1;

void write_json(const collectives::Flags& flags, const nlohmann::json& document) {
  if (flags.json_to_stdout()) {
    std::cout << document.dump(kIndent) << std::endl;
    return;
  }
  std::ofstream out(flags.json);
  out << document.dump(kIndent) << std::endl;
  ZP_CHECK(out.good(), "--json ", flags.json, ": cannot be written");
}

void measure_all(const collectives::Flags& flags) {
  std::ostream& table = flags.json_to_stdout() ? std::cerr : std::cout;
  const collectives::Machine machine = collectives::describe_machine();
  collectives::print_machine(table, machine, flags);
  std::vector<collectives::Run> runs;
  std::vector<collectives::Measurement> all;
  for (const int ranks : flags.ranks) {
    runs.push_back(collectives::run(ranks, flags, table));
    const auto& measured = runs.back().measurements;
    all.insert(all.end(), measured.begin(), measured.end());
  }
  const auto verdicts = collectives::judge(all);
  collectives::print_verdicts(table, verdicts);
  if (!flags.json.empty()) {
    write_json(flags, collectives::document(machine, flags, runs, verdicts));
  }
}

}  // namespace

int main(int argc, char** argv) {
  collectives::Flags flags;
  if (const auto exit_code = collectives::parse_flags(argc, argv, flags)) return *exit_code;
  try {
    measure_all(flags);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "collectives: " << zeropage::memory::message_of(error) << std::endl;
    return kRuntimeError;
  }
}
