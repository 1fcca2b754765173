#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/init.h>

#include "parallel/detail/kernels.h"
#include "parallel/detail/sequence_linear.h"
#include "parallel/rank_operators.h"
#include "zeropage/parallel_layers.h"

namespace zeropage::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// copy_to_ranks() of two tensors, by one message.
class CopyTwoToRanks : public torch::autograd::Function<CopyTwoToRanks> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& first,
                               const at::Tensor& second, const RanksPointer& ranks,
                               const std::string& name) {
    context->saved_data["ranks"] = ranks;
    context->saved_data["name"] = name;
    return {first.view_as(first), second.view_as(second)};
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string name = context->saved_data["name"].toStringRef();
    detail::refuse_second_derivative("copy_to_ranks", name);
    const at::Tensor sums =
        all_reduce(at::cat({gradients[0].reshape({-1}), gradients[1].reshape({-1})}),
                   comm::ReduceOp::kSum, context->saved_data["ranks"].toCustomClass<Ranks>(), name);
    const int64_t numel = gradients[0].numel();
    return {sums.narrow(0, 0, numel).view_as(gradients[0]),
            sums.narrow(0, numel, gradients[1].numel()).view_as(gradients[1]), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor split_sequence(const at::Tensor& whole, int64_t dim, const comm::World& world) {
  constexpr const char* kName = "split_sequence";
  const RanksPointer ranks = ranks_of(world);
  const Slices slices = detail::sequence_slices(whole, dim, detail::Sequence::kWhole, ranks, kName);
  return split_to_ranks(whole, slices, ranks, kName, dim);
}

at::Tensor gather_sequence(const at::Tensor& slice, int64_t dim, const comm::World& world) {
  constexpr const char* kName = "gather_sequence";
  const RanksPointer ranks = ranks_of(world);
  const Slices slices = detail::sequence_slices(slice, dim, detail::Sequence::kSlice, ranks, kName);
  return gather_from_ranks(slice, slices, ranks, kName, dim);
}

SequenceParallelLayerNormImpl::SequenceParallelLayerNormImpl(
    const torch::nn::LayerNormOptions& options, const comm::World& world)
    : options_(options), ranks_(ranks_of(world)) {
  reset();
}

std::string SequenceParallelLayerNormImpl::name() const {
  return c10::str("SequenceParallelLayerNorm(", at::IntArrayRef(options_.normalized_shape()), ")");
}

void SequenceParallelLayerNormImpl::reset() {
  const bool affine = options_.elementwise_affine();
  const auto parameter = [&](const at::Tensor& values) { return affine ? values : at::Tensor(); };
  weight = register_parameter("weight", parameter(at::ones(options_.normalized_shape())), affine);
  bias = register_parameter("bias", parameter(at::zeros(options_.normalized_shape())), affine);
}

torch::Tensor SequenceParallelLayerNormImpl::forward(const torch::Tensor& slice) {
  const auto& shape = options_.normalized_shape();
  if (!options_.elementwise_affine()) return at::layer_norm(slice, shape, {}, {}, options_.eps());
  const variable_list whole = CopyTwoToRanks::apply(weight, bias, ranks_, name());
  return at::layer_norm(slice, shape, whole[0], whole[1], options_.eps());
}

void SequenceParallelLayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << "zeropage::" << name();
}

}  // namespace zeropage::parallel
