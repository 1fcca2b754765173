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
using TwoTensors = std::tuple<Tensor, Tensor>;

constexpr int64_t kLeastElements = 8192;

// Vectors of 16 are not cut in two.
template <typename Body>
void for_each_stretch(int64_t numel, const Body& body) {
  constexpr int64_t kAtOnce = 1024;
  optim::parallel_for((numel + kAtOnce - 1) / kAtOnce, kLeastElements / kAtOnce,
                      [&](int64_t begin, int64_t end) {
                        body(begin * kAtOnce, std::min(numel, end * kAtOnce) - begin * kAtOnce);
                      });
}

Tensor gate_forward(const Tensor& given_gate, const Tensor& given_value) {
  const std::optional<void*> stream = kernel_stream(given_gate);
  if (!has_one_pass(given_gate, stream)) {
    const auto wide = wide_type(given_gate);
    return (at::silu(given_gate.to(wide)) * given_value.to(wide)).to(given_gate.scalar_type());
  }
  const Tensor gate = given_gate.contiguous(), value = given_value.contiguous();
  Tensor output = at::empty_like(gate);
  visit_elements(gate, [&]<typename T>() {
    if (stream)
      return cuda::swiglu(elements<T>(gate), elements<T>(value), elements<T>(output), gate.numel(),
                          *stream);
    for_each_stretch(gate.numel(), [&](int64_t first, int64_t numel) {
      cpu::loops_of<T>().swiglu(elements<T>(gate) + first, elements<T>(value) + first,
                                elements<T>(output) + first, numel);
    });
  });
  return output;
}

TwoTensors gate_backward(const Tensor& given_gradient, const Tensor& given_gate,
                         const Tensor& given_value) {
  const std::optional<void*> stream = kernel_stream(given_gate);
  if (!has_one_pass(given_gate, stream)) {
    const auto wide = wide_type(given_gate), dtype = given_gate.scalar_type();
    const Tensor gate = given_gate.to(wide), gradient = given_gradient.to(wide);
    const Tensor sigmoid = at::sigmoid(gate);
    const Tensor slope = sigmoid * (1 + gate * (1 - sigmoid));
    return {(gradient * given_value.to(wide) * slope).to(dtype),
            (gradient * gate * sigmoid).to(dtype)};
  }
  const Tensor gradient = given_gradient.contiguous(), gate = given_gate.contiguous(),
               value = given_value.contiguous();
  Tensor of_gate = at::empty_like(gate), of_value = at::empty_like(gate);
  visit_elements(gate, [&]<typename T>() {
    if (stream) {
      return cuda::swiglu_gradient(elements<T>(gradient), elements<T>(gate), elements<T>(value),
                                   elements<T>(of_gate), elements<T>(of_value), gate.numel(),
                                   *stream);
    }
    for_each_stretch(gate.numel(), [&](int64_t first, int64_t numel) {
      cpu::loops_of<T>().swiglu_gradient(elements<T>(gradient) + first, elements<T>(gate) + first,
                                         elements<T>(value) + first, elements<T>(of_gate) + first,
                                         elements<T>(of_value) + first, numel);
    });
  });
  return {of_gate, of_value};
}

class Gate : public torch::autograd::Function<Gate> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& gate, const Tensor& value) {
    context->save_for_backward({gate, value});
    return gate_forward(gate, value);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative("swiglu()");
    static const auto handle = operator_of("zeropage::swiglu_backward", &gate_backward);
    const auto saved = context->get_saved_variables();
    const auto [of_gate, of_value] = handle.call(gradients[0], saved[0], saved[1]);
    return {of_gate, of_value};
  }
};

Tensor gate_with_gradients(const Tensor& gate, const Tensor& value) {
  return Gate::apply(gate, value);
}

const char* approximation(bool tanh) {
  return tanh ? "tanh" : "none";
}

GeluForm form_of(bool tanh) {
  return tanh ? GeluForm::kTanh : GeluForm::kExact;
}

Tensor gelu_forward(const Tensor& given_input, const Tensor& given_bias, bool tanh) {
  const std::optional<void*> stream = kernel_stream(given_input);
  if (!has_one_pass(given_input, stream)) {
    const auto wide = wide_type(given_input);
    return at::gelu(given_input.to(wide) + given_bias.to(wide), approximation(tanh))
        .to(given_input.scalar_type());
  }
  const Tensor input = given_input.contiguous(), bias = given_bias.contiguous();
  const int64_t width = bias.numel();
  const int64_t rows = width == 0 ? 0 : input.numel() / width;
  Tensor output = at::empty_like(input);
  visit_elements(input, [&]<typename T>() {
    if (stream) {
      return cuda::bias_gelu(form_of(tanh), elements<T>(input), elements<T>(bias),
                             elements<T>(output), rows, width, *stream);
    }
    optim::parallel_for(rows, std::max<int64_t>(1, kLeastElements / std::max<int64_t>(1, width)),
                        [&](int64_t begin, int64_t end) {
                          for (int64_t row = begin; row < end; ++row) {
                            cpu::loops_of<T>().bias_gelu(
                                form_of(tanh), elements<T>(input) + row * width, elements<T>(bias),
                                elements<T>(output) + row * width, width);
                          }
                        });
  });
  return output;
}

TwoTensors gelu_backward(const Tensor& given_gradient, const Tensor& given_input,
                         const Tensor& given_bias, bool tanh) {
  const int64_t width = given_bias.numel();
  const std::optional<void*> stream = kernel_stream(given_input);
  if (!has_one_pass(given_input, stream)) {
    const auto wide = wide_type(given_input);
    const Tensor of_input = at::gelu_backward(
        given_gradient.to(wide), given_input.to(wide) + given_bias.to(wide), approximation(tanh));
    return {of_input.to(given_input.scalar_type()),
            of_input.reshape({-1, width}).sum(0).to(given_bias.scalar_type())};
  }
  const Tensor gradient = given_gradient.contiguous(), input = given_input.contiguous(),
               bias = given_bias.contiguous();
  const int64_t rows = width == 0 ? 0 : input.numel() / width;
  const int64_t part_rows = rows_of_part(rows);
  const int64_t parts = stream ? parts_on_device(rows) : (rows + part_rows - 1) / part_rows;
  Tensor of_input = at::empty_like(input);
  const Tensor bias_parts = at::zeros({parts, width}, input.options().dtype(at::kFloat));
  visit_elements(input, [&]<typename T>() {
    if (stream) {
      return cuda::bias_gelu_gradient(form_of(tanh), elements<T>(gradient), elements<T>(input),
                                      elements<T>(bias), elements<T>(of_input),
                                      elements<float>(bias_parts), rows, width, parts, *stream);
    }
    optim::parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        for (int64_t row = part * part_rows; row < std::min(rows, (part + 1) * part_rows); ++row) {
          cpu::loops_of<T>().bias_gelu_gradient(form_of(tanh), elements<T>(gradient) + row * width,
                                                elements<T>(input) + row * width, elements<T>(bias),
                                                elements<T>(of_input) + row * width,
                                                elements<float>(bias_parts) + part * width, width);
        }
      }
    });
  });
  return {of_input, bias_parts.sum(0).to(bias.scalar_type())};
}

class BiasGelu : public torch::autograd::Function<BiasGelu> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input, const Tensor& bias,
                        bool tanh) {
    context->save_for_backward({input, bias});
    context->saved_data["tanh"] = tanh;
    return gelu_forward(input, bias, tanh);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative("bias_gelu()");
    static const auto handle = operator_of("zeropage::bias_gelu_backward", &gelu_backward);
    const auto saved = context->get_saved_variables();
    const auto [of_input, of_bias] =
        handle.call(gradients[0], saved[0], saved[1], context->saved_data["tanh"].toBool());
    return {of_input, of_bias, Tensor()};
  }
};

Tensor gelu_with_gradients(const Tensor& input, const Tensor& bias, bool tanh) {
  return BiasGelu::apply(input, bias, tanh);
}

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  library.def("swiglu(Tensor gate, Tensor value) -> Tensor");
  library.def("swiglu_backward(Tensor gradient, Tensor gate, Tensor value) -> (Tensor, Tensor)");
  library.def("bias_gelu(Tensor input, Tensor bias, bool tanh) -> Tensor");
  library.def(
      "bias_gelu_backward(Tensor gradient, Tensor input, Tensor bias, bool tanh) -> (Tensor, "
      "Tensor)");
}
TORCH_LIBRARY_IMPL(zeropage, Autograd, library) {
  library.impl("swiglu", &gate_with_gradients);
  library.impl("bias_gelu", &gelu_with_gradients);
}
TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("swiglu", &gate_forward);
  library.impl("swiglu_backward", &gate_backward);
  library.impl("bias_gelu", &gelu_forward);
  library.impl("bias_gelu_backward", &gelu_backward);
}

}  // namespace

Tensor swiglu(const Tensor& gate, const Tensor& value) {
  static const auto handle = operator_of("zeropage::swiglu", &gate_forward);
  check_alike("swiglu()", gate, value, "the value");
  ZP_CHECK(gate.sizes() == value.sizes(),
           "zeropage::fused::swiglu(): expected a gate and a value of the same sizes, got ",
           gate.sizes(), " and ", value.sizes());
  return handle.call(gate, value);
}

Tensor bias_gelu(const Tensor& input, const Tensor& bias, Gelu form) {
  static const auto handle = operator_of("zeropage::bias_gelu", &gelu_forward);
  check_alike("bias_gelu()", input, bias, "the bias");
  ZP_CHECK(
      input.dim() >= 1 && bias.dim() == 1 && bias.size(0) == input.size(-1),
      "zeropage::fused::bias_gelu(): expected a bias of the input's last size, got an input of ",
      input.sizes(), " and a bias of ", bias.sizes());
  return handle.call(input, bias, form == Gelu::kTanh);
}

}  // namespace zeropage::fused
