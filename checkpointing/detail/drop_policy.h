// Which of the values that autograd saves are dropped: a policy a class.
//
// Lifetime: of one forward. It holds values weakly.
// Threads: the tape that records guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

#include "checkpointing/detail/recorded_forward.h"
#include "checkpointing/detail/value_table.h"
#include "checkpointing/recompute_plan.h"

namespace zeropage::checkpointing::detail {

class DropPolicy {
 public:
  // least_bytes: smaller values stay.
  explicit DropPolicy(int64_t least_bytes) : least_bytes_(least_bytes) {}
  virtual ~DropPolicy() = default;
  DropPolicy(const DropPolicy&) = delete;
  DropPolicy& operator=(const DropPolicy&) = delete;

  int64_t least_bytes() const { return least_bytes_; }
  // Whether a policy may drop the value at all.
  bool may_drop(const Value& value) const {
    return (value.bytes >= least_bytes_ || (decides_by_operators() && value.chain_gathers)) &&
           value.can_be_made_again();
  }

  // The forward is about to run an operator that is made of others, which it then runs one by one.
  virtual void see_arguments(at::ArrayRef<c10::IValue> /*arguments*/) {}
  // The forward is about to run that operator.
  virtual void see(const Operation& /*operation*/, at::ArrayRef<c10::IValue> /*arguments*/) {}
  // Whether the operator that is about to run reads a value that was dropped, and is to be kept after all.
  virtual bool keeps_after_all(const Value& /*value*/) const { return false; }
  // Whether the value goes as soon as it is saved. REQUIRES: may_drop().
  virtual bool drops(Value& value) const = 0;
  // The value is kept. By default it is kept for good, so its producer is let go.
  virtual void keep(const std::shared_ptr<Value>& value, const ValueTable& /*values*/) {
    value->producer.reset();
  }
  // The forward has ended, after so many operators.
  virtual void end_forward(size_t /*operators*/) {}
  // Whether the forward did otherwise than the plan's.
  virtual bool departed() const { return false; }

 private:
  // Whether drops() goes by what the forward runs, and not by the sizes of its tensors. Then a small value whose replay gathers
  // pages is dropped as a large one is: another rank's may be large, and ranks must gather the same pages.
  virtual bool decides_by_operators() const { return false; }

  const int64_t least_bytes_;
};

// What takes no matrix product to compute again is dropped.
class SelectiveDrops final : public DropPolicy {
 public:
  using DropPolicy::DropPolicy;
  bool drops(Value& value) const override;

 private:
  bool decides_by_operators() const override { return true; }
};

// All stays while saved tensors fit, then those go first that are cheapest to bring back.
class CheapestDrops final : public DropPolicy {
 public:
  // limit_bytes: of activations.
  CheapestDrops(int64_t least_bytes, int64_t limit_bytes)
      : DropPolicy(least_bytes), limit_bytes_(limit_bytes) {}

  // Throws where ranks exchange rows of experts, of which each gets its own number, in a forward that gathers pages.
  void see(const Operation& operation, at::ArrayRef<c10::IValue> arguments) override;
  bool drops(Value& /*value*/) const override { return false; }
  void keep(const std::shared_ptr<Value>& value, const ValueTable& values) override;
  void end_forward(size_t operators) override;

 private:
  std::shared_ptr<Value> cheapest() const;

  const int64_t limit_bytes_;
  bool gathers_ = false;
  bool exchanges_rows_ = false;
  std::vector<std::weak_ptr<Value>> kept_;  // that may be dropped yet
};

// What a block makes is dropped, but for what another part of the forward reads: the next block's input. A block begins with the
// first operator that takes one of its parameters, and ends with one that takes a parameter of another block or of none.
class BlockDrops final : public DropPolicy {
 public:
  // blocks: the parameters of each, in the order of the forward.
  BlockDrops(int64_t least_bytes, const std::vector<std::vector<at::Tensor>>& blocks);

  void see_arguments(at::ArrayRef<c10::IValue> arguments) override;
  void see(const Operation& operation, at::ArrayRef<c10::IValue> arguments) override;
  bool drops(Value& value) const override;
  bool keeps_after_all(const Value& value) const override;

 private:
  bool decides_by_operators() const override { return true; }
  static constexpr int kNone = -1;
  int block_of(const Value& value) const;

  const int last_;
  std::unordered_map<const c10::StorageImpl*, int> block_of_storage_;
  std::vector<int> block_of_operation_;  // by Operation::index
  int now_ = kNone;
};

// What a measured forward was, and which of its values are dropped.
struct ForwardPlan {
  std::vector<size_t> signatures;  // of its operators
  RecomputePlan plan;              // by the index of its values
};

// A plan says. From where the forward departs from it, as CheapestDrops.
class PlannedDrops final : public DropPolicy {
 public:
  PlannedDrops(std::shared_ptr<const ForwardPlan> plan, int64_t least_bytes, int64_t limit_bytes)
      : DropPolicy(least_bytes), plan_(std::move(plan)), unplanned_(least_bytes, limit_bytes) {}

  void see(const Operation& operation, at::ArrayRef<c10::IValue> arguments) override;
  bool drops(Value& value) const override;
  void keep(const std::shared_ptr<Value>& value, const ValueTable& values) override;
  void end_forward(size_t operators) override;
  bool departed() const override { return departed_; }

 private:
  const std::shared_ptr<const ForwardPlan> plan_;
  CheapestDrops unplanned_;
  bool departed_ = false;
};

}  // namespace zeropage::checkpointing::detail
