// The mark of a parameter that is whole on all ranks of a tensor-parallel group, and is used on slices: between a
// column-parallel layer and its row. Each rank's gradient is a part then, and the parts are added up in backward.
//
// A parameter of any layer goes through a function that adds up its gradient. What a linear layer gives goes through
// it instead, since the gradient of its input, which is whole, is a part as well.
//
// A layer that has a parameter for each feature, such as PReLU(n), and gets this rank's features throws, also without
// gradients.
//
// Ranks throw where their parts are the same from the first backward on: then the layer saw whole tensors, and the
// sum would be as many times too large. The device is waited for until parts have differed once.
//
// Lifetime, threads: those of operators/tensor_mark.h. Backward is collective.
#pragma once

#include <memory>
#include <string>

#include "operators/tensor_mark.h"
#include "zeropage/detail/slices.h"

namespace zeropage::parallel {

// Whether parts of a gradient have differed, by the operator that they came from.
class PartsSeen;

class BetweenMark final : public operators::TensorMark {
 public:
  enum class Of : uint8_t {
    kParameter,   // of any layer
    kWeight,      // of a linear layer
    kBias,        // of a linear layer
    kTransposed,  // what weight.t() gives
  };
  // What the marks of a layer share.
  struct Layer {
    std::string name;  // for collectives
    std::string who;   // for errors
    RanksPointer ranks;
  };

  BetweenMark(std::shared_ptr<const Layer> layer, Of of);
  BetweenMark(std::shared_ptr<const Layer> layer, Of of, c10::intrusive_ptr<PartsSeen> seen);
  ~BetweenMark() override;

  bool replaces(const c10::OperatorHandle& handle) const override;
  bool run(const c10::OperatorHandle& handle, const at::Tensor& marked,
           torch::jit::Stack& stack) override;

 private:
  bool is_product(const c10::OperatorHandle& handle) const;
  at::Tensor product(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> given) const;
  // A layer that LibTorch would refuse because of its sizes.
  void check_features(const c10::OperatorHandle& handle, const at::Tensor& marked,
                      at::ArrayRef<c10::IValue> arguments) const;
  void add_up_gradient_of(const c10::OperatorHandle& handle, const at::Tensor& marked,
                          torch::jit::Stack& stack) const;

  const std::shared_ptr<const Layer> layer_;
  const Of of_;
  const c10::intrusive_ptr<PartsSeen> seen_;  // shared with what weight.t() gives
};

}  // namespace zeropage::parallel
