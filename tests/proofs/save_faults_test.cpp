// Nothing is lost: a save that is killed at any of its system calls, or any of whose calls fails, leaves
// the state before or the new one, bit for bit; and training goes on.
//
// A save is made by a forked process, whose ranks are threads; who looks at what it left is torch-free.
#include <cerrno>
#include <set>
#include <sys/wait.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/faulty_calls.h"
#include "tests/harness/restarts.h"
#include "zeropage/saved_state.h"
#include "zeropage/state_folder.h"

namespace zeropage::save_faults_test {
namespace {

using namespace zeropage::testing;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

using Files = std::map<std::string, std::string>;

// In a process of its own. Returns what it returns, or 128 + the signal that ended it.
int in_child(const std::function<int()>& action) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 99;
    // LibTorch makes its thread pool anew after a fork, at this call, which two threads must not make at once.
    at::set_num_threads(1);
    try {
      code = action();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", memory::message_of(error).c_str());
    }
    std::fflush(nullptr);
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// What a save finds in the folder, and where it goes.
struct Scenario {
  const char* name;
  std::string before;  // the state that is there; "": none
  std::string after;   // that is saved
  int64_t keep_last = 0;
  bool asynchronous = false;
};

const std::vector<Scenario> kScenarios = {
    {"the first one", "", "step-1"},
    {"a newer one", "step-1", "step-2"},
    {"one in the place of another", "step-2", "step-2"},
    {"one that takes the place of the oldest", "step-1", "step-2", 1},
    {"beside training", "step-1", "step-2", 0, true},
};

class SaveFaults : public ::testing::Test {
 protected:
  static constexpr int kRanks = 2;

  // What LibTorch and Zeropage do once in a process is done before the hundreds of forks: LibTorch compiles scripts of its own at
  // its first archive.
  static void SetUpTestSuite() {
    const DiskFolder folder;
    train_and("", [&](auto& model, auto& optimizer) {
      save_state(folder.path() + "/step-1", model, optimizer, {.step = 1});
    });
    train_and(folder.path(), [](auto&, auto&) {});
    // A fork has only the thread that made it. Those that asked the store may still be on their way out.
    const auto give_up_at = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (threads_of_this_process() > 1 && std::chrono::steady_clock::now() < give_up_at) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ASSERT_EQ(threads_of_this_process(), 1);
  }

  static std::ptrdiff_t threads_of_this_process() {
    return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
  }

  // Loads what is there, makes a step, and calls save.
  template <typename Save>
  static void train_and(const std::string& folder, const Save& save) {
    run_ranks(kRanks, [&](comm::World& world) {
      DistributedDataParallel<Oddball> model(make<Oddball>(), world, Setting{3, kRanks}.all());
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
      if (!folder.empty()) load_state(folder, model, optimizer);
      train_step(model, optimizer, 0);
      save(model, optimizer);
    });
  }

  static int64_t step_of(const std::string& name) { return std::stoll(name.substr(5)); }

  static void save(const std::string& folder, const Scenario& scenario,
                   DistributedDataParallelBase& model, ShardedOptimizer& optimizer) {
    const RunState run{.step = step_of(scenario.after)};
    StateSaver saver(folder, model.world(),
                     {.keep_last = scenario.keep_last, .asynchronous = scenario.asynchronous});
    saver.save(model, optimizer, run);
    saver.wait();
  }

  // The state before, and the new one as an undisturbed save leaves it.
  void prepare(const Scenario& scenario) {
    folder_ = c10::str(disk_.path(), "/", prepared_++);
    if (!scenario.before.empty()) {
      ASSERT_EQ(in_child([&] {
                  train_and("", [&](auto& model, auto& optimizer) {
                    save_state(folder_ + "/" + scenario.before, model, optimizer,
                               {.step = step_of(scenario.before)});
                  });
                  return 0;
                }),
                0);
      before_ = files_of(folder_ + "/" + scenario.before);
    }
    const std::string undisturbed = folder_ + "-undisturbed";
    copy(undisturbed);
    ASSERT_EQ(in_child([&] {
                train_and(scenario.before.empty() ? "" : undisturbed,
                          [&](auto& model, auto& optimizer) {
                            count_calls(undisturbed, model.world());
                            save(undisturbed, scenario, model, optimizer);
                            write_count(undisturbed, model.world());
                          });
                return 0;
              }),
              0);
    after_ = files_of(undisturbed + "/" + scenario.after);
    std::ifstream(undisturbed + ".calls") >> calls_;
    ASSERT_GT(calls_, 30);
  }

  // A fresh copy of what is there before.
  void copy(const std::string& to) const {
    std::filesystem::remove_all(to);
    std::filesystem::create_directories(folder_);
    std::filesystem::copy(
        folder_, to,
        std::filesystem::copy_options::recursive | std::filesystem::copy_options::copy_symlinks);
  }

  static void count_calls(const std::string& folder, const comm::World& world) {
    plan_on_rank_zero({.folder = folder}, world);
  }
  // All ranks go on when it is planned.
  static void plan_on_rank_zero(const FaultPlan& plan, const comm::World& world) {
    world.communicator().barrier("before the plan").wait();
    if (world.rank() == 0) plan_faults(plan);
    world.communicator().barrier("the plan").wait();
  }
  static void write_count(const std::string& folder, const comm::World& world) {
    world.communicator().barrier("the end of the save").wait();
    if (world.rank() == 0) std::ofstream(folder + ".calls") << calls_so_far();
  }

  bool is_before(const std::filesystem::path& state) const {
    return !before_.empty() && files_of(state) == before_;
  }
  bool is_after(const std::filesystem::path& state) const { return files_of(state) == after_; }

  // Whether what a run would go on from is the state before, or the new one; nothing only where there was
  // nothing.
  ::testing::AssertionResult is_whole(const std::string& folder, const Scenario& scenario) const {
    std::filesystem::path found;
    try {
      found = state::find_state(folder);
      state::SavedState(found).verify();
    } catch (const std::exception& error) {
      if (scenario.before.empty() && !std::filesystem::exists(folder + "/" + scenario.after)) {
        return ::testing::AssertionSuccess();
      }
      return ::testing::AssertionFailure() << error.what();
    }
    if (is_before(found) || is_after(found)) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << found << " is neither";
  }

  const DiskFolder disk_;
  int prepared_ = 0;
  std::string folder_;
  Files before_, after_;
  int64_t calls_ = 0;
};

TEST_F(SaveFaults, KilledAtAnyCallItLeavesTheStateBeforeOrTheNewOne) {
  for (const Scenario& scenario : kScenarios) {
    SCOPED_TRACE(scenario.name);
    before_.clear();
    ASSERT_NO_FATAL_FAILURE(prepare(scenario));
    const std::string folder = folder_ + "-killed";
    for (int64_t call = 1; call <= calls_; ++call) {
      SCOPED_TRACE(c10::str("call ", call, " of ", calls_));
      copy(folder);
      const int code = in_child([&] {
        train_and(scenario.before.empty() ? "" : folder, [&](auto& model, auto& optimizer) {
          plan_on_rank_zero({.folder = folder, .fault = Fault::kKill, .at = call}, model.world());
          save(folder, scenario, model, optimizer);
        });
        return 0;
      });
      // Threads may make a call less or more.
      EXPECT_TRUE(code == 128 + SIGKILL || (code == 0 && call > calls_ - 8)) << code;
      EXPECT_TRUE(is_whole(folder, scenario));
    }
    // And the next save ends as if nothing had been.
    EXPECT_EQ(in_child([&] {
                train_and("", [&](auto& model, auto& optimizer) {
                  save(folder, scenario, model, optimizer);
                });
                return 0;
              }),
              0);
    state::SavedState(state::find_state(folder)).verify();
  }
}

// Training goes on after it, and what is there loads.
TEST_F(SaveFaults, WhereAnyCallFailsTheErrorHasItsNameAndTrainingGoesOn) {
  const Scenario scenario = kScenarios[1];
  ASSERT_NO_FATAL_FAILURE(prepare(scenario));
  const std::string folder = folder_ + "-failed";
  struct Kind {
    const char* name;
    Fault fault;
    int error;
    bool for_good;
  };
  for (const Kind kind :
       {Kind{"EIO", Fault::kFail, EIO, false}, Kind{"ENOSPC for good", Fault::kFail, ENOSPC, true},
        Kind{"EINTR", Fault::kFail, EINTR, false}, Kind{"short", Fault::kShort, 0, true}}) {
    SCOPED_TRACE(kind.name);
    const bool harmless = kind.fault == Fault::kShort;
    for (int64_t call = 1; call <= (harmless ? 1 : calls_); ++call) {
      SCOPED_TRACE(c10::str("call ", call, " of ", calls_));
      copy(folder);
      const int code = in_child([&] {
        train_and(folder, [&](auto& model, auto& optimizer) {
          plan_on_rank_zero({.folder = folder,
                             .fault = kind.fault,
                             .at = call,
                             .error = kind.error,
                             .for_good = kind.for_good},
                            model.world());
          const std::string error = error_of([&] { save(folder, scenario, model, optimizer); });
          const std::string at = faulty_call();
          plan_on_rank_zero({}, model.world());
          const bool said = error.find(std::strerror(kind.error)) != std::string::npos &&
                            error.find(folder) != std::string::npos;
          if (!error.empty() && !said) throw std::runtime_error(at + " said: " + error);
          if (!error.empty() && harmless) throw std::runtime_error(error);
          // Whatever cannot lose anything may fail in silence.
          static const std::set<std::string> kMayFail = {"close", "unlink", "rmdir"};
          if (error.empty() && !at.empty() && !harmless && kind.error != EINTR &&
              !kMayFail.contains(at)) {
            // A call of the removal of what is not needed any more, or of a direct access that is not
            // to be had.
            if (at != "open") throw std::runtime_error(at + " failed in silence");
          }
          train_step(model, optimizer, 1);
          load_state(folder, model, optimizer);
          save(folder, scenario, model, optimizer);
        });
        return 0;
      });
      EXPECT_EQ(code, 0);
      EXPECT_TRUE(is_whole(folder, scenario) ||
                  state::find_state(folder).filename() == scenario.after);
    }
  }
}

}  // namespace
}  // namespace zeropage::save_faults_test
