#include "fused/experts/expert_linear.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "fused/operators.h"
#include "zeropage/ledger.h"

namespace zeropage::fused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kGroupedBytes = 16;  // strides are multiples of it

bool is_grouped(const Tensor& rows, int64_t outputs) {
  const auto fits = [&](int64_t width) { return width * rows.element_size() % kGroupedBytes == 0; };
  return rows.is_cuda() && rows.scalar_type() == at::kBFloat16 && fits(rows.size(1)) &&
         fits(outputs);
}

// Calls visit(expert, first, numel). On a device it waits for the ends.
template <typename Visit>
int64_t for_each_expert(const Tensor& ends, const Visit& visit) {
  const Tensor here = ends.cpu();
  const auto* const end = elements<int32_t>(here);
  int64_t first = 0;
  for (int64_t expert = 0; expert < here.numel(); ++expert) {
    visit(expert, first, end[expert] - first);
    first = end[expert];
  }
  return first;
}

// Nobody writes rows behind the last end in a grouped product.
void clear_rows_without_expert(const Tensor& rows, const ExpertRows& of) {
  if (of.all) return;
  const Tensor number = at::arange(rows.size(0), of.ends.options());
  rows.masked_fill_(number.ge(of.ends[-1]).unsqueeze(1), 0);
}

Tensor linear_forward(const Tensor& rows, const Tensor& weight, const Tensor& ends, bool all) {
  const int64_t outputs = weight.size(1);
  Tensor result;
  if (is_grouped(rows, outputs)) return grouped_linear(rows, weight, {ends, all});
  result = at::empty({rows.size(0), outputs}, rows.options());
  if (result.is_meta()) return result;
  const int64_t last = for_each_expert(ends, [&](int64_t expert, int64_t first, int64_t numel) {
    if (numel == 0) return;
    Tensor of_expert = result.narrow(0, first, numel);
    at::mm_out(of_expert, rows.narrow(0, first, numel), weight[expert].t());
  });
  result.narrow(0, last, rows.size(0) - last).zero_();
  return result;
}

Tensor weight_gradient(const Tensor& gradient, const Tensor& rows, const Tensor& ends, bool all) {
  const memory::KindScope kind(memory::Kind::kGradient);
  if (is_grouped(rows, gradient.size(1))) {
    return grouped_weight_gradient(gradient.contiguous(), rows, {ends, all});
  }
  Tensor result = at::empty({ends.size(0), gradient.size(1), rows.size(1)}, rows.options());
  if (result.is_meta()) return result;
  for_each_expert(ends, [&](int64_t expert, int64_t first, int64_t numel) {
    Tensor of_expert = result[expert];
    if (numel == 0) {
      of_expert.zero_();
    } else {
      at::mm_out(of_expert, gradient.narrow(0, first, numel).t(), rows.narrow(0, first, numel));
    }
  });
  return result;
}

class ExpertLinear : public torch::autograd::Function<ExpertLinear> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& rows, const Tensor& weight,
                        const Tensor& ends, bool all) {
    context->save_for_backward({rows, weight, ends});
    context->saved_data["all"] = all;
    return linear_forward(rows, weight, ends, all);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative("expert_linear()");
    static const auto gradient_of =
        operator_of("zeropage::expert_weight_gradient", &weight_gradient);
    const auto saved = context->get_saved_variables();
    const Tensor& rows = saved[0];
    const Tensor& weight = saved[1];
    const Tensor& ends = saved[2];
    const bool all = context->saved_data["all"].toBool();
    const Tensor gradient = gradients[0].contiguous();
    Tensor of_rows, of_weight;
    if (context->needs_input_grad(0)) {
      of_rows = expert_linear(gradient, weight.transpose(1, 2), {ends, all});
    }
    if (context->needs_input_grad(1)) of_weight = gradient_of.call(gradient, rows, ends, all);
    return {of_rows, of_weight, Tensor(), Tensor()};
  }
};

Tensor linear_with_gradients(const Tensor& rows, const Tensor& weight, const Tensor& ends,
                             bool all) {
  return ExpertLinear::apply(rows, weight, ends, all);
}

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  library.def("expert_linear(Tensor rows, Tensor weight, Tensor ends, bool all) -> Tensor");
  library.def(
      "expert_weight_gradient(Tensor gradient, Tensor rows, Tensor ends, bool all) -> Tensor");
}
TORCH_LIBRARY_IMPL(zeropage, Autograd, library) {
  library.impl("expert_linear", &linear_with_gradients);
}
TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("expert_linear", &linear_forward);
  library.impl("expert_weight_gradient", &weight_gradient);
}

}  // namespace

Tensor expert_linear(const Tensor& rows, const Tensor& weight, const ExpertRows& of) {
  static const auto handle = operator_of("zeropage::expert_linear", &linear_forward);
  return handle.call(rows, weight, of.ends, of.all);
}

Tensor grouped_linear(const Tensor& rows, const Tensor& weight, const ExpertRows& of) {
  const Tensor result = at::_grouped_mm(rows, weight.transpose(1, 2), of.ends);
  clear_rows_without_expert(result, of);
  return result;
}

Tensor grouped_weight_gradient(const Tensor& gradient, const Tensor& rows, const ExpertRows& of) {
  const Tensor result = at::_grouped_mm(gradient.t(), rows, of.ends);
  const Tensor counts = at::diff(of.ends, 1, 0, at::zeros({1}, of.ends.options()));
  return result.masked_fill_(counts.eq(0).view({-1, 1, 1}), 0);
}

}  // namespace zeropage::fused
