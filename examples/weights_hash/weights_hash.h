// One number for all weights: what "the same bits" is checked by.
#pragma once

#include <memory>
#include <string>

#include <torch/torch.h>

struct evp_md_ctx_st;  // libcrypto's

namespace train_gpt {

// SHA-256 of the weights as little-endian fp32. Throws where libcrypto has none.
class WeightsHash {
 public:
  WeightsHash();

  // The next parameter, whole, in named_parameters() order; on any device, of any dtype.
  void add(const torch::Tensor& values);
  // In hexadecimal. Call it once, after all.
  std::string hex();

 private:
  std::unique_ptr<evp_md_ctx_st, void (*)(evp_md_ctx_st*)> context_;
};

}  // namespace train_gpt
