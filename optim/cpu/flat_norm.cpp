#include "optim/cpu/flat_norm.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "optim/cpu/squares_of_runs.h"

namespace zeropage::optim::cpu {
namespace {

// Elements whose sums go side by side, in half of the registers of AVX2.
constexpr int kSumsAtOnce = 16;
// Where there is no FMA there are only registers of 16 bytes.
template <bool kFused>
constexpr int kSumsInRegisters = kFused ? kSumsAtOnce : kSumsAtOnce / 2;
// From so few on a window costs less than a term for each.
constexpr int64_t kWorthAWindow = 8;

template <typename Element>
ZEROPAGE_ELEMENT void prefetch(const Element* elements, int64_t numel) {
  constexpr int kLine = 64 / sizeof(Element);
  for (int64_t i = 0; i < numel; i += kLine) __builtin_prefetch(elements + i);
}

struct Keys {
  uint32_t largest = 0;
  uint32_t least = 0;  // but for zeros; 0 where all are
};

template <typename Number>
ZEROPAGE_ELEMENT Keys keys_of(const Number* numbers, int64_t numel) {
  // Signed, as SSE2 has no others to compare: a key less 1, so that zeros come last.
  int32_t largest = 0;
  int32_t least = std::numeric_limits<int32_t>::max();
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t key = magnitude_key(numbers[i]);
    largest = std::max(largest, static_cast<int32_t>(key));
    least = std::min(least, static_cast<int32_t>(key + 0x7fffffffU));
  }
  return {.largest = static_cast<uint32_t>(largest),
          .least = static_cast<uint32_t>(least) - 0x7fffffffU};
}

// numbers: [numel], a multiple of kSumsAtOnce, all of them zero or of keys that the window takes.
template <bool kFused, typename Number>
ZEROPAGE_ELEMENT SquareTerms sum_in_window(const Number* numbers, int64_t numel,
                                           const SquareWindow& window) {
  constexpr int kSums = kSumsInRegisters<kFused>;
  double highs[kSums];
  double lows[kSums];
  for (int k = 0; k < kSums; ++k) {
    highs[k] = window.base;
    lows[k] = 0;
  }
  for (int64_t i = 0; i < numel; i += kSums) {
    for (int k = 0; k < kSums; ++k) add_square<kFused>(numbers[i + k], highs[k], lows[k]);
  }
  double high = 0;
  double low = 0;
  for (int k = 0; k < kSums; ++k) {
    high = optim::rounded::add(high, optim::rounded::add(highs[k], -window.base));
    low = optim::rounded::add(low, lows[k]);
  }
  return terms_of(high, low, window.unit);
}

template <typename Number>
bool add_one_by_one(const Number* numbers, int64_t numel, ExactDigits& sum) {
  bool all_finite = true;
  for (int64_t i = 0; i < numel; ++i) {
    const double square = square_of_widened(numbers[i]);
    if (square == 0) continue;
    all_finite &= optim::rounded::bits_of(square) < kInfinityBits;
    sum.add(square);
  }
  return all_finite;
}

ZEROPAGE_ELEMENT void add_terms(const SquareTerms& terms, ExactDigits& sum) {
  sum.add(terms.high);
  sum.add(terms.low);
}

// numbers: [numel] and then zeros up to a multiple of kSumsAtOnce; at most kWindowNumel. Leaves in `window`
// the one that took all of them, or none.
template <typename Element, bool kFused, typename Number>
ZEROPAGE_ELEMENT bool add_numbers(const Number* numbers, int64_t numel, ExactDigits& sum,
                                  SquareWindow& window) {
  window = {};
  if (numel < kWorthAWindow) return add_one_by_one(numbers, numel, sum);
  const Keys keys = keys_of(numbers, numel);
  if (keys.largest == 0) return true;
  if (keys.largest >= kEndOfWindows<Element>) return add_one_by_one(numbers, numel, sum);
  const SquareWindow made = window_below<Element>(exponent_of_key<Element>(keys.largest));
  const int64_t padded = parts_of<int64_t>(numel, kSumsAtOnce) * kSumsAtOnce;
  if (keys.least >= made.least_key) {
    add_terms(sum_in_window<kFused>(numbers, padded, made), sum);
    window = made;
    return true;
  }
  Number large[kWindowNumel];
  for (int64_t i = 0; i < padded; ++i) {
    const bool is_small = magnitude_key(numbers[i]) < made.least_key;
    large[i] = is_small ? Number{0} : numbers[i];
  }
  for (int64_t i = 0; i < numel; ++i) {
    if (large[i] == 0 && numbers[i] != 0) sum.add(square_of_widened(numbers[i]));
  }
  add_terms(sum_in_window<kFused>(large, padded, made), sum);
  return true;
}

#if defined(__x86_64__)
// Adds a whole run, unless numbers in it need a closer look. Not inlined: its caller takes on a set of
// instructions later.
template <typename Element>
ZEROPAGE_AVX2 bool add_whole_run(const Element* run, const SquareWindow& window, ExactDigits& sum) {
  if constexpr (std::is_same_v<Element, float>) {
    SquareTerms terms;
    if (window.base == 0 || !sum_in_guessed_window(run, window, terms)) return false;
    add_terms(terms, sum);
    return true;
  } else if constexpr (std::is_same_v<Element, BFloat16Bits>) {
    const SumsOfBf16 made = sums_of_squares(run);
    if (made.end == 0) return true;
    double total = 0;
    for (const double of_lane : made.sums) total = optim::rounded::add(total, of_lane);
    if (total < made.end) {
      sum.add(total);
      return true;
    }
    const auto is_exact = [&](double of_lane) { return of_lane < made.end; };
    if (!std::all_of(std::begin(made.sums), std::end(made.sums), is_exact)) return false;
    for (const double of_lane : made.sums) sum.add(of_lane);
    return true;
  } else {
    return false;
  }
}
#endif

template <bool kFused, typename Element>
ZEROPAGE_ELEMENT bool add_squares_of(const Element* elements, int64_t numel, ExactDigits& sum) {
  using Number = decltype(widened(Element{}));
  bool all_finite = true;
  // The window of the run before, whose magnitudes are probably like this run's. A run with numbers too small for a
  // window leaves none: the next one has such, too.
  SquareWindow window;
  for (int64_t begin = 0; begin < numel; begin += kWindowNumel) {
    const int64_t count = std::min<int64_t>(kWindowNumel, numel - begin);
#if defined(__x86_64__)
    if constexpr (kFused) {
      if (count == kWindowNumel && add_whole_run(elements + begin, window, sum)) continue;
    }
#endif
    prefetch(elements + begin + 2 * kWindowNumel, kWindowNumel);
    if constexpr (std::is_same_v<Number, Element> && !kIsFp64<Element>) {
      if (count == kWindowNumel) {
        all_finite &= add_numbers<Element, kFused>(elements + begin, count, sum, window);
        continue;
      }
    }
    Number numbers[kWindowNumel];
    for (int64_t i = 0; i < count; ++i) numbers[i] = widened(elements[begin + i]);
    std::fill(numbers + count, numbers + parts_of<int64_t>(count, kSumsAtOnce) * kSumsAtOnce,
              Number{0});
    all_finite &= add_numbers<Element, kFused>(numbers, count, sum, window);
  }
  return all_finite;
}

template <typename Element>
bool add_on_any_processor(const Element* elements, int64_t numel, ExactDigits& sum) {
  return add_squares_of<false>(elements, numel, sum);
}

template <typename Element>
ZEROPAGE_AVX2 bool add_with_avx2(const Element* elements, int64_t numel, ExactDigits& sum) {
  return add_squares_of<true>(elements, numel, sum);
}

template <typename Element>
ZEROPAGE_AVX512 bool add_with_avx512(const Element* elements, int64_t numel, ExactDigits& sum) {
  return add_squares_of<true>(elements, numel, sum);
}

template <typename Element>
bool is_finite(Element value) {
  return (optim::rounded::bits_of(to_float(value)) & optim::detail::kInfinity) !=
         optim::detail::kInfinity;
}
bool is_finite(double value) {
  return (optim::rounded::bits_of(value) & kInfinityBits) != kInfinityBits;
}

}  // namespace

bool add_squares(const FlatElements& flat, int64_t begin, int64_t end, ExactDigits& sum,
                 Instructions instructions) {
  return std::visit(
      [&](const auto* elements) {
        switch (usable(instructions)) {
          case Instructions::kAvx512:
            return add_with_avx512(elements + begin, end - begin, sum);
          case Instructions::kAvx2:
            return add_with_avx2(elements + begin, end - begin, sum);
          case Instructions::kAnyProcessor:
            break;
        }
        return add_on_any_processor(elements + begin, end - begin, sum);
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

}  // namespace zeropage::optim::cpu
