#include "optim/cpu/quantised_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define ZEROPAGE_SET ZEROPAGE_AVX512
#define ZEROPAGE_INTRINSICS ZEROPAGE_AVX512 inline __attribute__((always_inline))

namespace zeropage::offload::cpu {
namespace {

struct Groups {
  static constexpr int kNumel = 64;

  template <StateSign kSign>
  ZEROPAGE_INTRINSICS static void widen(const uint8_t* codes, uint32_t* words) {
    for (int i = 0; i < kNumel; i += 16) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
      _mm512_storeu_si512(words + i, kSign == StateSign::kSigned ? _mm512_cvtepi8_epi32(bytes)
                                                                 : _mm512_cvtepu8_epi32(bytes));
    }
  }

  template <StateSign kSign>
  ZEROPAGE_INTRINSICS static void narrow(const uint32_t* magnitudes, const float* values,
                                         uint8_t* codes) {
    __m512i packed =
        _mm512_packus_epi16(_mm512_packs_epi32(load(magnitudes), load(magnitudes + 16)),
                            _mm512_packs_epi32(load(magnitudes + 32), load(magnitudes + 48)));
    if constexpr (kSign == StateSign::kSigned) {
      constexpr int kOrWhereThird = 0xf8;  // first | (second & third)
      const __m512i signs =
          _mm512_packs_epi16(_mm512_packs_epi32(load(values), load(values + 16)),
                             _mm512_packs_epi32(load(values + 32), load(values + 48)));
      const __m512i sign_bit = _mm512_set1_epi8(static_cast<char>(0x80));
      packed = _mm512_ternarylogic_epi32(packed, signs, sign_bit, kOrWhereThird);
    }
    // It goes by quarters of the vectors: of each, four codes by turns.
    const __m512i in_order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(in_order, packed));
  }

 private:
  ZEROPAGE_INTRINSICS static __m512i load(const void* from) { return _mm512_loadu_si512(from); }
};

}  // namespace
}  // namespace zeropage::offload::cpu

#include "optim/cpu/quantised_loops_text.h"

namespace zeropage::offload::cpu {

const QuantisedLoops kQuantisedLoopsWithAvx512 = kLoopsOfSet;

}  // namespace zeropage::offload::cpu
#endif
