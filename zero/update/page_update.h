// What updates the part of a page that this rank owns, once its gradient is there.
//
// Threads: the training thread. On an accelerator updates are enqueued to its current stream.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/optim/optimizer.h>

#include "optim/fused_step.h"
#include "zero/gradients/gradient_presence.h"
#include "zero/layout/shard_layout.h"
#include "zero/pages/memory_holders.h"
#include "zero/tiers/tier_storage.h"
#include "zeropage/detail/state_format.h"

namespace zeropage::zero {

// The part of a page that this rank owns. Always the same memory.
struct OwnedPart {
  at::Tensor values;  // [owned numel]: the parameters', or their fp32 master weights
  // [owned numel]: the parameters', which take over the master weights, rounded; undefined where
  // there are none.
  at::Tensor copy_out = {};
  // copy_out is the parameters themselves, not a way to them: master weights follow what the user
  // wrote there.
  bool adopts_copy = false;
  at::Tensor remainders = {};  // [owned numel] int16: of values that are the parameters', what
                               // makes fp32 master weights of them; undefined where there are none
  uint64_t rounding_seed = 0;  // of states in bf16
  // Where state lives: null for the device of the values.
  TierStorage* states = nullptr;
  size_t page = 0;  // there
};

// What of it is one parameter's.
struct ParameterShard {
  size_t parameter = 0;
  Range range;  // in the owned part
  // Its first element's place in the parameter, as it lies in memory.
  int64_t first_element = 0;
  // Elements after it that belong to nothing and are zero, in values and gradient.
  int64_t padding = 0;
  std::vector<int64_t> sizes = {};  // of the parameter
  // Format of the parameter's states, where the update is fused.
  StateFormat state_format = StateFormat::kFp32;
  // It is frozen for now: its states are made when it steps first.
  bool frozen = false;
};

// A parameter group of the user, as far as it lies in the owned part.
struct OwnedGroup {
  size_t number = 0;                   // among the user's
  std::vector<ParameterShard> shards;  // one or more
  std::unique_ptr<torch::optim::OptimizerOptions> options;
};

// The state of one parameter as far as this rank owns it, to be saved or loaded.
struct OwnedState {
  struct Tensor {
    std::string name;   // "exp_avg"
    at::Tensor values;  // [range.numel()], fp32 or bf16
  };

  size_t parameter = 0;
  Range range;        // in the owned part
  int64_t steps = 0;  // made so far
  std::vector<Tensor> tensors = {};
  // Those that are not of the parameter's shape, in their own, fp32. Each rank that has a part of the parameter has all of them,
  // with the same values.
  std::vector<Tensor> whole_tensors = {};
  // Whether tensors of other names may be added when it is loaded: a class that has not stepped yet
  // does not tell which it has.
  bool takes_others = false;
};

enum class StateAccess : uint8_t {
  kDescribe,  // tensors have their dtypes and sizes, and may have no values
  kRead,
  kWrite,  // what the visitor leaves in it is the state from then on
};

// What the second pass of an update goes along, where there are two (optim/tensor_form.h).
struct Directions {
  at::Tensor values =
      {};  // [owned numel] fp32, beside the part's values; undefined: there is one pass
  // By which a parameter's are multiplied.
  std::function<double(size_t parameter)> factor = nullptr;
};

class FactoredParameters;

class PageUpdate {
 public:
  virtual ~PageUpdate() = default;
  PageUpdate(const PageUpdate&) = delete;
  PageUpdate& operator=(const PageUpdate&) = delete;

  virtual void add_groups(std::vector<OwnedGroup> groups) = 0;
  // The options of a group from the next step on; groups are counted as they were added, and are no more than
  // lie in the owned part.
  virtual void set_options(size_t group, const torch::optim::OptimizerOptions& options) = 0;
  // gradient: [owned numel], other memory in each step; undefined where no parameter has one. Leaves
  // parameters without a gradient alone, and their state. Gradients are multiplied by the
  // scale, in fp32, first of all; in place or not. REQUIRES: no found_inf, or reads_found_inf(). Where there are
  // two passes it is the second one, after the first.
  virtual void step(const at::Tensor& gradient, const HasGradient& has_gradient,
                    const optim::GradientFactors& factors, const Directions& directions) = 0;

  // The first pass, of the parameters whose update has two, with what step() will be given. Writes a direction for each
  // of their elements to `directions`, [owned numel] fp32. on_values is called when that has their values, before.
  virtual void make_directions(const at::Tensor& gradient, const HasGradient& has_gradient,
                               const optim::GradientFactors& factors, const at::Tensor& directions,
                               const std::function<void()>& on_values);
  // What its first pass reads sums over rows and columns of; null: nothing.
  virtual FactoredParameters* factored() { return nullptr; }

  // Whether a device's flag can keep step() from changing anything.
  virtual bool reads_found_inf() const { return false; }
  // The last step() found that flag set, and does not count. REQUIRES: reads_found_inf().
  virtual void uncount_step() {}

  // Calls visit for each shard that was added, in that order; a parameter may come in several. Its
  // tensors are the state's own memory, or a copy in fp32 of states in 8 bits.
  using VisitState = std::function<void(OwnedState&)>;
  virtual void visit_states(StateAccess access, const VisitState& visit) = 0;
  // Calls visit for the memory of its states on the device of the values. What it makes anew at each change of its
  // calls goes.
  virtual void visit_memory(const VisitMemory& visit) = 0;
  // Steps of the optimizer so far, for what counts them itself.
  virtual void set_updates(int64_t updates) = 0;

 protected:
  PageUpdate() = default;
};

// An update that has one pass is not asked.
inline void PageUpdate::make_directions(const at::Tensor& /*gradient*/,
                                        const HasGradient& /*has_gradient*/,
                                        const optim::GradientFactors& /*factors*/,
                                        const at::Tensor& /*directions*/,
                                        const std::function<void()>& /*on_values*/) {
  TORCH_INTERNAL_ASSERT(false, "the update has one pass");
}

using MakePageUpdate = std::function<std::unique_ptr<PageUpdate>(OwnedPart)>;

}  // namespace zeropage::zero
