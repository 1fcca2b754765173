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

Tensor rotate_composed(const Tensor& heads, const Tensor& cosines, const Tensor& sines, bool back) {
  // [tokens, half] or [batch, 1, tokens, half], for heads of [batch, heads, tokens, width].
  const auto over_heads = [](const Tensor& table) {
    return table.dim() == 3 ? table.unsqueeze(1) : table;
  };
  const Tensor cosine = over_heads(cosines), sine = over_heads(back ? -sines : sines);
  const auto halves = heads.to(wide_type(heads)).chunk(2, -1);
  Tensor rotated = at::empty_like(heads);
  const auto parts = rotated.chunk(2, -1);
  parts[0].copy_(halves[0] * cosine - halves[1] * sine);
  parts[1].copy_(halves[1] * cosine + halves[0] * sine);
  return rotated;
}

Tensor rotate_in_one_pass(std::optional<void*> stream, const Tensor& given, const Tensor& cosines,
                          const Tensor& sines, bool back) {
  constexpr int64_t kLeastElements = 4096;
  const Tensor heads = given.stride(-1) == 1 ? given : given.contiguous();
  Tensor rotated = at::empty_like(heads);
  const int64_t batch_stride = cosines.dim() == 3 ? cosines.stride(0) : 0;
  visit_elements(heads, [&]<typename T>() {
    const RotaryRows<T> rotary{
        .width = heads.size(3),
        .sizes = {heads.size(0), heads.size(1), heads.size(2)},
        .input_strides = {heads.stride(0), heads.stride(1), heads.stride(2)},
        .output_strides = {rotated.stride(0), rotated.stride(1), rotated.stride(2)},
        .angle_strides = {batch_stride, cosines.stride(-2)},
        .input = elements<T>(heads),
        .cosines = elements<float>(cosines),
        .sines = elements<float>(sines),
        .direction = back ? -1.0F : 1.0F,
        .output = elements<T>(rotated),
    };
    const int64_t rows = heads.size(0) * heads.size(1) * heads.size(2);
    if (stream) return cuda::rotate(rotary, rows, *stream);
    optim::parallel_for(
        rows, std::max<int64_t>(1, kLeastElements / std::max<int64_t>(1, rotary.width)),
        [&](int64_t begin, int64_t end) { cpu::loops_of<T>().rotate(rotary, begin, end); });
  });
  return rotated;
}

Tensor rotate(const Tensor& heads, const Tensor& cosines, const Tensor& sines, bool back) {
  const std::optional<void*> stream = kernel_stream(heads);
  if (!has_one_pass(heads, stream)) return rotate_composed(heads, cosines, sines, back);
  return rotate_in_one_pass(stream, heads, cosines.contiguous(), sines.contiguous(), back);
}

Tensor call_rotate(const Tensor& heads, const Tensor& cosines, const Tensor& sines, bool back) {
  static const auto handle = operator_of("zeropage::rotary", &rotate);
  return handle.call(heads, cosines, sines, back);
}

class Rotary : public torch::autograd::Function<Rotary> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& heads, const Tensor& cosines,
                        const Tensor& sines, bool back) {
    context->save_for_backward({cosines, sines});
    context->saved_data["back"] = back;
    return rotate(heads, cosines, sines, back);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative("rotary()");
    const auto tables = context->get_saved_variables();
    return {call_rotate(gradients[0], tables[0], tables[1], !context->saved_data["back"].toBool()),
            Tensor(), Tensor(), Tensor()};
  }
};

Tensor rotate_with_gradients(const Tensor& heads, const Tensor& cosines, const Tensor& sines,
                             bool back) {
  return Rotary::apply(heads, cosines, sines, back);
}

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  library.def("rotary(Tensor heads, Tensor cosines, Tensor sines, bool back) -> Tensor");
}
TORCH_LIBRARY_IMPL(zeropage, Autograd, library) {
  library.impl("rotary", &rotate_with_gradients);
}
TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("rotary", &rotate);
}

void check_table(const Tensor& heads, const Tensor& table) {
  const bool of_batch = table.dim() == 3 && table.size(0) == heads.size(0);
  const bool fits = (table.dim() == 2 || of_batch) && table.size(-2) == heads.size(2) &&
                    2 * table.size(-1) == heads.size(3);
  ZP_CHECK(fits, "zeropage::fused::rotary(): expected tables of [", heads.size(2), ", ",
           heads.size(3) / 2, "] or [", heads.size(0), ", ", heads.size(2), ", ", heads.size(3) / 2,
           "] for heads of ", heads.sizes(), ", got ", table.sizes(),
           "; take the rows of the tokens' positions");
  ZP_CHECK(table.scalar_type() == wide_type(heads) && table.device() == heads.device(),
           "zeropage::fused::rotary(): expected tables of ", wide_type(heads), " on ",
           heads.device(), ", got ", table.scalar_type(), " on ", table.device(),
           "; keep the tables in that precision when the model is converted");
  ZP_CHECK(!(at::GradMode::is_enabled() && table.requires_grad()),
           "zeropage::fused::rotary(): expected tables without gradients, got some that require "
           "one; register them as buffers, or "
           "compose the rotation of LibTorch's operators");
}

}  // namespace

Tensor rotary(const Tensor& heads, const Tensor& cosines, const Tensor& sines) {
  ZP_CHECK(at::isFloatingType(heads.scalar_type()) && heads.dim() == 4 && heads.size(3) % 2 == 0,
           "zeropage::fused::rotary(): expected heads of [batch, heads, tokens, width] with an "
           "even width, got ",
           heads.scalar_type(), " of ", heads.sizes());
  check_table(heads, cosines);
  check_table(heads, sines);
  ZP_CHECK(cosines.sizes() == sines.sizes(),
           "zeropage::fused::rotary(): expected tables of the same sizes, got cosines of ",
           cosines.sizes(), " and sines of ", sines.sizes(), "; take both for the same positions");
  return call_rotate(heads, cosines, sines, /*back=*/false);
}

}  // namespace zeropage::fused
