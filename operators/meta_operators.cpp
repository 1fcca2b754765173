#include "operators/meta_operators.h"

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/ConvUtils.h>
#include <torch/library.h>

namespace zeropage::memory {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Optional = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor like(const Tensor& tensor) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

// Undefined where autograd does not ask for it.
Tensor if_asked(bool asked, const Tensor& tensor) {
  return asked ? like(tensor) : Tensor();
}

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty())
    sizes[static_cast<size_t>(at::maybe_wrap_dim(dim, self.dim()))] = index.numel();
  return at::empty(sizes, self.options());
}

Tensor embedding_dense_backward(const Tensor& gradient, const Tensor&, int64_t rows, int64_t,
                                bool) {
  return at::empty({rows, gradient.size(-1)}, gradient.options());
}

std::vector<int64_t> broadcast_sizes(const Tensor& first, const Tensor& second,
                                     const Tensor& third) {
  return at::infer_size(at::infer_size(first.sizes(), second.sizes()), third.sizes());
}

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  return at::empty(broadcast_sizes(condition, self, other),
                   condition.options().dtype(at::result_type(self, other)));
}

Tensor& where_out(const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) {
  out.resize_(broadcast_sizes(condition, self, other));
  return out;
}

Tensor relu(const Tensor& self) {
  return at::empty_like(self);
}

Tensor& relu_in_place(Tensor& self) {
  return self;
}

Tensor mse_loss_backward(const Tensor&, const Tensor& self, const Tensor& target, int64_t) {
  return at::empty(at::infer_size(self.sizes(), target.sizes()), self.options());
}

Three native_layer_norm(const Tensor& input, IntArrayRef normalized, const Optional&,
                        const Optional&, double) {
  std::vector<int64_t> sizes = input.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(normalized.size()), sizes.end(), 1);
  return {like(input), at::empty(sizes, input.options()), at::empty(sizes, input.options())};
}

Three native_layer_norm_backward(const Tensor&, const Tensor& input, IntArrayRef normalized,
                                 const Tensor&, const Tensor&, const Optional& weight,
                                 const Optional&, std::array<bool, 3> asked) {
  const bool has_weight = weight && weight->defined();
  const Tensor affine = at::empty(normalized, has_weight ? weight->options() : input.options());
  return {if_asked(asked[0], input), if_asked(asked[1], affine), if_asked(asked[2], affine)};
}

Three native_batch_norm(const Tensor& input, const Optional&, const Optional&, const Optional&,
                        const Optional&, bool training, double, double) {
  const int64_t saved = training ? input.size(1) : 0;
  return {like(input), at::empty({saved}, input.options()), at::empty({saved}, input.options())};
}

Three native_batch_norm_backward(const Tensor&, const Tensor& input, const Optional&,
                                 const Optional&, const Optional&, const Optional&, const Optional&,
                                 bool, double, std::array<bool, 3> asked) {
  const Tensor affine = at::empty({input.size(1)}, input.options());
  return {if_asked(asked[0], input), if_asked(asked[1], affine), if_asked(asked[2], affine)};
}

Tensor convolution(const Tensor& input, const Tensor& weight, const Optional&, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  const auto sizes =
      transposed
          ? at::native::conv_input_size(input.sizes(), weight.sizes(), padding, output_padding,
                                        stride, dilation, groups)
          : at::native::conv_output_size(input.sizes(), weight.sizes(), padding, stride, dilation);
  return at::empty(sizes, input.options());
}

Three convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
                           IntArrayRef, IntArrayRef, IntArrayRef, bool, IntArrayRef, int64_t,
                           std::array<bool, 3> asked) {
  const Tensor bias = at::empty({gradient.size(1)}, gradient.options());
  return {if_asked(asked[0], input), if_asked(asked[1], weight), if_asked(asked[2], bias)};
}

// Without values two tensors are taken to be equal where they are the same memory, as the inputs of
// self-attention are.
bool equal(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides() && self.scalar_type() == other.scalar_type();
}

std::tuple<Tensor, Tensor> flash_attention(const Tensor& query, const Tensor& /*key*/,
                                           const Tensor& /*value*/, double /*dropout*/,
                                           bool /*is_causal*/, const Optional& /*mask*/,
                                           std::optional<double> /*scale*/) {
  const auto sums =
      at::isReducedFloatingType(query.scalar_type()) ? at::kFloat : query.scalar_type();
  return {at::empty_like(query),
          at::empty({query.size(0), query.size(2), query.size(1)}, query.options().dtype(sums))
              .transpose(1, 2)};
}

Three flash_attention_backward(const Tensor& /*gradient*/, const Tensor& query, const Tensor& key,
                               const Tensor& value, const Tensor& /*result*/,
                               const Tensor& /*sums*/, double /*dropout*/, bool /*is_causal*/,
                               const Optional& /*mask*/, std::optional<double> /*scale*/) {
  return {at::empty_like(query), at::empty_like(key), at::empty_like(value)};
}

// What the host's kernel takes (ATen/native/transformers/sdp_utils_cpp): others are computed with all
// scores in memory.
bool is_flash(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask,
              double dropout) {
  const auto fits = [&](const Tensor& tensor) {
    return tensor.dim() == 4 && tensor.size(-1) == query.size(-1) && tensor.stride(-1) == 1 &&
           tensor.size(0) == query.size(0) && tensor.size(1) == query.size(1) && tensor.size(2) > 0;
  };
  return dropout == 0 && fits(query) && fits(key) && fits(value) &&
         !(mask && mask->defined() && mask->requires_grad());
}

// LibTorch's own choice on the meta device has all scores in memory.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask,
                 double dropout, bool is_causal, std::optional<double> scale, bool shares_keys) {
  if (is_flash(query, key, value, mask, dropout)) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout,
                                                                       is_causal, mask, scale));
  }
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal,
                                             /*dropout_mask=*/std::nullopt, scale, shares_keys));
}

// Made of other operators, so autograd's key has it too.
torch::Library make_library_of_autograd() {
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradMeta, __FILE__,
                         __LINE__);
  library.impl("scaled_dot_product_attention", &attention);
  return library;
}

torch::Library make_library() {
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
  library.impl("equal", &equal);
  library.impl("scaled_dot_product_attention", &attention);
  library.impl("_scaled_dot_product_flash_attention_for_cpu", &flash_attention);
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &flash_attention_backward);
  library.impl("index_select", &index_select);
  library.impl("embedding_dense_backward", &embedding_dense_backward);
  library.impl("where.self", &where);
  library.impl("where.self_out", &where_out);
  library.impl("relu", &relu);
  library.impl("relu_", &relu_in_place);
  library.impl("mse_loss_backward", &mse_loss_backward);
  library.impl("native_layer_norm", &native_layer_norm);
  library.impl("native_layer_norm_backward", &native_layer_norm_backward);
  library.impl("native_batch_norm", &native_batch_norm);
  library.impl("native_batch_norm_backward", &native_batch_norm_backward);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  return library;
}

}  // namespace

void provide_meta_operators() {
  static const torch::Library library = make_library();
  static const torch::Library library_of_autograd = make_library_of_autograd();
}

}  // namespace zeropage::memory
