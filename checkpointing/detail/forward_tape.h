// Records one forward, decides of each tensor that autograd saves whether its memory stays, and
// brings back what did not when backward needs it.
//
// Lifetime: shared by the scope of the forward and by the saved tensors of its graph.
// Threads: one runs the forward; any unpack.
// Errors: those of bring_back.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpointing/detail/recompute_account.h"
#include "checkpointing/detail/recorded_forward.h"
#include "checkpointing/recompute_plan.h"
#include "checkpointing/saved_tensors.h"
#include "memory/ledger.h"
#include "operators/operator_interceptor.h"

namespace zeropage::checkpointing::detail {

// What a measured forward was, and which of its values are dropped.
struct ForwardPlan {
  std::vector<size_t> signatures;  // of its operators
  RecomputePlan plan;              // by the index of its values
};

// By what the tape decides.
struct TapeOptions {
  enum class Rule : uint8_t {
    kSelective,  // what takes no matrix product to compute again is dropped
    kPlanned,    // `plan` says; from where the forward departs from it, as kEvicting
    kEvicting,  // all stays while saved tensors fit `limit_bytes`, then the cheapest to bring back go
  };
  Rule rule = Rule::kSelective;
  int64_t least_bytes = 0;  // smaller values stay
  int64_t limit_bytes = 0;
  std::shared_ptr<const ForwardPlan> plan;
  bool measures = false;  // the step is written down for planning
  // What is planned goes by this rank's measurements, whatever others measure.
  bool decides_alone = false;
  c10::DeviceType device = c10::DeviceType::CPU;
};

class ForwardTape final : public memory::OperatorInterceptor,
                          public std::enable_shared_from_this<ForwardTape> {
 public:
  explicit ForwardTape(TapeOptions options);

  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) override;
  std::shared_ptr<SavedTensorHooks> hooks();
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor);
  void end_forward();

  bool decides_alone() const { return options_.decides_alone; }
  // Whether the forward did otherwise than the plan's.
  bool departed() const { return departed_; }
  // REQUIRES: it measures, and its backward has ended.
  RecordedStep recorded_step() const;
  const std::vector<size_t>& signatures() const { return signatures_; }
  // Names of the operators, by index.
  const std::vector<std::string>& names() const { return names_; }

 private:
  class Packed;

  std::shared_ptr<Operation> record(const c10::OperatorHandle& handle, const OperatorFacts& facts,
                                    at::ArrayRef<c10::IValue> arguments);
  Operation::Tensor record_tensor(const at::Tensor& tensor, Operation& operation);
  void note_results(const std::shared_ptr<Operation>& operation, at::ArrayRef<c10::IValue> results);
  void make_room_for_writes(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments,
                            const std::shared_ptr<Operation>& operation);
  void follow_plan(const Operation& operation);
  const std::shared_ptr<const ThreadModes>& modes_now();

  std::shared_ptr<Value> find(const at::Tensor& tensor);
  std::shared_ptr<Value> add(const at::Tensor& tensor, Value::Source source,
                             std::shared_ptr<Operation> producer);
  void forget_dead_storages();
  bool takes_flops(Value& value) const;
  bool stays(Value& value) const;
  void evict_down_to_limit();

  at::Tensor unpack(const std::shared_ptr<Value>& value, const Geometry& geometry);
  void release(Value& value);
  void drop_again();
  bool counts(const Value& value) const {
    return value.saved && value.source != Value::Source::kLeaf;
  }
  void tick(Event event, const Value& value);

  const TapeOptions options_;
  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<RecomputeAccount> account_;
  const std::shared_ptr<HeldBytes> held_bytes_ = std::make_shared<HeldBytes>(0);

  // Of the forward's thread.
  std::shared_ptr<Operation> current_;
  std::shared_ptr<const ThreadModes> modes_;
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Value>> values_;
  std::vector<std::pair<std::shared_ptr<Value>, at::Tensor>> written_;  // by the current operator
  size_t forget_at_ = 256;
  size_t next_value_ = 0;
  double flops_ = 0;
  bool departed_ = false;
  int64_t largest_bytes_ = 0;

  mutable std::recursive_mutex mutex_;
  // Guarded by mutex_.
  std::vector<std::weak_ptr<Value>> evictable_;
  std::vector<std::weak_ptr<Value>> brought_back_;  // with a graph that is retained
  int drops_again_after_ = -1;                      // the backward
  std::vector<size_t> signatures_;
  std::vector<std::string> names_;
  RecordedStep step_;
  std::vector<bool> needed_;
};

}  // namespace zeropage::checkpointing::detail
