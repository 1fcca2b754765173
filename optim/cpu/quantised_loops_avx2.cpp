#include "optim/cpu/quantised_loops.h"

#if defined(__x86_64__)
#include <array>
#include <immintrin.h>

#define ZEROPAGE_SET ZEROPAGE_AVX2
#define ZEROPAGE_INTRINSICS ZEROPAGE_AVX2 inline __attribute__((always_inline))

#include "optim/cpu/quantised_words_text.h"

namespace zeropage::optim::cpu {
namespace {

struct Words {
  static constexpr int kNumel = 32;

  template <StateSign kSign>
  ZEROPAGE_INTRINSICS static void widen(const uint8_t* codes, uint32_t* words) {
    const __m256i lower = load(kBytesOfWords<kSign, 0>.data());
    const __m256i upper = load(kBytesOfWords<kSign, 8>.data());
    for (int half = 0; half < kNumel; half += 16) {
      const __m256i twice = _mm256_broadcastsi128_si256(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + half)));
      store(words + half, _mm256_shuffle_epi8(twice, lower));
      store(words + half + 8, _mm256_shuffle_epi8(twice, upper));
    }
  }

  template <StateSign kSign>
  ZEROPAGE_INTRINSICS static void narrow(const uint32_t* magnitudes, const float* values,
                                         uint8_t* codes) {
    __m256i packed =
        _mm256_packus_epi16(_mm256_packs_epi32(load(magnitudes), load(magnitudes + 8)),
                            _mm256_packs_epi32(load(magnitudes + 16), load(magnitudes + 24)));
    if constexpr (kSign == StateSign::kSigned) {
      // Packing to fewer bits keeps signs.
      const __m256i signs =
          _mm256_packs_epi16(_mm256_packs_epi32(load(values), load(values + 8)),
                             _mm256_packs_epi32(load(values + 16), load(values + 24)));
      const __m256i sign_bit = _mm256_set1_epi8(static_cast<char>(0x80));
      packed = _mm256_or_si256(packed, _mm256_and_si256(signs, sign_bit));
    }
    // It goes by halves of the vectors: of each, four codes by turns.
    const __m128i lower = _mm256_castsi256_si128(packed);
    const __m128i upper = _mm256_extracti128_si256(packed, 1);
    auto* const to = reinterpret_cast<__m128i*>(codes);
    _mm_storeu_si128(to, _mm_unpacklo_epi32(lower, upper));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(lower, upper));
  }

 private:
  // Which of 16 codes each byte of eight words is, from code kFirst on: the lowest one, and the highest
  // one where that has the sign. -1: zero.
  template <StateSign kSign, int kFirst>
  static constexpr std::array<int8_t, 32> kBytesOfWords = [] {
    std::array<int8_t, 32> bytes{};
    bytes.fill(-1);
    for (size_t word = 0; word < 8; ++word) {
      const auto code = static_cast<int8_t>(kFirst + static_cast<int>(word));
      bytes[4 * word] = code;
      if (kSign == StateSign::kSigned) bytes[4 * word + 3] = code;
    }
    return bytes;
  }();

  ZEROPAGE_INTRINSICS static __m256i load(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  ZEROPAGE_INTRINSICS static void store(uint32_t* to, __m256i words) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
  }
};

using Groups = GroupsByWords<Words>;

}  // namespace
}  // namespace zeropage::optim::cpu

#include "optim/cpu/quantised_loops_text.h"
#include "optim/cpu/quantised_passes_text.h"

namespace zeropage::optim::cpu {

const QuantisedLoops kQuantisedLoopsWithAvx2 = kLoopsOfSet;

}  // namespace zeropage::optim::cpu
#endif
