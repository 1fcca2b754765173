#include "parallel/detail/sequence_linear.h"

#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parallel/detail/kept_slices.h"
#include "parallel/rank_operators.h"
#include "zeropage/check.h"
#include "zeropage/parallel_layers.h"

namespace zeropage::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// [..., features] -> [rows, features]
at::Tensor by_rows(const at::Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-1)});
}

class LinearOfGathered : public torch::autograd::Function<LinearOfGathered> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& slice,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const Slices& slices, const RanksPointer& ranks,
                            const std::string& name, int64_t dim) {
    detail::KeptSlices::keep(context, slices, ranks, name, dim);
    context->saved_data["has_bias"] = bias.has_value();
    const at::Tensor output =
        at::linear(all_gather(slice, slices.sizes(), dim, ranks, name), weight, bias);
    context->save_for_backward({slice, weight});
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const detail::KeptSlices kept("linear_of_gathered", context);
    const auto saved = context->get_saved_variables();
    const at::Tensor &slice = saved[0], &weight = saved[1], &gradient = gradients[0];
    const at::Tensor rows = by_rows(gradient);
    variable_list of_inputs(kInputs);
    if (context->needs_input_grad(kWeight)) {
      const at::Tensor whole = all_gather(slice, kept.sizes, kept.dim, kept.ranks, kept.name);
      of_inputs[kWeight] = rows.t().mm(by_rows(whole));
    }
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(kBias)) {
      of_inputs[kBias] = rows.sum(0);
    }
    if (context->needs_input_grad(kSlice)) {
      of_inputs[kSlice] =
          reduce_scatter(gradient.matmul(weight), kept.sizes, kept.dim, kept.ranks, kept.name);
    }
    return of_inputs;
  }

 private:
  static constexpr size_t kSlice = 0, kWeight = 1, kBias = 2, kInputs = 7;
};

class ScatteredSum : public torch::autograd::Function<ScatteredSum> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& partial,
                            const at::Tensor& bias, const Slices& slices, const RanksPointer& ranks,
                            const std::string& name, int64_t dim) {
    detail::KeptSlices::keep(context, slices, ranks, name, dim);
    return reduce_scatter(partial, slices.sizes(), dim, ranks, name).add_(bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const detail::KeptSlices kept("scattered_sum", context);
    const at::Tensor whole = all_gather(gradients[0], kept.sizes, kept.dim, kept.ranks, kept.name);
    return {whole, by_rows(whole).sum(0), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

namespace detail {

Slices sequence_slices(const at::Tensor& tensor, int64_t dim, Sequence of,
                       const RanksPointer& ranks, const std::string& name) {
  ZP_CHECK(dim >= 0 && dim + 1 < tensor.dim(), name,
           ": expected a tensor with the sequence in dimension ", dim,
           " and features in a later one, got sizes ", tensor.sizes(),
           "; the dimension is counted from 0");
  const int size = ranks->world.size();
  const int64_t length = of == Sequence::kSlice ? tensor.size(dim) * size : tensor.size(dim);
  ZP_CHECK(length > 0 && length % size == 0, name, ": expected a sequence whose length ", size,
           " ranks divide, got ", length, " in dimension ", dim, " of sizes ", tensor.sizes(),
           "; pad it");
  return {length, /*unit=*/1, size, name};
}

at::Tensor linear_of_gathered(const at::Tensor& slice, const at::Tensor& weight,
                              const at::Tensor& bias, int64_t dim, const RanksPointer& ranks,
                              const std::string& name) {
  const Slices slices = sequence_slices(slice, dim, Sequence::kSlice, ranks, name);
  const auto given = bias.defined() ? std::optional(bias) : std::nullopt;
  return LinearOfGathered::apply(slice, weight, given, slices, ranks, name, dim);
}

at::Tensor scattered_sum(const at::Tensor& partial, const at::Tensor& bias, int64_t dim,
                         const RanksPointer& ranks, const std::string& name) {
  const Slices slices = sequence_slices(partial, dim, Sequence::kWhole, ranks, name);
  if (!bias.defined()) return scatter_from_ranks(partial, slices, ranks, name, dim);
  return ScatteredSum::apply(partial, bias, slices, ranks, name, dim);
}

}  // namespace detail
}  // namespace zeropage::parallel
