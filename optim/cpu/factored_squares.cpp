#include "optim/cpu/factored_squares.h"

#include <algorithm>

namespace zeropage::optim::cpu {
namespace {

// Elements of a part that are in one row.
struct Segment {
  int64_t begin = 0;  // in the part
  int64_t numel = 0;
  int64_t row = 0;     // in the arrays
  int64_t column = 0;  // in the arrays, of its first element
};

class Segments {
 public:
  explicit Segments(const MatrixPart& part)
      : part_(part),
        row_(part.first / part.columns),
        in_row_(part.first % part.columns),
        first_of_matrix_(row_ / part.rows * part.columns),
        in_matrix_(row_ % part.rows) {}

  ZEROPAGE_ELEMENT bool next(Segment& segment) {
    if (begin_ == part_.numel) return false;
    segment = {.begin = begin_,
               .numel = std::min(part_.columns - in_row_, part_.numel - begin_),
               .row = row_ - part_.first_row,
               .column = first_of_matrix_ + in_row_ - part_.first_column};
    begin_ += segment.numel;
    in_row_ = 0;
    ++row_;
    if (++in_matrix_ == part_.rows) {
      in_matrix_ = 0;
      first_of_matrix_ += part_.columns;
    }
    return true;
  }

 private:
  const MatrixPart part_;
  int64_t begin_ = 0;
  int64_t row_;
  int64_t in_row_;
  int64_t first_of_matrix_;
  int64_t in_matrix_;
};

template <typename Element>
struct ScaledGradient {
  const Element* elements;
  float scale;
};

// The bits of magnitudes are in the order of the magnitudes. Signed, as SSE2 has no others to compare.
ZEROPAGE_ELEMENT int32_t key_of(float value) {
  return static_cast<int32_t>(optim::rounded::bits_of(value) & 0x7fffffffU);
}

ZEROPAGE_ELEMENT float of_key(int32_t key) {
  return optim::rounded::float_of(static_cast<uint32_t>(key));
}

template <typename Element>
ZEROPAGE_ELEMENT float element(const ScaledGradient<Element>& gradient, int64_t i) {
  return optim::rounded::multiply(to_float(gradient.elements[i]), gradient.scale);
}

template <typename Element>
ZEROPAGE_ELEMENT void raise_all(const ScaledGradient<Element>& gradient, const MatrixPart& part,
                                float* rows, float* columns) {
  Segments segments(part);
  Segment segment;
  while (segments.next(segment)) {
    float* const of_columns = columns + segment.column;
    int32_t largest = key_of(rows[segment.row]);
    ZEROPAGE_NO_OVERLAP
    for (int64_t i = 0; i < segment.numel; ++i) {
      const int32_t key = key_of(element(gradient, segment.begin + i));
      of_columns[i] = of_key(std::max(key_of(of_columns[i]), key));
      largest = std::max(largest, key);
    }
    rows[segment.row] = of_key(largest);
  }
}

// x, rounded to a multiple of the unit of the window (optim/factored_moments.h).
ZEROPAGE_ELEMENT double in_window(double x, double window) {
  return optim::rounded::add(optim::rounded::add(x, window), -window);
}

template <typename Element>
ZEROPAGE_ELEMENT double square_of(const ScaledGradient<Element>& gradient, int64_t i) {
  const auto wide = static_cast<double>(element(gradient, i));
  return wide * wide;
}

// Sums that go side by side.
constexpr int kSums = 8;

template <typename Element>
ZEROPAGE_ELEMENT void add_all(const ScaledGradient<Element>& gradient, const MatrixPart& part,
                              const FactoredSums& sums) {
  Segments segments(part);
  Segment segment;
  while (segments.next(segment)) {
    double* const columns = sums.columns + segment.column;
    const double* const windows = sums.column_windows + segment.column;
    const double window = sums.row_windows[segment.row];
    double of_row[kSums] = {};
    int64_t i = 0;
    for (; i + kSums <= segment.numel; i += kSums) {
      ZEROPAGE_NO_OVERLAP
      for (int k = 0; k < kSums; ++k) {
        const double square = square_of(gradient, segment.begin + i + k);
        of_row[k] = optim::rounded::add(of_row[k], in_window(square, window));
        columns[i + k] = optim::rounded::add(columns[i + k], in_window(square, windows[i + k]));
      }
    }
    double sum = sums.rows[segment.row];
    for (const double of_lane : of_row) sum = optim::rounded::add(sum, of_lane);
    for (; i < segment.numel; ++i) {
      const double square = square_of(gradient, segment.begin + i);
      sum = optim::rounded::add(sum, in_window(square, window));
      columns[i] = optim::rounded::add(columns[i], in_window(square, windows[i]));
    }
    sums.rows[segment.row] = sum;
  }
}

template <typename Element>
ZEROPAGE_ELEMENT void divide_all(const ScaledGradient<Element>& gradient, const MatrixPart& part,
                                 const FactoredRoots& roots, float* directions) {
  Segments segments(part);
  Segment segment;
  while (segments.next(segment)) {
    const float* const columns = roots.columns + segment.column;
    const float row = roots.rows[segment.row];
    ZEROPAGE_NO_OVERLAP
    for (int64_t i = 0; i < segment.numel; ++i) {
      const float product = optim::rounded::multiply(row, columns[i]);
      const float moment = product < roots.floor ? roots.floor : product;
      directions[segment.begin + i] = optim::rounded::divide(element(gradient, segment.begin + i),
                                                             optim::rounded::square_root(moment));
    }
  }
}

struct Raise {
  float* rows;
  float* columns;
  template <typename Element>
  ZEROPAGE_ELEMENT void operator()(const ScaledGradient<Element>& gradient,
                                   const MatrixPart& part) const {
    raise_all(gradient, part, rows, columns);
  }
};

struct Add {
  FactoredSums sums;
  template <typename Element>
  ZEROPAGE_ELEMENT void operator()(const ScaledGradient<Element>& gradient,
                                   const MatrixPart& part) const {
    add_all(gradient, part, sums);
  }
};

struct Divide {
  FactoredRoots roots;
  float* directions;
  template <typename Element>
  ZEROPAGE_ELEMENT void operator()(const ScaledGradient<Element>& gradient,
                                   const MatrixPart& part) const {
    divide_all(gradient, part, roots, directions);
  }
};

template <typename Loop, typename Element>
void run_on_any_processor(const Loop& loop, const ScaledGradient<Element>& gradient,
                          const MatrixPart& part) {
  loop(gradient, part);
}
template <typename Loop, typename Element>
ZEROPAGE_AVX2 void run_with_avx2(const Loop& loop, const ScaledGradient<Element>& gradient,
                                 const MatrixPart& part) {
  loop(gradient, part);
}
template <typename Loop, typename Element>
ZEROPAGE_AVX512 void run_with_avx512(const Loop& loop, const ScaledGradient<Element>& gradient,
                                     const MatrixPart& part) {
  loop(gradient, part);
}

template <typename Loop, typename Element>
void run_on(const Loop& loop, const ScaledGradient<Element>& gradient, const MatrixPart& part,
            Instructions instructions) {
  switch (usable(instructions)) {
    case Instructions::kAvx512:
      return run_with_avx512(loop, gradient, part);
    case Instructions::kAvx2:
      return run_with_avx2(loop, gradient, part);
    case Instructions::kAnyProcessor:
      break;
  }
  run_on_any_processor(loop, gradient, part);
}

template <typename Loop>
void run(const Loop& loop, const PartGradient& gradient, const MatrixPart& part,
         Instructions instructions) {
  visit_precision(gradient.precision, [&]<typename Element>() {
    const ScaledGradient<Element> scaled{static_cast<const Element*>(gradient.elements),
                                         gradient.scale};
    run_on(loop, scaled, part, instructions);
  });
}

}  // namespace

void raise_to_magnitudes(const PartGradient& gradient, const MatrixPart& part, float* rows,
                         float* columns, Instructions instructions) {
  run(Raise{rows, columns}, gradient, part, instructions);
}

void add_squares(const PartGradient& gradient, const MatrixPart& part, const FactoredSums& sums,
                 Instructions instructions) {
  run(Add{sums}, gradient, part, instructions);
}

void divide_by_roots(const PartGradient& gradient, const MatrixPart& part,
                     const FactoredRoots& roots, float* directions, Instructions instructions) {
  run(Divide{roots, directions}, gradient, part, instructions);
}

}  // namespace zeropage::optim::cpu
