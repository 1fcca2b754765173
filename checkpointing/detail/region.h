// A checkpointed region: what its first run leaves behind, and its repetition. See
// checkpointing/checkpoint.h.
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
#include <vector>

#include "checkpointing/detail/captured_tensors.h"
#include "checkpointing/detail/outside_writes.h"
#include "checkpointing/detail/recompute_account.h"
#include "checkpointing/detail/thread_modes.h"
#include "checkpointing/region_options.h"
#include "checkpointing/saved_tensors.h"
#include "memory/ledger.h"
#include "operators/operator_interceptor.h"

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

  struct Input {
    std::string name;
    std::unique_ptr<PackedTensor> packed;  // null for an undefined tensor
    at::Tensor checked;                    // shares the input's version; undefined if hooks took it
    uint32_t version = 0;
    bool requires_grad = false;
    bool is_leaf = true;
  };
  // A tensor that autograd saved in the first run.
  struct Saved {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    c10::Device device;
    uint64_t hash = 0;
    bool wanted = true;     // a node of the graph still has it
    at::Tensor recomputed;  // until it is used
  };

  at::Tensor next_input();
  std::string who() const { return "region \"" + options_.name + "\""; }
  size_t note_saved(const at::Tensor& tensor);
  void forget(size_t index);
  void forget_all();
  at::Tensor take(size_t index);
  void repeat();
  void check_inputs() const;
  // Of a tensor that a repetition saves; true if it was the last that is wanted.
  bool compare_and_keep(size_t index, const at::Tensor& tensor);

  const RegionOptions options_;
  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<RecomputeAccount> account_;
  const std::shared_ptr<SavedTensorHooks> enclosing_;
  const ThreadModes modes_;
  std::optional<RandomState> random_;
  OutsideWrites writes_;
  CapturedTensors captured_;
  std::vector<Input> inputs_;
  std::function<void(const NextInput&)> function_;

  std::recursive_mutex mutex_;
  // Guarded by mutex_.
  std::vector<Saved> saved_;
  size_t next_input_ = 0;
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
  std::optional<memory::InterceptorScope> interceptor_;
  bool any_requires_grad_ = false;
};

}  // namespace zeropage::checkpointing::detail
