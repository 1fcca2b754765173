// The steps of a run whose bytes are recorded (--report, --trace).
#pragma once

#include <cstdint>
#include <optional>

#include "examples/train_gpt/flags.h"
#include "profile/profiler.h"

namespace train_gpt {

class ProfiledSteps {
 public:
  // Does nothing where no flag asks for it. parameters: elements of the model.
  ProfiledSteps(const zeropage::comm::World& world, const Flags& flags, int64_t parameters);

  // Records that step, from 0 on, while what it returns lives.
  [[nodiscard]] std::optional<zeropage::profile::Profiler::Step> step(int64_t number);
  // Collective.
  void write() const;

 private:
  const Flags& flags_;
  std::optional<zeropage::profile::Profiler> profiler_;
};

}  // namespace train_gpt
