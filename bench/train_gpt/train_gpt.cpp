// The measuring instrument: trains a GPT on text, sharded over ranks, and says what it cost.
// train_gpt --help.
#include <iostream>
#include <optional>

#include "bench/train_gpt/flags.h"
#include "bench/train_gpt/simulation.h"
#include "bench/train_gpt/text_data.h"
#include "bench/train_gpt/training.h"
#include "examples/command_line/command_line.h"
#include "zeropage/check.h"
#include "zeropage/zeropage.h"

namespace {

constexpr int kRuntimeError = 1;
// What ranks get after SIGTERM or SIGINT to end their step and save.
constexpr auto kGraceOfSave = std::chrono::minutes(10);

// Calls `action`; an exception becomes one line and the exit code.
template <typename Action>
int reporting(int exit_code, Action action) {
  try {
    action();
    return 0;
  } catch (const std::exception& error) {
    std::cout.flush();
    std::cerr << "train_gpt: " << zeropage::memory::message_of(error) << std::endl;
    return exit_code;
  }
}

zeropage::comm::Transport transport_of(const std::string& flag) {
  using zeropage::comm::Transport;
  if (flag == "gloo") return Transport::kGloo;
  if (flag == "nccl") return Transport::kNccl;
  return flag == "shared" ? Transport::kShared : Transport::kAuto;
}

}  // namespace

int main(int argc, char** argv) {
  train_gpt::Flags flags;
  if (const auto exit_code = train_gpt::parse_flags(argc, argv, flags)) return *exit_code;

  if (const int failed =
          reporting(examples::kUsageError, [&] { train_gpt::check_outputs(flags); })) {
    return failed;
  }
  if (flags.simulates()) {
    return reporting(kRuntimeError, [&] { train_gpt::simulate(flags); });
  }
  // Before there are ranks: a bad path is said once, and local ranks share the text's memory.
  std::optional<train_gpt::TextData> data;
  if (const int failed = reporting(examples::kUsageError,
                                   [&] { data.emplace(flags.data, flags.model.sequence); })) {
    return failed;
  }
  const zeropage::comm::WorldOptions options{
      .deadline = std::chrono::milliseconds(static_cast<int64_t>(flags.deadline_seconds * 1000)),
      .device = flags.device_type(),
      .transport = transport_of(flags.communicator),
      .reduction_order = flags.deterministic ? zeropage::comm::ReductionOrder::kFixed
                                             : zeropage::comm::ReductionOrder::kFast};
  // cuBLAS reads it when the first rank uses it.
  if (flags.deterministic) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  const auto run_rank = [&](zeropage::comm::World& world) {
    flags.ranks = world.size();
    return reporting(kRuntimeError, [&] { train_gpt::train(world, flags, *data); });
  };
  int exit_code = 0;
  const int failed = reporting(kRuntimeError, [&] {
    if (flags.buddy_every > 0) {
      zeropage::survive(
          [&](zeropage::World& world, zeropage::SurvivingRun& surviving) {
            flags.ranks = world.size();
            train_gpt::train(world, flags, *data, &surviving);
          },
          {.copy_every = flags.buddy_every, .world = options, .memory_rungs = flags.memory_rungs});
    } else if (zeropage::comm::launched_by_environment()) {
      auto world = zeropage::comm::World::from_environment(options);
      exit_code = run_rank(world);
    } else {
      exit_code = zeropage::comm::World::launch(
          flags.ranks, run_rank, options,
          {.output = zeropage::comm::LaunchOptions::Output::kRankZeroBare,
           .grace =
               flags.state.saver.on_signal ? kGraceOfSave : zeropage::comm::LaunchOptions().grace});
    }
  });
  return failed != 0 ? failed : exit_code;
}
