#include "offload/cpu/flat_norm.h"

#include <algorithm>
#include <array>

namespace zeropage::offload::cpu {
namespace {

template <typename Element>
double sum_of_squares(const Element* flat, int64_t count) {
  std::array<double, kBlockNumel> squares{};
  for (int64_t i = 0; i < count; ++i) squares[i] = square_of(flat[i]);
  for (int stride = kBlockNumel / 2; stride > 0; stride /= 2) {
    for (int i = 0; i < stride; ++i) squares[i] = rounded::add(squares[i], squares[i + stride]);
  }
  return squares[0];
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
                           int64_t end) {
  std::visit(
      [&](const auto* elements) {
        for (int64_t block = begin; block < end; ++block) {
          const int64_t first = block * kBlockNumel;
          sums[block] =
              sum_of_squares(elements + first, std::min<int64_t>(kBlockNumel, numel - first));
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
