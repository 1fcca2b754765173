// The steps of a run whose bytes are recorded (--report, --trace).
#pragma once

#include <cstdint>
#include <optional>

#include "bench/train_gpt/flags.h"
#include "zeropage/profiler.h"

namespace train_gpt {

class ProfiledSteps {
 public:
  // Elements of the whole model, and of the stage or the slices that this rank's wrapper has.
  struct Parameters {
    int64_t of_model = 0;
    int64_t of_rank = 0;
  };

  // Does nothing where no flag asks for it.
  ProfiledSteps(const zeropage::comm::World& world, const Flags& flags,
                const Parameters& parameters);

  // Records that step, from 0 on, while what it returns lives.
  [[nodiscard]] std::optional<zeropage::profile::Profiler::Step> step(int64_t number);
  // Collective.
  void write() const;

 private:
  const Flags& flags_;
  std::optional<zeropage::profile::Profiler> profiler_;
};

}  // namespace train_gpt
