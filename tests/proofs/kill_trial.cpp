#include "tests/proofs/kill_trial.h"

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <regex>
#include <set>
#include <signal.h>
#include <sstream>
#include <sys/mman.h>

#include "tests/comm/launched_process.h"
#include "tests/harness/endless_training.h"
#include "zeropage/check.h"
#include "zeropage/zeropage.h"

namespace zeropage {
namespace {

using comm::LaunchedProcess;
namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr int kMostRanks = 16;

// Shared by all processes of a trial, so that times do not depend on who forwards whose output.
struct RankOnBoard {
  std::atomic<pid_t> pid;
  std::atomic<bool> has_world;
  std::atomic<int64_t> error_at;  // ns of the monotonic clock; 0: none
  std::atomic<bool> ended_well;
  std::array<char, 4096> error;
};

class Board {
 public:
  Board()
      : ranks_(static_cast<RankOnBoard*>(
            ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    ZP_CHECK(ranks_ != MAP_FAILED, "kill_trials: no shared memory for ", kBytes, " bytes");
  }
  ~Board() { ::munmap(ranks_, kBytes); }
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  RankOnBoard& operator[](int rank) { return ranks_[rank]; }

 private:
  static constexpr size_t kBytes = sizeof(RankOnBoard) * kMostRanks;
  RankOnBoard* const ranks_;  // zeros at first
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// ---- what the ranks do ----

// Every operation, of any size, sometimes several in flight.
void call_collectives(comm::World& world, uint64_t seed) {
  comm::Communicator& communicator = world.communicator();
  std::mt19937_64 random(seed);  // alike on all ranks
  const auto draw = [&random](int64_t from, int64_t to) {
    return std::uniform_int_distribution<int64_t>(from, to)(random);
  };
  const int size = world.size();
  for (;;) {
    std::vector<comm::Pending> pending;
    for (int64_t left = draw(1, 4); left > 0; --left) {
      const int64_t numel = int64_t{1} << draw(0, 20);
      const auto tensor = torch::ones({numel});
      const auto slices = torch::ones({draw(1, 100'000) * size});
      switch (draw(0, 5)) {
        case 0:
          pending.push_back(communicator.all_gather(slices, "a page"));
          break;
        case 1:
          pending.push_back(
              communicator.reduce_scatter(slices, comm::ReduceOp::kMean, "gradients"));
          break;
        case 2:
          pending.push_back(communicator.all_reduce(tensor, comm::ReduceOp::kMax, "a loss"));
          break;
        case 3:
          pending.push_back(
              communicator.broadcast(tensor, static_cast<int>(draw(0, size - 1)), "weights"));
          break;
        case 4: {
          const int from = static_cast<int>(draw(0, size - 1));
          const int to = (from + static_cast<int>(draw(1, size - 1))) % size;
          if (world.rank() == from) pending.push_back(communicator.send(tensor, to, "a batch"));
          if (world.rank() == to) pending.push_back(communicator.recv(tensor, from, "a batch"));
          break;
        }
        default:
          pending.push_back(communicator.barrier("a step"));
      }
    }
    for (const comm::Pending& operation : pending) operation.wait();
  }
}

struct Work {
  int stage = -1;  // -1: collectives
  uint64_t seed = 0;
  comm::WorldOptions options;
};

int be_a_rank(Board& board, const Work& work) {
  RankOnBoard& self = board[std::stoi(std::getenv("RANK"))];
  self.pid = ::getpid();
  try {
    at::set_num_threads(1);
    comm::World world = comm::World::from_environment(work.options);
    self.has_world = true;
    if (work.stage >= 0) {
      testing::train_endlessly(world, work.stage);
    } else {
      call_collectives(world, work.seed);
    }
    self.ended_well = true;
    return 0;
  } catch (const std::exception& error) {
    const std::string message = memory::message_of(error);
    std::strncpy(self.error.data(), message.c_str(), self.error.size() - 1);
    self.error_at = now_ns();
    std::fprintf(stderr, "error: %s\n", message.c_str());
    return 1;
  }
}

// ---- what they leave ----

std::set<std::string> shared_memory_files() {
  std::set<std::string> names;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/dev/shm", ignored)) {
    names.insert(entry.path().filename());
  }
  return names;
}

std::vector<pid_t> processes() {
  std::vector<pid_t> pids;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") == std::string::npos) pids.push_back(std::stoi(name));
  }
  return pids;
}

// A file that some process has mapped belongs to a program that runs beside the trial.
bool is_in_use(const std::string& name) {
  for (const pid_t pid : processes()) {
    std::ifstream maps(c10::str("/proc/", pid, "/maps"));
    for (std::string line; std::getline(maps, line);) {
      if (line.ends_with("/dev/shm/" + name)) return true;
    }
  }
  return false;
}

// Ranks lead sessions of their own, by their pids.
bool has_process_of_session(pid_t session) {
  for (const pid_t pid : processes()) {
    if (::getsid(pid) == session && comm::is_running(pid)) return true;
  }
  return false;
}

// ---- judging ----

// How many lines a rank printed itself. c10d warns too, with a stack where the store dies under a call.
int lines_of(int rank, const std::string& all_output) {
  const std::regex warning(R"(\[W.*\] \[c10d\] .*)");
  const std::regex of_stack("(Exception raised from .*|frame #.*|)");
  const std::string prefix = c10::str("[rank ", rank, "] ");
  std::istringstream output(all_output);
  int lines = 0;
  bool in_warning = false;
  for (std::string line; std::getline(output, line);) {
    if (!line.starts_with(prefix)) continue;
    line.erase(0, prefix.size());
    in_warning =
        std::regex_match(line, warning) || (in_warning && std::regex_match(line, of_stack));
    if (!in_warning) ++lines;
  }
  return lines;
}

void judge_survivor(KillResult& result, int rank, int victim, RankOnBoard& survivor,
                    int64_t killed_at) {
  const auto fault = [&](const auto&... words) {
    result.faults.push_back(c10::str("rank ", rank, " ", words...));
  };
  const std::string error = survivor.error.data();
  if (survivor.error_at == 0) {
    fault("ended without an error");
    return;
  }
  const double latency = static_cast<double>(survivor.error_at - killed_at) / 1e6;
  result.latencies.push_back(latency);
  if (latency > (result.meeting ? kMeetingLimit : kErrorLimit)) {
    fault("had its error after ", latency, " ms");
  }
  const std::regex lost(c10::str(result.meeting ? "" : "lost ", "rank [0-9, ]*\\b", victim, "\\b"));
  if (!std::regex_search(error, lost)) fault("does not name rank ", victim, ": ", error);
  if (!result.meeting &&
      !std::regex_search(error,
                         std::regex("#[0-9]+ (to|from|of) |(model|optimizer|parameters): lost"))) {
    fault("does not name its operation: ", error);
  }
  const int lines = lines_of(rank, result.output);
  const bool in_operation = error.find(" #") != std::string::npos;
  if (!result.meeting && in_operation && lines != 1) fault("printed ", lines, " lines, not one");
}

}  // namespace

KillResult run_kill_trial(const KillPlan& plan) {
  ZP_CHECK(plan.ranks >= 2 && plan.ranks <= kMostRanks, "kill_trials: expected 2 to ", kMostRanks,
           " ranks, got ", plan.ranks);
  std::mt19937_64 random(plan.seed);
  const auto draw = [&random](int from, int to) {
    return std::uniform_int_distribution<int>(from, to)(random);
  };
  const int victim = draw(0, plan.ranks - 1);
  const bool early = draw(0, 4) == 0 && !plan.only_working;
  const auto wait = std::chrono::microseconds(draw(0, early ? 60'000 : 400'000));
  Work work{.stage = draw(-1, 3), .seed = plan.seed, .options = {}};
  work.options.transport = plan.transport;
  if (early) work.options.deadline = std::chrono::milliseconds(kMeetingDeadline);

  const auto files_before = shared_memory_files();
  Board board;
  KillResult result;
  LaunchedProcess launched([&] {
    return comm::launch_function([&] { return be_a_rank(board, work); },
                                 {.ranks = plan.ranks, .grace = 30s, .tail_lines = 0});
  });
  const auto all = [&](const auto& holds) {
    for (int rank = 0; rank < plan.ranks; ++rank) {
      if (!holds(board[rank])) return false;
    }
    return true;
  };
  const bool begun = comm::holds_within(60.0, [&] {
    return all(
        [&](const RankOnBoard& rank) { return early ? rank.pid != 0 : bool(rank.has_world); });
  });
  std::this_thread::sleep_for(wait);
  result.meeting = !all([](const RankOnBoard& rank) { return bool(rank.has_world); });
  const int64_t killed_at = now_ns();
  if (board[victim].pid != 0) ::kill(board[victim].pid, SIGKILL);
  const bool returned = comm::holds_within(60.0, [&] { return launched.has_ended(); });
  result.all_gone = static_cast<double>(now_ns() - killed_at) / 1e6;
  result.output = launched.err();

  result.description =
      c10::str("rank ", victim, " of ", plan.ranks, ", ", wait.count() / 1000,
               early ? " ms after the start of the ranks" : " ms after all had a world", ", ",
               work.stage < 0 ? "collectives" : c10::str("training at stage ", work.stage));
  if (!begun) result.faults.emplace_back("the ranks did not begin");
  if (!returned) result.faults.emplace_back("the launcher did not return");
  if (result.output.find("sending SIGTERM") != std::string::npos) {
    result.faults.emplace_back("a rank had to be ended by the launcher");
  }
  if (result.output.find("was killed by SIGKILL") == std::string::npos) {
    result.faults.emplace_back("the launcher does not blame the rank that was killed");
  }
  for (int rank = 0; rank < plan.ranks; ++rank) {
    if (rank != victim) judge_survivor(result, rank, victim, board[rank], killed_at);
    if (board[rank].pid != 0 && has_process_of_session(board[rank].pid)) {
      result.faults.push_back(c10::str("rank ", rank, " left a process behind"));
    }
  }
  for (const std::string& name : shared_memory_files()) {
    if (!files_before.contains(name) && !is_in_use(name)) {
      result.faults.push_back("left /dev/shm/" + name);
    }
  }
  return result;
}

}  // namespace zeropage
