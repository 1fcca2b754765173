// A checkpointed region: what its first run leaves behind, and its repetition. See
// zeropage/checkpoint.h.
//
// Lifetime: shared by the packed tensors of the graph that its first run made.
// Threads: one runs it first; any repeats it, one at a time.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "checkpointing/detail/captured_tensors.h"
#include "checkpointing/detail/outside_writes.h"
#include "checkpointing/detail/recompute_account.h"
#include "checkpointing/detail/region_inputs.h"
#include "checkpointing/detail/region_tensors.h"
#include "checkpointing/detail/thread_modes.h"
#include "operators/operator_interceptor.h"
#include "operators/seeded_draws.h"
#include "zeropage/checkpoint.h"
#include "zeropage/ledger.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::detail {

class Region : public std::enable_shared_from_this<Region> {
 public:
  explicit Region(RegionOptions options);

  // Before the first run.
  void keep_input(const at::Tensor& tensor, const std::string& name);
  void set_function(std::function<void(const NextInput&)> function) {
    function_ = std::move(function);
  }

 private:
  friend class RegionForward;
  class FirstRunHooks;
  class RepetitionHooks;
  class RepetitionObserver;
  class Packed;
  struct EarlyStop {};

  std::string who() const { return "region \"" + options_.name + "\""; }
  void forget(size_t index);
  void forget_all();
  at::Tensor take(size_t index);
  void repeat();
  void take_random_state(c10::Device place);
  void note_generator(const at::Generator& generator);

  const RegionOptions options_;
  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<RecomputeAccount> account_;
  const ThreadModes modes_;
  // The seeds of the host's draws; none: random_ has the host's generator.
  std::optional<operators::SeedRecord> seeds_;
  std::optional<RandomState> random_;
  OutsideWrites writes_;
  CapturedTensors captured_;
  RegionInputs inputs_;
  std::function<void(const NextInput&)> function_;

  std::recursive_mutex mutex_;
  // Guarded by mutex_.
  RegionTensors saved_;
};

// The first run, while it lives.
class RegionForward {
 public:
  explicit RegionForward(std::shared_ptr<Region> region);
  ~RegionForward();
  RegionForward(const RegionForward&) = delete;
  RegionForward& operator=(const RegionForward&) = delete;

  void see_result(const at::Tensor& tensor);
  // It has ended without an error.
  void end();

 private:
  class Observer;

  const std::shared_ptr<Region> region_;
  const std::unique_ptr<Observer> observer_;
  const memory::KindScope kind_;
  std::optional<SavedTensorScope> hooks_;
  std::optional<operators::InterceptorScope> interceptor_;
  std::optional<operators::RecordedSeeds> seeds_;
  std::optional<operators::DrawSeedsScope> seeds_scope_;
  bool any_requires_grad_ = false;
};

}  // namespace zeropage::checkpointing::detail
