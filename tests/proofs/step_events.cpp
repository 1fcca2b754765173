// Prints what one training step asks of an accelerator. `--help` tells what and how.
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/proofs/counted_step.h"
#include "zeropage/check.h"

namespace zeropage::testing {
namespace {

constexpr const char* kHelp = R"(Usage: step_events [options]

Trains a GPT on the fake accelerator and counts, in one step of a rank: kernels launched (operators, copies
and collectives; a copy of a list is one), waits of the host, and bytes copied to the host. Launches and
waits follow from the numbers of parameter tensors and pages, not from the width, so a small width has those
of a large one. Bytes that go with the number of elements do not: run the width itself, or multiply.

What differs on CUDA: the update is one fused kernel a page, and not an operator of torch::optim::SGD for each
parameter, which are most of the phase "step" without an accumulator; the norm's squares are one kernel of
ours each, and not ten of LibTorch's operators; a list of more than 64 tensors takes several kernels.

Options:
  --layers N         of the model (24)
  --width N          of the model, a multiple of 4 (64); 1024 with 24 layers has 303 M parameters
  --stage N          0 to 3 (0)
  --ranks N          1 to 8 (2)
  --micro-steps N    of an accumulator (0: without one)
  --operators        a line for each operator too
  --help             this text

Exit status: 0, or 2 for a wrong command line.
)";

struct CommandLine {
  CountedStepOptions step;
  bool operators = false;
};

int64_t number(const std::string& name, const std::string& value, int64_t least, int64_t most) {
  size_t read = 0;
  int64_t found = -1;
  try {
    found = std::stoll(value, &read);
  } catch (const std::exception&) {
    read = 0;
  }
  ZP_CHECK(read == value.size() && read > 0 && found >= least && found <= most, name,
           ": expected a number from ", least, " to ", most, ", got \"", value, "\"; see --help");
  return found;
}

CommandLine parse(const std::vector<std::string>& arguments) {
  CommandLine line;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    if (name == "--operators") {
      line.operators = true;
      continue;
    }
    ZP_CHECK(i + 1 < arguments.size(), "expected a value after ", name, "; see --help");
    const std::string& value = arguments[++i];
    if (name == "--layers") {
      line.step.layers = number(name, value, 1, 1000);
    } else if (name == "--width") {
      line.step.width = number(name, value, 16, 16384);
      ZP_CHECK(line.step.width % 4 == 0, "--width: expected a multiple of 4, got ", value);
    } else if (name == "--stage") {
      line.step.stage = static_cast<int>(number(name, value, 0, 3));
    } else if (name == "--ranks") {
      line.step.ranks = static_cast<int>(number(name, value, 1, kFakeDevices));
    } else if (name == "--micro-steps") {
      line.step.micro_steps = number(name, value, 0, 1000);
    } else {
      ZP_THROW("no option ", name, "; see --help");
    }
  }
  return line;
}

void print(const PhaseEvents& phase) {
  std::printf("%-24s %10.1f %10.1f %14.0f\n", phase.name.c_str(), phase.launches, phase.host_waits,
              phase.bytes_to_host);
}

void run(const CommandLine& line) {
  const StepEvents events = count_step(line.step);
  std::printf(
      "%lld parameters in %lld tensors and %lld pages; stage %d, %d ranks, %lld micro-steps\n",
      static_cast<long long>(events.parameters), static_cast<long long>(events.tensors),
      static_cast<long long>(events.pages), line.step.stage, line.step.ranks,
      static_cast<long long>(line.step.micro_steps));
  std::printf("%-24s %10s %10s %14s\n", "a rank", "launches", "host waits", "bytes to host");
  for (const PhaseEvents& phase : events.phases) print(phase);
  print(events.total());
  if (!line.operators) return;
  for (const auto& [name, count] : events.launches) std::printf("%10.1f %s\n", count, name.c_str());
}

}  // namespace
}  // namespace zeropage::testing

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  for (const std::string& argument : arguments) {
    if (argument == "--help") return std::fputs(zeropage::testing::kHelp, stdout) < 0;
  }
  zeropage::testing::CommandLine line;
  try {
    line = zeropage::testing::parse(arguments);
  } catch (const std::exception& error) {
    std::cerr << "step_events: " << zeropage::memory::message_of(error) << "\n";
    return 2;
  }
  zeropage::testing::run(line);
  zeropage::testing::finish_fake_work();
  return 0;
}
