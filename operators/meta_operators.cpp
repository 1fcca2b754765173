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

torch::Library make_library() {
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
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
}

}  // namespace zeropage::memory
