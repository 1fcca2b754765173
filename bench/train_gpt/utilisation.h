// How much of a device's peak arithmetic the training of the model uses.
#pragma once

#include <cstdint>
#include <optional>

#include "bench/train_gpt/flags.h"

namespace train_gpt {

// Floating-point operations of forward and backward for a token: 6 a parameter, and 12 layers x
// d_model x sequence for attention (Chowdhery et al. 2022, "PaLM", appendix B). What is recomputed
// does not count.
double flops_per_token(const GptConfig& model, int64_t parameters);

// A rank's peak, in operations a second, for products in the compute dtype: --peak-tflops, or the
// vendor's figure without sparsity for devices that are known by name; none for others.
std::optional<double> peak_flops(const Flags& flags, torch::Device device);

}  // namespace train_gpt
