// Fused operators of language models, with gradients: norms with the residual's addition, rotary positions, gated and biased
// activations, and the loss without its logits.
#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>

// Each is one operator of LibTorch's dispatcher (zeropage::add_norm and so on): one pass over memory forward and one back where a
// composition of LibTorch's operators takes several, and nothing between them is kept for backward. They work on sharded and
// paged parameters, in checkpointed and recomputed regions, under tensor_parallel() and in a simulated world, as LibTorch's own do.
//
// fp32, bf16 and fp16 are computed in fp32 and rounded once; fp64 in fp64. On the host fp32, bf16 and fp16 have vectorised loops, whose
// bits do not depend on the processor, and on CUDA kernels. fp64, and other devices, run a composition of LibTorch's operators in
// place, with the same results and tensors kept.
//
// Threads: any; each uses LibTorch's intra-op threads. Errors: c10::Error for sizes, dtypes and devices that do not fit. A backward
// with create_graph=true throws: there is no second derivative.

namespace zeropage::fused {

// What a norm makes of an input and the residual stream that it is added to.
struct Added {
  at::Tensor normed = {};
  at::Tensor sum = {};  // input + residual: the residual stream from here on
};

// x / sqrt(mean(x^2) + epsilon) * weight over the last dimension (Zhang and Sennrich, 2019). input: [..., width]; weight: [width].
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double epsilon = 1e-6);
// The norm of input + residual, both [..., width], and the sum, in one pass.
Added add_rms_norm(const at::Tensor& input, const at::Tensor& residual, const at::Tensor& weight,
                   double epsilon = 1e-6);

// (x - mean) / sqrt(variance + epsilon) * weight + bias over the last dimension (Ba et al., 2016). bias: [width], or undefined: none.
at::Tensor layer_norm(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                      double epsilon = 1e-5);
Added add_layer_norm(const at::Tensor& input, const at::Tensor& residual, const at::Tensor& weight,
                     const at::Tensor& bias, double epsilon = 1e-5);

// Rotary positions (Su et al., 2021) in the order of Hugging Face's Llama, where element i turns with element i + width / 2.
// heads: [batch, heads, tokens, width], also a transposed view, whose layout the result has; cosines, sines: fp32 (fp64 for fp64),
// [tokens, width / 2], or [batch, tokens, width / 2] where positions begin anew in a batch. The tables get no gradient.
at::Tensor rotary(const at::Tensor& heads, const at::Tensor& cosines, const at::Tensor& sines);

// silu(gate) * value (Shazeer, 2020), all of the same sizes.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& value);

enum class Gelu : uint8_t {
  kExact,  // with the error function, as torch::gelu() has it
  kTanh,   // GPT-2's
};
// gelu(input + bias). input: [..., width]; bias: [width].
at::Tensor bias_gelu(const at::Tensor& input, const at::Tensor& bias, Gelu form = Gelu::kExact);

enum class LossOver : uint8_t {
  kMean,  // the mean over the targets that count; throws on the host where none does
  kSum,  // their sum, for a mean over several micro-batches or ranks: divide by all targets that count. 0 where none does
};

struct LinearCrossEntropyOptions {
  // Targets that have no loss and no gradient, as in torch::nn::CrossEntropyLoss. On the host their rows cost no time either.
  int64_t ignore_index = -100;
  LossOver over = LossOver::kMean;
  // Memory of the logits that exist at a time. Unit: bytes. 0: 64 MiB on the host and 256 MiB on a device, or 512 and 1,024 rows
  // where those take more. Fewer bytes take longer, as each tile reads the weight anew.
  int64_t tile_bytes = 0;
};

// Cross entropy of hidden weight^T + bias, as torch::cross_entropy(torch::linear(hidden, weight, bias), targets) has it, without
// logits of all tokens: tiles of tokens are computed, and turned into gradients at once, as nothing but a factor comes from above
// (Hsu et al., "Liger Kernel", 2024). hidden: [..., width]; weight: [classes, width], such as a tied embedding; bias: [classes], or
// undefined: none; targets: int64 of hidden's leading sizes. Returns a scalar: fp32, or fp64 for fp64.
//
// Memory: a tile; and from forward to backward the gradients of hidden and weight, which plain backward makes at its beginning. In bf16
// and fp16 with more than one tile the weight's gradient is added up in fp32. Without gradients (torch::NoGradGuard): a tile alone.
// However many tiles a rank has, it takes the weight once and gives it one gradient, so ranks may have other numbers of tokens.
// Backward runs once: a second one over a retained graph throws.
//
// A weight that tensor_parallel() has cut by classes is taken as it is: ranks exchange three numbers a token and tile, and the sum
// of hidden's gradient. Collective then, with the same tokens on all ranks of the axis.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options = {},
                                const at::Tensor& bias = {});

}  // namespace zeropage::fused
