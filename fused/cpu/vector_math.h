// Sixteen fp32 values as one vector of g++ and clang, and functions of them. The compiler makes of it what the instruction set
// has that it is compiled for, so the bits are the same with every set. cpu/loops_text.h alone includes it: compilers take vectors
// apart before they inline, so each set has functions of its own. Sources are compiled with -ffp-contract=off. Free of torch.
#pragma once

#include <cstdint>
#include <cstring>

#include "optim/low_precision.h"

// Always inlined, so that it takes the instruction set of its caller.
#define ZEROPAGE_VECTOR inline __attribute__((always_inline))

namespace zeropage::fused::cpu {
namespace {

// What g++ and clang make the set's registers of, sixteen lanes in all with every set. A vector that is wider than a register,
// g++ takes apart into single numbers.
inline constexpr int64_t kLanes = 16;
inline constexpr int kPartLanes = ZEROPAGE_PART_LANES;
inline constexpr int kParts = 16 / kPartLanes;

template <typename T>
struct PartOf {
  typedef T Type __attribute__((vector_size(kPartLanes * sizeof(T))));
};

template <typename T>
struct Lanes {
  using Part = typename PartOf<T>::Type;
  Part parts[kParts];
};
using Vector = Lanes<float>;
using Words = Lanes<int32_t>;
using Doubles = Lanes<double>;

// f of each part of the arguments, or of each part's place. Written out: what a loop indexes does not stay in
// registers.
template <typename To, typename F, typename... From>
ZEROPAGE_VECTOR Lanes<To> by_parts(F f, const Lanes<From>&... from) {
  if constexpr (kParts == 1) {
    return {{f(from.parts[0]...)}};
  } else if constexpr (kParts == 2) {
    return {{f(from.parts[0]...), f(from.parts[1]...)}};
  } else {
    return {{f(from.parts[0]...), f(from.parts[1]...), f(from.parts[2]...), f(from.parts[3]...)}};
  }
}
template <typename To, typename F>
ZEROPAGE_VECTOR Lanes<To> at_parts(F f) {
  if constexpr (kParts == 1) {
    return {{f(0)}};
  } else if constexpr (kParts == 2) {
    return {{f(0), f(1)}};
  } else {
    return {{f(0), f(1), f(2), f(3)}};
  }
}

template <typename T>
ZEROPAGE_VECTOR Lanes<T> all(T value) {
  return at_parts<T>([value](int) __attribute__((always_inline)) {
    return typename Lanes<T>::Part{} + value;
  });
}

#define ZEROPAGE_OPERATOR(operation, Result)                                                \
  template <typename T>                                                                     \
  ZEROPAGE_VECTOR Lanes<Result> operator operation(const Lanes<T>& a, const Lanes<T>& b) {  \
    return by_parts<Result>(                                                                \
        [](auto x, auto y) __attribute__((always_inline)) { return x operation y; }, a, b); \
  }                                                                                         \
  template <typename T>                                                                     \
  ZEROPAGE_VECTOR Lanes<Result> operator operation(const Lanes<T>& a, T b) {                \
    return a operation all(b);                                                              \
  }                                                                                         \
  template <typename T>                                                                     \
  ZEROPAGE_VECTOR Lanes<Result> operator operation(T a, const Lanes<T>& b) {                \
    return all(a) operation b;                                                              \
  }
ZEROPAGE_OPERATOR(+, T)
ZEROPAGE_OPERATOR(-, T)
ZEROPAGE_OPERATOR(*, T)
ZEROPAGE_OPERATOR(/, T)
ZEROPAGE_OPERATOR(&, T)
ZEROPAGE_OPERATOR(|, T)
ZEROPAGE_OPERATOR(<, int32_t)
ZEROPAGE_OPERATOR(>, int32_t)
#undef ZEROPAGE_OPERATOR

template <typename T>
ZEROPAGE_VECTOR Lanes<T> operator<<(const Lanes<T>& a, int bits) {
  return by_parts<T>(
      [bits](auto x) __attribute__((always_inline)) { return x << bits; }, a);
}
template <typename T>
ZEROPAGE_VECTOR Lanes<T> operator>>(const Lanes<T>& a, int bits) {
  return by_parts<T>(
      [bits](auto x) __attribute__((always_inline)) { return x >> bits; }, a);
}

// Lanes of `yes` where the comparison held, of `no` elsewhere.
template <typename T>
ZEROPAGE_VECTOR Lanes<T> choose(const Words& held, const Lanes<T>& yes, const Lanes<T>& no) {
  return by_parts<T>(
      [](auto m, auto y, auto n) __attribute__((always_inline)) { return m ? y : n; }, held, yes,
      no);
}

template <typename To, typename From>
ZEROPAGE_VECTOR Lanes<To> bits_as(const Lanes<From>& from) {
  static_assert(sizeof(To) == sizeof(From));
  return by_parts<To>(
      [](auto x) __attribute__((always_inline)) { return (typename Lanes<To>::Part)x; }, from);
}

template <typename To, typename From>
ZEROPAGE_VECTOR Lanes<To> converted(const Lanes<From>& from) {
  return by_parts<To>(
      [](auto x) __attribute__((always_inline)) {
        return __builtin_convertvector(x, typename Lanes<To>::Part);
      },
      from);
}

template <typename T>
ZEROPAGE_VECTOR Lanes<T> copied_from(const void* from) {
  return at_parts<T>([from](int part) __attribute__((always_inline)) {
    typename Lanes<T>::Part result;
    std::memcpy(&result, static_cast<const char*>(from) + part * sizeof(result), sizeof(result));
    return result;
  });
}

ZEROPAGE_VECTOR Vector load(const float* from) {
  return copied_from<float>(from);
}

ZEROPAGE_VECTOR Vector load(const optim::BFloat16Bits* from) {
  return bits_as<float>(converted<int32_t>(copied_from<uint16_t>(from)) << 16);
}

// The arithmetic of optim::to_float(HalfBits).
ZEROPAGE_VECTOR Vector load(const optim::HalfBits* from) {
  const Words bits = converted<int32_t>(copied_from<uint16_t>(from));
  const Words shifted = (bits & 0x7fff) << 13;
  const Words finite =
      bits_as<int32_t>(bits_as<float>(shifted) * optim::rounded::float_of((127U + 112U) << 23));
  const Words magnitude = choose((bits & 0x7c00) < 0x7c00, finite, shifted | 0x7f800000);
  return bits_as<float>(magnitude | (bits & 0x8000) << 16);
}

template <typename T>
ZEROPAGE_VECTOR void copy_to(void* to, const Lanes<T>& lanes) {
  at_parts<T>([ to, &lanes ](int part) __attribute__((always_inline)) {
    std::memcpy(static_cast<char*>(to) + part * sizeof(lanes.parts[0]), &lanes.parts[part],
                sizeof(lanes.parts[0]));
    return lanes.parts[part];
  });
}

ZEROPAGE_VECTOR void store(float* to, const Vector& values) {
  copy_to(to, values);
}

ZEROPAGE_VECTOR void store_words(void* to, const Words& words) {
  copy_to(to, converted<uint16_t>(words));
}

// To nearest even; a NaN becomes the quiet NaN of optim::assign().
ZEROPAGE_VECTOR void store(optim::BFloat16Bits* to, const Vector& values) {
  const Words bits = bits_as<int32_t>(values);
  const Words nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  store_words(to, choose((bits & 0x7fffffff) > 0x7f800000, all(0x7fc0), nearest) & 0xffff);
}

ZEROPAGE_VECTOR void store(optim::HalfBits* to, const Vector& values) {
  const Words bits = bits_as<int32_t>(values);
  const Words magnitude = bits & 0x7fffffff;
  const Words normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112 << 23)) >> 13;
  const Words denormal =
      bits_as<int32_t>(bits_as<float>(magnitude) + 0.5F) - bits_as<int32_t>(all(0.5F));
  Words half = choose(magnitude < (113 << 23), denormal, normal);
  half = choose(magnitude > 0x477fffff, all(0x7c00), half);
  half = choose(magnitude > 0x7f800000, all(0x7e00), half);
  store_words(to, half | (bits >> 16 & 0x8000));
}

// The first `numel` of sixteen; the others are `beyond`.
template <typename T>
ZEROPAGE_VECTOR Vector load_first(const T* from, int64_t numel, float beyond) {
  T whole[kLanes] = {};
  std::memcpy(whole, from, static_cast<size_t>(numel) * sizeof(T));
  const Vector values = load(whole);
  constexpr int32_t kPlaces[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return choose(copied_from<int32_t>(kPlaces) < static_cast<int32_t>(numel), values, all(beyond));
}

template <typename T>
ZEROPAGE_VECTOR void store_first(T* to, int64_t numel, const Vector& values) {
  T whole[kLanes];
  store(whole, values);
  std::memcpy(to, whole, static_cast<size_t>(numel) * sizeof(T));
}

ZEROPAGE_VECTOR double sum_of(const Doubles& lanes) {
  double single[kLanes];
  std::memcpy(single, &lanes, sizeof(single));
  double sum = 0;
  for (const double lane : single) sum += lane;
  return sum;
}

ZEROPAGE_VECTOR float largest_of(const Vector& lanes) {
  float single[kLanes];
  store(single, lanes);
  return *std::max_element(single, single + kLanes);
}

// Adds vectors in fp32, and what has come of 64 of them in fp64: the sum of a row of a vocabulary keeps fp32's precision.
class LaneSum {
 public:
  ZEROPAGE_VECTOR LaneSum() : recent_(all(0.0F)), whole_(all(0.0)) {}
  ZEROPAGE_VECTOR void add(const Vector& values) {
    recent_ = recent_ + values;
    if (++vectors_ == kVectorsAtOnce) flush();
  }
  ZEROPAGE_VECTOR double total() {
    flush();
    return sum_of(whole_);
  }

 private:
  static constexpr int kVectorsAtOnce = 64;
  ZEROPAGE_VECTOR void flush() {
    whole_ = whole_ + converted<double>(recent_);
    recent_ = all(0.0F);
    vectors_ = 0;
  }
  Vector recent_;
  Doubles whole_;
  int vectors_ = 0;
};

// e^x, within 2 units in the last place; 0 below -87.33, where results leave the normal numbers. A NaN stays one.
// Reduction and polynomial: Cephes' expf (Moshier, 1989).
ZEROPAGE_VECTOR Vector exponential(const Vector& x) {
  constexpr float kLeast = -87.33F, kMost = 88.72F;
  const Vector low = choose(x < kLeast, all(kLeast), x);
  const Vector clamped = choose(low > kMost, all(kMost), low);
  // Adding it rounds to a whole number, which is then in the lowest bits.
  constexpr float kRounder = 12582912.0F;  // 1.5 2^23
  const Vector shifted = clamped * 1.44269504088896341F + kRounder;
  const Vector whole = shifted - kRounder;
  const Words power = bits_as<int32_t>(shifted) - bits_as<int32_t>(all(kRounder));
  const Vector r = clamped - whole * 0.693359375F + whole * 2.12194440e-4F;
  Vector sum = all(1.9875691500e-4F);
  sum = sum * r + 1.3981999507e-3F;
  sum = sum * r + 8.3334519073e-3F;
  sum = sum * r + 4.1665795894e-2F;
  sum = sum * r + 1.6666665459e-1F;
  sum = sum * r + 5.0000001201e-1F;
  sum = sum * r * r + r + 1.0F;
  // In two factors, as 2^128 is no fp32 number.
  const Words half = power >> 1;
  const Vector result =
      sum * bits_as<float>((half + 127) << 23) * bits_as<float>((power - half + 127) << 23);
  return choose(x < kLeast, all(0.0F), result);
}

ZEROPAGE_VECTOR Vector sigmoid(const Vector& x) {
  return 1.0F / (1.0F + exponential(0.0F - x));
}

// Within 3e-7; the rational function is Eigen's (generic_fast_erf_float, MPL 2.0), exact to fp32 up to 4 and 1 beyond.
ZEROPAGE_VECTOR Vector error_function(const Vector& x) {
  const Vector low = choose(x < -4.0F, all(-4.0F), x);
  const Vector z = choose(low > 4.0F, all(4.0F), low);
  const Vector square = z * z;
  Vector above = all(-2.72614225801306e-10F);
  above = above * square + 2.77068142495902e-08F;
  above = above * square - 2.10102402082508e-06F;
  above = above * square - 5.69250639462346e-05F;
  above = above * square - 7.34990630326855e-04F;
  above = above * square - 2.95459980854025e-03F;
  above = above * square - 1.60960333262415e-02F;
  Vector below = all(-1.45660718464996e-05F);
  below = below * square - 2.13374055278905e-04F;
  below = below * square - 1.68282697438203e-03F;
  below = below * square - 7.37332916720468e-03F;
  below = below * square - 1.42647390514189e-02F;
  return z * above / below;
}

}  // namespace
}  // namespace zeropage::fused::cpu
