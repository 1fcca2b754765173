#include "weights_hash/weights_hash.h"

#include <array>
#include <bit>

#include <openssl/evp.h>
#include <zeropage/check.h>

namespace train_gpt {
namespace {

static_assert(std::endian::native == std::endian::little, "the hash is of little-endian weights");

void check(bool ok) {
  ZP_CHECK(ok,
           "libcrypto could not compute SHA-256 of the weights; is it a FIPS build without it?");
}

}  // namespace

WeightsHash::WeightsHash() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
  check(context_ && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void WeightsHash::add(const torch::Tensor& values) {
  const auto weights = values.to(torch::kCPU, torch::kFloat32).contiguous();
  check(EVP_DigestUpdate(context_.get(), weights.const_data_ptr(), weights.nbytes()) == 1);
}

std::string WeightsHash::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int length = 0;
  check(EVP_DigestFinal_ex(context_.get(), digest.data(), &length) == 1);
  std::string text;
  for (unsigned int i = 0; i < length; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[digest[i] >> 4];
    text += kDigits[digest[i] & 15];
  }
  return text;
}

}  // namespace train_gpt
