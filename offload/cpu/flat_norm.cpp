#include "offload/cpu/flat_norm.h"

#include <algorithm>
#include <array>

namespace zeropage::offload::cpu {
namespace {

template <typename Element>
double sum_of_squares(const Element* flat, int64_t count) {
  std::array<double, kBlockNumel> squares{};
  for (int64_t i = 0; i < count; ++i) squares[i] = square_of(to_float(flat[i]));
  for (int stride = kBlockNumel / 2; stride > 0; stride /= 2) {
    for (int i = 0; i < stride; ++i) squares[i] = rounded::add(squares[i], squares[i + stride]);
  }
  return squares[0];
}

double sum_of_chunk(const double* terms, int64_t count) {
  std::array<double, kChunkNumel> level;
  std::copy_n(terms, count, level.begin());
  while (count > 1) {
    for (int64_t i = 0; i < count / 2; ++i) level[i] = rounded::add(level[2 * i], level[2 * i + 1]);
    if (count % 2 == 1) level[count / 2] = level[count - 1];
    count = parts_of<int64_t>(count, 2);
  }
  return level[0];
}

bool is_finite(float value) {
  return (rounded::bits_of(value) & 0x7fffffffU) < detail::kInfinity;
}

}  // namespace

void block_sums_of_squares(const void* flat, Precision precision, int64_t numel, double* sums,
                           int64_t begin, int64_t end) {
  visit_precision(precision, [&]<typename Element>() {
    const auto* const elements = static_cast<const Element*>(flat);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlockNumel;
      sums[block] = sum_of_squares(elements + first, std::min<int64_t>(kBlockNumel, numel - first));
    }
  });
}

void sum_chunks(const double* terms, int64_t numel, double* sums, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = chunk * kChunkNumel;
    sums[chunk] = sum_of_chunk(terms + first, std::min<int64_t>(kChunkNumel, numel - first));
  }
}

bool any_not_finite(const void* flat, Precision precision, int64_t begin, int64_t end) {
  bool found = false;
  visit_precision(precision, [&]<typename Element>() {
    const auto* const elements = static_cast<const Element*>(flat);
    unsigned any = 0;
    for (int64_t i = begin; i < end; ++i) any |= is_finite(to_float(elements[i])) ? 0U : 1U;
    found = any != 0;
  });
  return found;
}

}  // namespace zeropage::offload::cpu
