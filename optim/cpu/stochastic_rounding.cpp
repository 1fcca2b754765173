#include "optim/cpu/stochastic_rounding.h"

#include <algorithm>
#include <bit>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zeropage::optim::cpu {
namespace {

// Random bits that are made at once. Its first block is a multiple of kBlocks.
constexpr int64_t kBlocks = 16;
constexpr int64_t kTileNumel = kBlocks * kRoundingLanes;
struct Tile {
  PhiloxBlock blocks[kBlocks];
};

void make_tile(Tile& tile, const RoundingPlace& place, uint64_t first_block) {
  for (uint64_t i = 0; i < kBlocks; ++i) tile.blocks[i] = random_block(place, first_block + i);
}

#if defined(__x86_64__)
// random_block of four blocks. The words are the lower halves of 64-bit lanes, whose upper halves no
// multiplication reads: g++ by itself multiplies them too, and takes twice as long.
ZEROPAGE_AVX2 void make_four(PhiloxBlock* four, const RoundingPlace& place, uint64_t first_block) {
  const PhiloxCounter counter = counter_of(place, first_block);
  PhiloxKey key = key_of(place);
  const __m256i first_factor = _mm256_set1_epi64x(kPhiloxFactors[0]);
  const __m256i second_factor = _mm256_set1_epi64x(kPhiloxFactors[1]);
  __m256i a =
      _mm256_add_epi64(_mm256_set1_epi64x(counter.words[0]), _mm256_setr_epi64x(0, 1, 2, 3));
  __m256i b = _mm256_set1_epi64x(counter.words[1]);
  __m256i c = _mm256_set1_epi64x(counter.words[2]);
  __m256i d = _mm256_set1_epi64x(counter.words[3]);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m256i first = _mm256_mul_epu32(a, first_factor);
    const __m256i second = _mm256_mul_epu32(c, second_factor);
    a = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(second, 32), b),
                         _mm256_set1_epi64x(key.words[0]));
    b = second;
    c = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(first, 32), d),
                         _mm256_set1_epi64x(key.words[1]));
    d = first;
    key = next_key(key);
  }
  const __m256i lower_halves = _mm256_set1_epi64x(0xffffffff);
  const __m256i ab = _mm256_or_si256(_mm256_and_si256(a, lower_halves), _mm256_slli_epi64(b, 32));
  const __m256i cd = _mm256_or_si256(_mm256_and_si256(c, lower_halves), _mm256_slli_epi64(d, 32));
  const __m256i even = _mm256_unpacklo_epi64(ab, cd);
  const __m256i odd = _mm256_unpackhi_epi64(ab, cd);
  auto* const to = reinterpret_cast<__m256i*>(four);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
}

ZEROPAGE_AVX2 void make_tile_with_avx2(Tile& tile, const RoundingPlace& place,
                                       uint64_t first_block) {
  for (uint64_t i = 0; i < kBlocks; i += 4) make_four(tile.blocks + i, place, first_block + i);
}

using EightWords = uint64_t __attribute__((vector_size(64)));

// Product of the lower halves. Masked by all ones, since g++ 12 warns of the plain intrinsic that it reads what
// was never written.
ZEROPAGE_AVX512 inline EightWords product(EightWords a, EightWords b) {
  return reinterpret_cast<EightWords>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

// The same of eight blocks.
ZEROPAGE_AVX512 void make_eight(PhiloxBlock* eight, const RoundingPlace& place,
                                uint64_t first_block) {
  const PhiloxCounter counter = counter_of(place, first_block);
  PhiloxKey key = key_of(place);
  const EightWords none = {};
  EightWords a = counter.words[0] + EightWords{0, 1, 2, 3, 4, 5, 6, 7};
  EightWords b = none + counter.words[1];
  EightWords c = none + counter.words[2];
  EightWords d = none + counter.words[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const EightWords first = product(a, none + kPhiloxFactors[0]);
    const EightWords second = product(c, none + kPhiloxFactors[1]);
    a = second >> 32 ^ b ^ key.words[0];
    b = second;
    c = first >> 32 ^ d ^ key.words[1];
    d = first;
    key = next_key(key);
  }
  const EightWords ab = (a & 0xffffffffU) | b << 32;
  const EightWords cd = (c & 0xffffffffU) | d << 32;
  const EightWords blocks[2] = {__builtin_shufflevector(ab, cd, 0, 8, 1, 9, 2, 10, 3, 11),
                                __builtin_shufflevector(ab, cd, 4, 12, 5, 13, 6, 14, 7, 15)};
  std::memcpy(eight, blocks, sizeof(blocks));
}

ZEROPAGE_AVX512 void make_tile_with_avx512(Tile& tile, const RoundingPlace& place,
                                           uint64_t first_block) {
  for (uint64_t i = 0; i < kBlocks; i += 8) make_eight(tile.blocks + i, place, first_block + i);
}
#endif

template <typename MakeTile>
ZEROPAGE_ELEMENT void round_all(const float* from, BFloat16Bits* to, int64_t numel,
                                const RoundingPlace& place, const MakeTile& make) {
  static_assert(std::endian::native == std::endian::little, "lanes lie in words lower half first");
  Tile tile;
  uint16_t lanes[kTileNumel];
  int64_t element = place.first_element;
  while (numel > 0) {
    const int64_t skipped = element % kTileNumel;
    make(tile, place, static_cast<uint64_t>((element - skipped) / kRoundingLanes));
    std::memcpy(lanes, &tile, sizeof(lanes));
    const int64_t count = std::min(kTileNumel - skipped, numel);
    for (int64_t i = 0; i < count; ++i) {
      assign_stochastically(to[i], from[i], lanes[skipped + i]);
    }
    from += count;
    to += count;
    element += count;
    numel -= count;
  }
}

#if defined(__x86_64__)
ZEROPAGE_AVX2 void round_with_avx2(const float* from, BFloat16Bits* to, int64_t numel,
                                   const RoundingPlace& place) {
  round_all(from, to, numel, place, make_tile_with_avx2);
}

ZEROPAGE_AVX512 void round_with_avx512(const float* from, BFloat16Bits* to, int64_t numel,
                                       const RoundingPlace& place) {
  round_all(from, to, numel, place, make_tile_with_avx512);
}
#endif

}  // namespace

void round_stochastically(const float* from, BFloat16Bits* to, int64_t numel,
                          const RoundingPlace& place, Instructions instructions) {
  switch (usable(instructions)) {
#if defined(__x86_64__)
    case Instructions::kAvx512:
      return round_with_avx512(from, to, numel, place);
    case Instructions::kAvx2:
      return round_with_avx2(from, to, numel, place);
#endif
    default:
      return round_all(from, to, numel, place, make_tile);
  }
}

}  // namespace zeropage::optim::cpu
