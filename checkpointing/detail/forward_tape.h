// Sees one forward: each operator before autograd does, and each tensor that autograd saves. It keeps or
// drops what is saved, as its policy says, and gives it back when backward needs it.
//
//   ForwardLog    what the forward did
//   DropPolicy    what is dropped
//   StepMeter     what the step took, for a plan
//   ValueReplay   how a dropped value comes back
//
// Lifetime: shared by the scope of the forward and by the saved tensors of its graph.
// Threads: one runs the forward; any unpack.
// Errors: those of ValueReplay, and of the hooks that kept memory is handed on to.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include <c10/core/DeviceType.h>

#include "checkpointing/detail/drop_policy.h"
#include "checkpointing/detail/forward_log.h"
#include "checkpointing/detail/recompute_account.h"
#include "checkpointing/detail/step_meter.h"
#include "checkpointing/detail/value_replay.h"
#include "operators/operator_interceptor.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::detail {

struct TapeOptions {
  std::unique_ptr<DropPolicy> policy;
  // Set: the step is written down for planning, with the bytes of that device.
  std::optional<c10::DeviceType> measured_device;
  // What is planned goes by this rank's measurements, whatever others measure.
  bool decides_alone = false;
  std::shared_ptr<RecomputeAccount> account;  // of the Recompute
};

class ForwardTape final : public operators::OperatorInterceptor,
                          public std::enable_shared_from_this<ForwardTape> {
 public:
  explicit ForwardTape(TapeOptions options);

  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) override;
  // onward: hooks that take what is kept; null: it stays where it is.
  std::shared_ptr<SavedTensorHooks> hooks(std::shared_ptr<SavedTensorHooks> onward);
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor,
                                     const std::shared_ptr<SavedTensorHooks>& onward);
  void end_forward();

  bool decides_alone() const { return decides_alone_; }
  // Whether the forward did otherwise than the plan's.
  bool departed() const { return policy_->departed(); }
  // Null where the step is not measured. Complete when its backward has ended.
  const StepMeter* meter() const { return meter_.get(); }

 private:
  class Packed;

  void keep_after_all(const Operation& operation, at::ArrayRef<c10::IValue> arguments);
  at::Tensor unpack(const std::shared_ptr<Value>& value, const Geometry& geometry);
  void release(const std::shared_ptr<Value>& value);
  void end_backward();

  const bool decides_alone_;

  std::recursive_mutex mutex_;
  // Guarded by mutex_.
  const std::unique_ptr<DropPolicy> policy_;
  const std::unique_ptr<StepMeter> meter_;
  ForwardAccount account_;
  ForwardLog log_;
  ValueReplay replay_;
  std::shared_ptr<SavedTensorHooks> onward_;  // of the last tensor that was saved
};

}  // namespace zeropage::checkpointing::detail
