#include "offload/cpu/stochastic_rounding.h"

#include <algorithm>
#include <bit>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zeropage::offload::cpu {
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
__attribute__((target("avx2,fma"))) void make_four(PhiloxBlock* four, const RoundingPlace& place,
                                                   uint64_t first_block) {
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

__attribute__((target("avx2,fma"))) void make_tile_with_vectors(Tile& tile,
                                                                const RoundingPlace& place,
                                                                uint64_t first_block) {
  for (uint64_t i = 0; i < kBlocks; i += 4) make_four(tile.blocks + i, place, first_block + i);
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
__attribute__((target("avx2,fma"))) void round_with_vectors(const float* from, BFloat16Bits* to,
                                                            int64_t numel,
                                                            const RoundingPlace& place) {
  round_all(from, to, numel, place, make_tile_with_vectors);
}
#endif

}  // namespace

void round_stochastically(const float* from, BFloat16Bits* to, int64_t numel,
                          const RoundingPlace& place, [[maybe_unused]] Instructions instructions) {
#if defined(__x86_64__)
  if (instructions == Instructions::kVectors && has_vectors()) {
    return round_with_vectors(from, to, numel, place);
  }
#endif
  round_all(from, to, numel, place, make_tile);
}

}  // namespace zeropage::offload::cpu
