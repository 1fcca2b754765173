// What one training step asks of an accelerator: kernels launched, waits of the host, bytes copied to
// the host. Counted on tests/harness/fake_accelerator, where it follows from the operators called and
// from nothing else. `step_events --help` says what the figures of CUDA are beside them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zeropage::testing {

struct CountedStepOptions {
  // A GPT of 12 layers width^2 parameters and 4 + 12 layers tensors. Pages are of as many layers as
  // 64 MiB are at width 1024, so that launches do not depend on the width.
  int64_t layers = 24;
  int64_t width = 64;
  int stage = 0;
  int ranks = 2;
  int64_t micro_steps = 0;  // of an accumulator; 0: without one
};

struct PhaseEvents {
  std::string name;
  double launches = 0;
  double host_waits = 0;
  double bytes_to_host = 0;
};

// All figures are the mean of the ranks'.
struct StepEvents {
  int64_t parameters = 0;  // elements
  int64_t tensors = 0;
  int64_t pages = 0;
  std::vector<PhaseEvents> phases;         // forward and backward; step
  std::map<std::string, double> launches;  // by operator

  double launches_of(const std::string& name) const {
    const auto found = launches.find(name);
    return found == launches.end() ? 0 : found->second;
  }
  PhaseEvents total() const;
};

// The third step of a training that changes nothing from step to step.
StepEvents count_step(const CountedStepOptions& options);

}  // namespace zeropage::testing
