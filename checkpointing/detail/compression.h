// Lossy forms of floating-point vectors that are on their way to the host.
//
// kBf16: rounded to nearest even; an element is off by at most 2^-8 of itself. k8Bit: blocks of 256
// elements with an fp32 scale each, absmax / 127 (Dettmers et al., "8-bit Optimizers via Block-wise
// Quantization", section 2.1, with a linear map); off by at most 1/254 of the largest of the block.
// A block with an infinity or a NaN comes back without a finite element, so an overflow is not
// hidden. Doubles are taken as fp32 first.
//
// Threads: any. Works on the current stream of the tensors' device.
#pragma once

#include <ATen/core/Tensor.h>

#include "zeropage/activation_offload.h"

namespace zeropage::checkpointing::detail {

// Whether it makes tensors of this type smaller: it never applies to integers and complex numbers.
bool compresses(Compression compression, at::ScalarType dtype);

// The vector that holds the form.
struct Encoded {
  at::ScalarType dtype;
  int64_t numel;

  int64_t bytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};
// kNone: the vector's own form.
Encoded encoded_form(Compression compression, at::ScalarType dtype, int64_t numel);

// encoded: of that form, on the device of `flat`. Both below autograd.
void encode(Compression compression, const at::Tensor& flat, const at::Tensor& encoded);
void decode(Compression compression, const at::Tensor& encoded, const at::Tensor& flat);

}  // namespace zeropage::checkpointing::detail
