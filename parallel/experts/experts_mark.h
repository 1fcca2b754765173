// The mark of a weight whose experts are cut over ranks (zeropage/expert_parallel.h): a slice, whose norms are those of all experts, and
// whose ranks have tokens of their own. The layer takes it by weight_of_layer().
//
// Lifetime, threads: those of operators/tensor_mark.h.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "parallel/slice_mark.h"

namespace zeropage::parallel::experts {

class ExpertsMark final : public SliceMark {
 public:
  // same: the ranks that have the same experts. whole: the weight before it was cut, where it has no values yet
  // (DeferredModule); else undefined.
  ExpertsMark(std::string who, RanksPointer ranks, SlicedDimension cut, comm::World same,
              at::Tensor whole = {});

  c10::intrusive_ptr<KnownSlice> of_result() const override;
  std::optional<comm::World> same_slices() const override { return same_; }

  // What the constructor of a DeferredModule made, on the meta device; undefined where the weight was cut with its values. Its values
  // are needed once, so it is handed over.
  at::Tensor take_whole_without_values() { return std::exchange(whole_, at::Tensor()); }
  bool is_without_values() const { return whole_.defined(); }

 protected:
  bool takes_slice(const c10::OperatorHandle& /*handle*/,
                   at::ArrayRef<c10::IValue> /*arguments*/) const override {
    return false;
  }
  bool may_be_spread() const override { return false; }
  const char* expected_layer() const override { return "the forward() of its layer"; }
  const char* way_out_of_layer() const override {
    return "convert the module before expert_parallel(), and for figures without a gradient call "
           "detach() first";
  }
  const char* cut_by() const override { return "expert_parallel()"; }

 private:
  const comm::World same_;
  at::Tensor whole_;
};

// Null for a tensor that is no weight of experts that were cut.
ExpertsMark* experts_mark_of(const at::Tensor& tensor);

// A view of the weight that operators take as it is. Its gradient is divided by the ranks along "expert": products add up over the
// tokens of all of them, and a rank's gradient is to be one that the mean over ranks is taken of, as that of what a script computes from the
// weight itself.
at::Tensor weight_of_layer(const at::Tensor& weight, const comm::World& ranks);

}  // namespace zeropage::parallel::experts
