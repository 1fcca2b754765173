#include "tests/harness/fake_accelerator/attention.h"

#include <optional>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/native/transformers/attention.h>

#include "tests/harness/fake_accelerator/host_view.h"

namespace zeropage::testing {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask,
               double dropout, bool is_causal, std::optional<double> scale, bool grouped) {
  const auto like = [](const Tensor& tensor) {
    return host_view(tensor).requires_grad_(tensor.requires_grad());
  };
  const bool has_mask = mask && mask->defined();
  return at::_fused_sdp_choice(like(query), like(key), like(value),
                               has_mask ? Optional(like(*mask)) : std::nullopt, dropout, is_causal,
                               scale, grouped);
}

// [batch, length, heads, d_head] in memory, seen as [batch, heads, length, d_head]
Tensor by_head(const Tensor& like) {
  return at::empty_like(like.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2);
}

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor&, const Tensor&, double, bool,
                                   const Optional&, std::optional<double>) {
  const bool is_reduced = at::isReducedFloatingType(query.scalar_type());
  const auto dtype = is_reduced ? at::kFloat : query.scalar_type();
  const Tensor log_sum =
      at::empty({query.size(0), query.size(2), query.size(1)}, query.options().dtype(dtype));
  return {by_head(query), log_sum.transpose(1, 2)};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor&, const Tensor& query, const Tensor& key,
                                            const Tensor& value, const Tensor&, const Tensor&,
                                            double, bool, const Optional&, std::optional<double>) {
  return {by_head(query), by_head(key), by_head(value)};
}

}  // namespace

void choose_attention_as_cpu(torch::Library& aten) {
  aten.impl("_fused_sdp_choice", &choose);
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose);
}

void add_attention_meta(torch::Library& aten_meta) {
  aten_meta.impl("_scaled_dot_product_flash_attention_for_cpu", &forward);
  aten_meta.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &backward);
}

}  // namespace zeropage::testing
