#include <optional>
#include <tuple>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "fused/cuda/rows.h"
#include "fused/operators.h"
#include "optim/parallel.h"
#include "zeropage/check.h"
#include "zeropage/fused.h"

namespace zeropage::fused {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<Tensor>;

struct NormResults {
  Tensor normed;
  Tensor sum;       // what was normalised
  Tensor means;     // [rows]; undefined: root mean squares
  Tensor inverses;  // [rows] 1 / deviation
};

NormResults normalise_composed(const Tensor& input, const Tensor& residual, const Tensor& weight,
                               const Tensor& bias, bool centred, double epsilon) {
  NormResults results;
  results.sum = residual.defined() ? input + residual : input;
  const auto wide = wide_type(input);
  Tensor off = results.sum.to(wide);
  if (centred) {
    const Tensor mean = off.mean(-1, /*keepdim=*/true);
    off = off - mean;
    results.means = mean.flatten();
  }
  const Tensor inverse = off.square().mean(-1, /*keepdim=*/true).add_(epsilon).rsqrt_();
  results.inverses = inverse.flatten();
  Tensor normed = (off * inverse).mul_(weight);
  if (bias.defined()) normed.add_(bias);
  results.normed = normed.to(input.scalar_type());
  return results;
}

NormResults normalise_in_one_pass(std::optional<void*> stream, const Tensor& input,
                                  const Tensor& residual, const Tensor& weight, const Tensor& bias,
                                  bool centred, double epsilon) {
  NormResults results;
  const int64_t width = input.size(-1);
  const int64_t rows = width == 0 ? 0 : input.numel() / width;
  results.sum = residual.defined() ? at::empty_like(input) : input;
  results.normed = at::empty_like(input);
  results.inverses = at::empty({rows}, input.options().dtype(at::kFloat));
  if (centred) results.means = at::empty_like(results.inverses);
  visit_elements(input, [&]<typename T>() {
    const NormRows<T> norm{.width = width,
                           .epsilon = epsilon,
                           .input = elements<T>(input),
                           .residual = elements<T>(residual),
                           .weight = elements<T>(weight),
                           .bias = elements<T>(bias),
                           .sum = residual.defined() ? elements<T>(results.sum) : nullptr,
                           .output = elements<T>(results.normed),
                           .means = elements<float>(results.means),
                           .inverses = elements<float>(results.inverses)};
    if (stream) return cuda::normalise(norm, rows, *stream);
    optim::parallel_for(rows, kLeastRowsOfPart, [&](int64_t begin, int64_t end) {
      cpu::loops_of<T>().normalise(norm, begin, end);
    });
  });
  return results;
}

NormResults normalise(const Tensor& input, const Tensor& residual, const Tensor& weight,
                      const Tensor& bias, bool centred, double epsilon) {
  const Tensor rows = input.contiguous();
  const Tensor added = residual.defined() ? residual.contiguous() : residual;
  const std::optional<void*> stream = kernel_stream(input);
  if (!has_one_pass(input, stream))
    return normalise_composed(rows, added, weight, bias, centred, epsilon);
  return normalise_in_one_pass(stream, rows, added, weight.contiguous(),
                               bias.defined() ? bias.contiguous() : bias, centred, epsilon);
}

using NormGradients = std::tuple<Tensor, Tensor, Tensor>;

NormGradients norm_gradients_composed(const Tensor& gradient, const Tensor& of_sum,
                                      const Tensor& sum, const Tensor& weight, const Tensor& means,
                                      const Tensor& inverses, bool of_weight, bool of_bias) {
  const auto wide = wide_type(sum);
  auto sizes = sum.sizes().vec();
  sizes.back() = 1;
  const Tensor inverse = inverses.view(sizes);
  Tensor normed = sum.to(wide);
  normed = (means.defined() ? normed - means.view(sizes) : normed) * inverse;
  const Tensor from_above = gradient.to(wide);
  Tensor of_input = from_above * weight;
  const Tensor product = (of_input * normed).mean(-1, /*keepdim=*/true);
  if (means.defined()) of_input.sub_(of_input.mean(-1, /*keepdim=*/true));
  of_input.sub_(normed * product).mul_(inverse);
  if (of_sum.defined()) of_input.add_(of_sum);
  const auto over_rows = [&weight, width = sum.size(-1)](const Tensor& rows) {
    return rows.reshape({-1, width}).sum(0).to(weight.scalar_type());
  };
  return {of_input.to(sum.scalar_type()), of_weight ? over_rows(from_above * normed) : Tensor(),
          of_bias ? over_rows(from_above) : Tensor()};
}

NormGradients norm_gradients_in_one_pass(std::optional<void*> stream, const Tensor& gradient,
                                         const Tensor& of_sum, const Tensor& sum,
                                         const Tensor& weight, const Tensor& means,
                                         const Tensor& inverses, bool of_weight, bool of_bias) {
  const int64_t width = sum.size(-1);
  const int64_t rows = inverses.numel();
  const int64_t part_rows = rows_of_part(rows);
  const int64_t parts = stream ? parts_on_device(rows) : (rows + part_rows - 1) / part_rows;
  const Tensor of_input = at::empty_like(sum);
  const Tensor weight_parts = at::zeros({parts, width}, inverses.options());
  const Tensor bias_parts = of_bias ? at::zeros({parts, width}, inverses.options()) : Tensor();
  visit_elements(sum, [&]<typename T>() {
    const NormGradientRows<T> norm{.width = width,
                                   .gradient = elements<T>(gradient),
                                   .gradient_of_sum = elements<T>(of_sum),
                                   .sum = elements<T>(sum),
                                   .weight = elements<T>(weight),
                                   .means = elements<float>(means),
                                   .inverses = elements<float>(inverses),
                                   .of_input = elements<T>(of_input)};
    if (stream) {
      return cuda::norm_gradient(norm, rows, parts, elements<float>(weight_parts),
                                 elements<float>(bias_parts), *stream);
    }
    optim::parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        float* const bias = of_bias ? elements<float>(bias_parts) + part * width : nullptr;
        cpu::loops_of<T>().norm_gradient(norm, part * part_rows,
                                         std::min(rows, (part + 1) * part_rows),
                                         elements<float>(weight_parts) + part * width, bias);
      }
    });
  });
  return {of_input, of_weight ? weight_parts.sum(0).to(weight.scalar_type()) : Tensor(),
          of_bias ? bias_parts.sum(0).to(weight.scalar_type()) : Tensor()};
}

NormGradients norm_backward(const Tensor& gradient, const OptionalTensor& gradient_of_sum,
                            const Tensor& sum, const Tensor& weight, const OptionalTensor& means,
                            const Tensor& inverses, bool of_weight, bool of_bias) {
  const Tensor rows = gradient.contiguous();
  Tensor of_sum = value_or_none(gradient_of_sum);
  if (of_sum.defined()) of_sum = of_sum.contiguous();
  const std::optional<void*> stream = kernel_stream(sum);
  if (!has_one_pass(sum, stream)) {
    return norm_gradients_composed(rows, of_sum, sum, weight, value_or_none(means), inverses,
                                   of_weight, of_bias);
  }
  return norm_gradients_in_one_pass(stream, rows, of_sum, sum, weight.contiguous(),
                                    value_or_none(means), inverses, of_weight, of_bias);
}

class Norm : public torch::autograd::Function<Norm> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& input,
                               const OptionalTensor& residual, const Tensor& weight,
                               const OptionalTensor& bias, bool centred, double epsilon) {
    const NormResults results =
        normalise(input, value_or_none(residual), weight, value_or_none(bias), centred, epsilon);
    context->save_for_backward({results.sum, weight, results.means, results.inverses});
    context->saved_data["added"] = residual.has_value();
    context->saved_data["biased"] = bias.has_value();
    context->set_materialize_grads(false);
    if (!residual) return {results.normed};
    return {results.normed, results.sum};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative("rms_norm() and layer_norm()");
    static const auto handle = operator_of("zeropage::norm_backward", &norm_backward);
    const auto saved = context->get_saved_variables();
    const bool added = context->saved_data["added"].toBool();
    const bool biased = context->saved_data["biased"].toBool();
    // Edges are counted without arguments that are none.
    const size_t weight_edge = added ? 2 : 1;
    const bool of_weight = context->needs_input_grad(weight_edge);
    const bool of_bias = biased && context->needs_input_grad(weight_edge + 1);
    const Tensor of_sum = added ? gradients[1] : Tensor();
    Tensor of_input = of_sum, weight_gradient, bias_gradient;
    if (gradients[0].defined()) {
      const auto none_or = [](const Tensor& tensor) {
        return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
      };
      std::tie(of_input, weight_gradient, bias_gradient) =
          handle.call(gradients[0], none_or(of_sum), saved[0], saved[1], none_or(saved[2]),
                      saved[3], of_weight, of_bias);
    }
    return {of_input, added ? of_input : Tensor(), weight_gradient, bias_gradient, Tensor(),
            Tensor()};
  }
};

Tensor norm_with_gradients(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                           bool centred, double epsilon) {
  return Norm::apply(input, OptionalTensor(), weight, bias, centred, epsilon)[0];
}

Tensor norm(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, bool centred,
            double epsilon) {
  return normalise(input, Tensor(), weight, value_or_none(bias), centred, epsilon).normed;
}

std::tuple<Tensor, Tensor> add_norm_with_gradients(const Tensor& input, const Tensor& residual,
                                                   const Tensor& weight, const OptionalTensor& bias,
                                                   bool centred, double epsilon) {
  const variable_list results =
      Norm::apply(input, OptionalTensor(residual), weight, bias, centred, epsilon);
  return {results[0], results[1]};
}

std::tuple<Tensor, Tensor> add_norm(const Tensor& input, const Tensor& residual,
                                    const Tensor& weight, const OptionalTensor& bias, bool centred,
                                    double epsilon) {
  const NormResults results =
      normalise(input, residual, weight, value_or_none(bias), centred, epsilon);
  return {results.normed, results.sum};
}

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  library.def(
      "norm(Tensor input, Tensor weight, Tensor? bias, bool centred, float epsilon) -> Tensor");
  library.def(
      "add_norm(Tensor input, Tensor residual, Tensor weight, Tensor? bias, bool centred, float "
      "epsilon) -> (Tensor, Tensor)");
  library.def(
      "norm_backward(Tensor gradient, Tensor? gradient_of_sum, Tensor sum, Tensor weight, Tensor? "
      "means, Tensor inverses, "
      "bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zeropage, Autograd, library) {
  library.impl("norm", &norm_with_gradients);
  library.impl("add_norm", &add_norm_with_gradients);
}

TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("norm", &norm);
  library.impl("add_norm", &add_norm);
  library.impl("norm_backward", &norm_backward);
}

void check_norm(const char* who, const Tensor& input, const Tensor& weight, const Tensor& bias) {
  check_alike(who, input, weight, "the weight");
  ZP_CHECK(input.dim() >= 1 && weight.dim() == 1 && weight.size(0) == input.size(-1),
           "zeropage::fused::", who,
           ": expected a weight of the input's last size, got an input of ", input.sizes(),
           " and a weight of ", weight.sizes());
  if (!bias.defined()) return;
  check_alike(who, input, bias, "the bias");
  ZP_CHECK(bias.sizes() == weight.sizes(), "zeropage::fused::", who,
           ": expected a bias of the weight's sizes ", weight.sizes(), ", got ", bias.sizes());
}

Tensor call_norm(const char* who, const Tensor& input, const Tensor& weight, const Tensor& bias,
                 bool centred, double epsilon) {
  static const auto handle = operator_of("zeropage::norm", &norm);
  check_norm(who, input, weight, bias);
  return handle.call(input, weight, bias.defined() ? OptionalTensor(bias) : std::nullopt, centred,
                     epsilon);
}

Added call_add_norm(const char* who, const Tensor& input, const Tensor& residual,
                    const Tensor& weight, const Tensor& bias, bool centred, double epsilon) {
  static const auto handle = operator_of("zeropage::add_norm", &add_norm);
  check_norm(who, input, weight, bias);
  check_alike(who, input, residual, "the residual");
  ZP_CHECK(residual.sizes() == input.sizes(), "zeropage::fused::", who,
           ": expected a residual of the input's sizes ", input.sizes(), ", got ",
           residual.sizes());
  const auto [normed, sum] =
      handle.call(input, residual, weight, bias.defined() ? OptionalTensor(bias) : std::nullopt,
                  centred, epsilon);
  return {normed, sum};
}

}  // namespace

Tensor rms_norm(const Tensor& input, const Tensor& weight, double epsilon) {
  return call_norm("rms_norm()", input, weight, Tensor(), /*centred=*/false, epsilon);
}

Added add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                   double epsilon) {
  return call_add_norm("add_rms_norm()", input, residual, weight, Tensor(), /*centred=*/false,
                       epsilon);
}

Tensor layer_norm(const Tensor& input, const Tensor& weight, const Tensor& bias, double epsilon) {
  return call_norm("layer_norm()", input, weight, bias, /*centred=*/true, epsilon);
}

Added add_layer_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                     const Tensor& bias, double epsilon) {
  return call_add_norm("add_layer_norm()", input, residual, weight, bias, /*centred=*/true,
                       epsilon);
}

}  // namespace zeropage::fused
