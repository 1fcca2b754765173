#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parallel/detail/kept_slices.h"
#include "parallel/detail/kernels.h"
#include "parallel/rank_operators.h"
#include "zeropage/parallel_layers.h"

namespace zeropage::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

variable_list gradient_of_first(at::Tensor gradient) {
  // None for slices, ranks, name and dim.
  return {std::move(gradient), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
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
                            const std::string& name, int64_t dim) {
    detail::KeptSlices::keep(context, slices, ranks, name, dim);
    const int rank = ranks->world.rank();
    return tensor.narrow(dim, slices.begin(rank), slices.size(rank)).contiguous();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const detail::KeptSlices cut("split_to_ranks", context);
    return gradient_of_first(all_gather(gradients[0], cut.sizes, cut.dim, cut.ranks, cut.name));
  }
};

class GatherFromRanks : public torch::autograd::Function<GatherFromRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& slice, const Slices& slices,
                            const RanksPointer& ranks, const std::string& name, int64_t dim) {
    context->saved_data["begin"] = slices.begin(ranks->world.rank());
    context->saved_data["size"] = slices.size(ranks->world.rank());
    context->saved_data["dim"] = dim;
    return all_gather(slice, slices.sizes(), dim, ranks, name);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return gradient_of_first(gradients[0].narrow(context->saved_data["dim"].toInt(),
                                                 context->saved_data["begin"].toInt(),
                                                 context->saved_data["size"].toInt()));
  }
};

class GatherToRanks : public torch::autograd::Function<GatherToRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& slice, const Slices& slices,
                            const RanksPointer& ranks, const std::string& name, int64_t dim) {
    detail::KeptSlices::keep(context, slices, ranks, name, dim);
    return all_gather(slice, slices.sizes(), dim, ranks, name);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const detail::KeptSlices cut("gather_to_ranks", context);
    return gradient_of_first(reduce_scatter(gradients[0], cut.sizes, cut.dim, cut.ranks, cut.name));
  }
};

class ScatterFromRanks : public torch::autograd::Function<ScatterFromRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const Slices& slices, const RanksPointer& ranks,
                            const std::string& name, int64_t dim) {
    detail::KeptSlices::keep(context, slices, ranks, name, dim);
    return reduce_scatter(tensor, slices.sizes(), dim, ranks, name);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const detail::KeptSlices cut("scatter_from_ranks", context);
    return gradient_of_first(all_gather(gradients[0], cut.sizes, cut.dim, cut.ranks, cut.name));
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
                          const std::string& name, int64_t dim) {
  return SplitToRanks::apply(tensor, slices, ranks, name, dim);
}

at::Tensor gather_from_ranks(const at::Tensor& slice, const Slices& slices,
                             const RanksPointer& ranks, const std::string& name, int64_t dim) {
  return GatherFromRanks::apply(slice, slices, ranks, name, dim);
}

at::Tensor gather_to_ranks(const at::Tensor& slice, const Slices& slices, const RanksPointer& ranks,
                           const std::string& name, int64_t dim) {
  return GatherToRanks::apply(slice, slices, ranks, name, dim);
}

at::Tensor scatter_from_ranks(const at::Tensor& tensor, const Slices& slices,
                              const RanksPointer& ranks, const std::string& name, int64_t dim) {
  return ScatterFromRanks::apply(tensor, slices, ranks, name, dim);
}

}  // namespace zeropage::parallel
