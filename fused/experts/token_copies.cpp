#include "fused/experts/token_copies.h"

#include <tuple>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "fused/operators.h"

namespace zeropage::fused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<Tensor, Tensor>;

Tensor token_of_row(const Tensor& copy_of_row, int64_t active) {
  return copy_of_row.div(active, "floor");
}

// The row of each token's copy number `copy`. [tokens]
Tensor rows_of(const Tensor& row_of_copy, int64_t active, int64_t copy) {
  return row_of_copy.view({-1, active}).select(1, copy).contiguous();
}

// weights: undefined, or [tokens, active].
Tensor add_copies(const Tensor& rows, const Tensor& weights, const Tensor& row_of_copy,
                  int64_t active) {
  const auto wide = wide_type(rows);
  Tensor sum;
  for (int64_t copy = 0; copy < active; ++copy) {
    Tensor part = rows.index_select(0, rows_of(row_of_copy, active, copy)).to(wide);
    if (weights.defined()) part.mul_(weights.narrow(1, copy, 1));
    sum = copy == 0 ? part : sum.add_(part);
  }
  return sum.to(rows.scalar_type());
}

Tensor copies_forward(const Tensor& tokens, const Tensor& copy_of_row,
                      const Tensor& /*row_of_copy*/, int64_t active) {
  return tokens.index_select(0, token_of_row(copy_of_row, active));
}

Tensor copies_backward(const Tensor& gradient, const Tensor& row_of_copy, int64_t active) {
  return add_copies(gradient, Tensor(), row_of_copy, active);
}

class Copies : public torch::autograd::Function<Copies> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& tokens, const Tensor& copy_of_row,
                        const Tensor& row_of_copy, int64_t active) {
    context->save_for_backward({row_of_copy});
    context->saved_data["active"] = active;
    return copies_forward(tokens, copy_of_row, row_of_copy, active);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative("copies_of_tokens()");
    return {copies_backward(gradients[0], context->get_saved_variables()[0],
                            context->saved_data["active"].toInt()),
            Tensor(), Tensor(), Tensor()};
  }
};

Tensor copies_with_gradients(const Tensor& tokens, const Tensor& copy_of_row,
                             const Tensor& row_of_copy, int64_t active) {
  return Copies::apply(tokens, copy_of_row, row_of_copy, active);
}

Tensor sum_forward(const Tensor& rows, const Tensor& weights, const Tensor& /*copy_of_row*/,
                   const Tensor& row_of_copy) {
  return add_copies(rows, weights, row_of_copy, weights.size(1));
}

TwoTensors sum_backward(const Tensor& gradient, const Tensor& rows, const Tensor& weights,
                        const Tensor& copy_of_row, const Tensor& row_of_copy) {
  const auto wide = wide_type(rows);
  const int64_t active = weights.size(1);
  const Tensor wide_gradient = gradient.to(wide);
  Tensor of_rows = wide_gradient.index_select(0, token_of_row(copy_of_row, active));
  of_rows.mul_(weights.reshape({-1}).index_select(0, copy_of_row).unsqueeze(1));
  Tensor of_weights = at::empty_like(weights);
  for (int64_t copy = 0; copy < active; ++copy) {
    const Tensor part = rows.index_select(0, rows_of(row_of_copy, active, copy)).to(wide);
    of_weights.select(1, copy).copy_((part * wide_gradient).sum(1));
  }
  return {of_rows.to(rows.scalar_type()), of_weights};
}

class Sum : public torch::autograd::Function<Sum> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& rows, const Tensor& weights,
                        const Tensor& copy_of_row, const Tensor& row_of_copy) {
    context->save_for_backward({rows, weights, copy_of_row, row_of_copy});
    return sum_forward(rows, weights, copy_of_row, row_of_copy);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative("sum_of_copies()");
    const auto saved = context->get_saved_variables();
    const auto [of_rows, of_weights] =
        sum_backward(gradients[0], saved[0], saved[1], saved[2], saved[3]);
    return {of_rows, of_weights, Tensor(), Tensor()};
  }
};

Tensor sum_with_gradients(const Tensor& rows, const Tensor& weights, const Tensor& copy_of_row,
                          const Tensor& row_of_copy) {
  return Sum::apply(rows, weights, copy_of_row, row_of_copy);
}

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  library.def(
      "copies_of_tokens(Tensor tokens, Tensor copy_of_row, Tensor row_of_copy, int active) -> "
      "Tensor");
  library.def(
      "sum_of_copies(Tensor rows, Tensor weights, Tensor copy_of_row, Tensor row_of_copy) -> "
      "Tensor");
}
TORCH_LIBRARY_IMPL(zeropage, Autograd, library) {
  library.impl("copies_of_tokens", &copies_with_gradients);
  library.impl("sum_of_copies", &sum_with_gradients);
}
TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("copies_of_tokens", &copies_forward);
  library.impl("sum_of_copies", &sum_forward);
}

}  // namespace

CopyOrder sorted_by(const Tensor& keys, int64_t active) {
  CopyOrder order;
  order.active = active;
  order.copy_of_row = std::get<1>(at::sort(keys, /*stable=*/true, 0, /*descending=*/false));
  order.row_of_copy = at::empty_like(order.copy_of_row)
                          .scatter_(0, order.copy_of_row, at::arange(keys.numel(), keys.options()));
  return order;
}

Tensor copies_of_tokens(const Tensor& tokens, const CopyOrder& order) {
  static const auto handle = operator_of("zeropage::copies_of_tokens", &copies_forward);
  return handle.call(tokens, order.copy_of_row, order.row_of_copy, order.active);
}

Tensor sum_of_copies(const Tensor& rows, const Tensor& weights, const CopyOrder& order) {
  static const auto handle = operator_of("zeropage::sum_of_copies", &sum_forward);
  return handle.call(rows, weights, order.copy_of_row, order.row_of_copy);
}

}  // namespace zeropage::fused
