#include "parallel/rank_functions.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parallel/detail/kernels.h"
#include "parallel/rank_operators.h"

namespace zeropage::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor own_slice(const at::Tensor& whole, const Slices& slices, const RanksPointer& ranks) {
  const int rank = ranks->world.rank();
  return whole.narrow(-1, slices.begin(rank), slices.size(rank));
}

class CopyToRanks : public torch::autograd::Function<CopyToRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const RanksPointer& ranks, const std::string& name) {
    context->saved_data["ranks"] = ranks;
    context->saved_data["name"] = name;
    return tensor.view_as(tensor);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string name = context->saved_data["name"].toStringRef();
    detail::refuse_second_derivative("copy_to_ranks", name);
    return {all_reduce(gradients[0], comm::ReduceOp::kSum,
                       context->saved_data["ranks"].toCustomClass<Ranks>(), name),
            at::Tensor(), at::Tensor()};
  }
};

class ReduceFromRanks : public torch::autograd::Function<ReduceFromRanks> {
 public:
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& tensor,
                            const RanksPointer& ranks, const std::string& name) {
    return all_reduce(tensor, comm::ReduceOp::kSum, ranks, name);
  }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& gradients) {
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

class SplitToRanks : public torch::autograd::Function<SplitToRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const Slices& slices, const RanksPointer& ranks,
                            const std::string& name) {
    context->saved_data["ranks"] = ranks;
    context->saved_data["name"] = name;
    context->saved_data["sizes"] = slices.sizes();
    return own_slice(tensor, slices, ranks).contiguous();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string name = context->saved_data["name"].toStringRef();
    detail::refuse_second_derivative("split_to_ranks", name);
    return {all_gather(gradients[0], context->saved_data["sizes"].toIntVector(),
                       context->saved_data["ranks"].toCustomClass<Ranks>(), name),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class GatherFromRanks : public torch::autograd::Function<GatherFromRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& slice, const Slices& slices,
                            const RanksPointer& ranks, const std::string& name) {
    context->saved_data["begin"] = slices.begin(ranks->world.rank());
    context->saved_data["size"] = slices.size(ranks->world.rank());
    return all_gather(slice, slices.sizes(), ranks, name);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {gradients[0].narrow(-1, context->saved_data["begin"].toInt(),
                                context->saved_data["size"].toInt()),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor copy_to_ranks(const at::Tensor& tensor, const RanksPointer& ranks,
                         const std::string& name) {
  return CopyToRanks::apply(tensor, ranks, name);
}

at::Tensor reduce_from_ranks(const at::Tensor& tensor, const RanksPointer& ranks,
                             const std::string& name) {
  return ReduceFromRanks::apply(tensor, ranks, name);
}

at::Tensor split_to_ranks(const at::Tensor& tensor, const Slices& slices, const RanksPointer& ranks,
                          const std::string& name) {
  return SplitToRanks::apply(tensor, slices, ranks, name);
}

at::Tensor gather_from_ranks(const at::Tensor& slice, const Slices& slices,
                             const RanksPointer& ranks, const std::string& name) {
  return GatherFromRanks::apply(slice, slices, ranks, name);
}

}  // namespace zeropage::parallel
