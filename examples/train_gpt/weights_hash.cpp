#include "examples/train_gpt/weights_hash.h"

#include <array>
#include <bit>
#include <memory>

#include <openssl/evp.h>

#include "memory/check.h"

namespace train_gpt {

static_assert(std::endian::native == std::endian::little, "the hash is of little-endian weights");

std::string weights_sha256(const zeropage::DataParallelBase& model) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        &EVP_MD_CTX_free);
  bool ok = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  zeropage::visit_parameters(model, [&](const std::string&, const torch::Tensor& values) {
    const auto weights = values.to(torch::kCPU, torch::kFloat32).contiguous();
    ok = ok && EVP_DigestUpdate(context.get(), weights.const_data_ptr(), weights.nbytes()) == 1;
  });
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int length = 0;
  ok = ok && EVP_DigestFinal_ex(context.get(), digest.data(), &length) == 1;
  ZP_CHECK(ok,
           "libcrypto could not compute SHA-256 of the weights; is it a FIPS build without it?");
  std::string text;
  for (unsigned int i = 0; i < length; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[digest[i] >> 4];
    text += kDigits[digest[i] & 15];
  }
  return text;
}

}  // namespace train_gpt
