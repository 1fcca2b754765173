#include "offload/cpu/flat_norm.h"

#include <algorithm>

namespace zeropage::offload::cpu {
namespace {

// As a lane of a warp does it in CUDA: elements kLanes apart in registers, then what the lanes have.
constexpr int kLanes = 32;

template <typename Element>
ZEROPAGE_ELEMENT double sum_of_block(const Element* block) {
  static_assert(kBlockNumel == 8 * kLanes);
  double sums[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const auto square = [&](int k) { return square_of(block[i + k * kLanes]); };
    const auto pair = [&](int k) { return rounded::add(square(k), square(k + 4)); };
    sums[i] = rounded::add(rounded::add(pair(0), pair(2)), rounded::add(pair(1), pair(3)));
  }
  for (int stride = kLanes / 2; stride > 0; stride /= 2) {
    for (int i = 0; i < stride; ++i) sums[i] = rounded::add(sums[i], sums[i + stride]);
  }
  return sums[0];
}

constexpr int64_t kBlocksAhead = 8;

// A block. Past the end of memory it does nothing.
template <typename Element>
ZEROPAGE_ELEMENT void prefetch(const Element* block) {
  constexpr int kLine = 64 / sizeof(Element);
  for (int i = 0; i < kBlockNumel; i += kLine) __builtin_prefetch(block + i);
}

template <typename Element>
ZEROPAGE_ELEMENT void sum_blocks(const Element* elements, int64_t numel, double* sums,
                                 int64_t begin, int64_t end) {
  const int64_t whole_end = std::min(end, numel / kBlockNumel);
  for (int64_t block = begin; block < whole_end; ++block) {
    prefetch(elements + (block + kBlocksAhead) * kBlockNumel);
    sums[block] = sum_of_block(elements + block * kBlockNumel);
  }
  if (whole_end >= end) return;
  Element ragged[kBlockNumel] = {};
  std::copy(elements + whole_end * kBlockNumel, elements + numel, ragged);
  sums[whole_end] = sum_of_block(ragged);
}

template <typename Element>
void sum_blocks_on_any_processor(const Element* elements, int64_t numel, double* sums,
                                 int64_t begin, int64_t end) {
  sum_blocks(elements, numel, sums, begin, end);
}

template <typename Element>
ZEROPAGE_AVX2 void sum_blocks_with_avx2(const Element* elements, int64_t numel, double* sums,
                                        int64_t begin, int64_t end) {
  sum_blocks(elements, numel, sums, begin, end);
}

template <typename Element>
ZEROPAGE_AVX512 void sum_blocks_with_avx512(const Element* elements, int64_t numel, double* sums,
                                            int64_t begin, int64_t end) {
  sum_blocks(elements, numel, sums, begin, end);
}

bool is_finite(double value) {
  constexpr uint64_t kExponent = uint64_t{0x7ff} << 52;
  return (rounded::bits_of(value) & kExponent) != kExponent;
}

template <typename Element>
bool is_finite(Element value) {
  return (rounded::bits_of(to_float(value)) & detail::kInfinity) != detail::kInfinity;
}

}  // namespace

void block_sums_of_squares(const FlatElements& flat, int64_t numel, double* sums, int64_t begin,
                           int64_t end, Instructions instructions) {
  std::visit(
      [&](const auto* elements) {
        switch (usable(instructions)) {
          case Instructions::kAvx512:
            return sum_blocks_with_avx512(elements, numel, sums, begin, end);
          case Instructions::kAvx2:
            return sum_blocks_with_avx2(elements, numel, sums, begin, end);
          case Instructions::kAnyProcessor:
            return sum_blocks_on_any_processor(elements, numel, sums, begin, end);
        }
      },
      flat);
}

bool any_not_finite(const FlatElements& flat, int64_t begin, int64_t end) {
  return std::visit(
      [&](const auto* elements) {
        unsigned any = 0;
        for (int64_t i = begin; i < end; ++i) any |= is_finite(elements[i]) ? 0U : 1U;
        return any != 0;
      },
      flat);
}

}  // namespace zeropage::offload::cpu
