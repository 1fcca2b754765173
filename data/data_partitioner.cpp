#include "zeropage/data/data_partitioner.h"

#include <algorithm>
#include <cmath>

#include "zeropage/check.h"
#include "zeropage/data/random.h"

namespace zeropage::data {
namespace {

// What 3 times 1/3, or 10 times 0.1, may be away from 1.
constexpr double kSumTolerance = 1e-9;

}  // namespace

DataPartitioner::DataPartitioner(int64_t samples, const std::vector<double>& sizes, uint64_t seed) {
  double sum = 0;
  for (const double size : sizes) {
    ZP_CHECK(size > 0 && size <= 1, "DataPartitioner: expected sizes above 0 and at most 1, got ",
             size);
    sum += size;
  }
  ZP_CHECK(!sizes.empty() && sum <= 1 + kSumTolerance,
           "DataPartitioner: expected sizes that add up to at most 1, got ", sizes.size(),
           " that add up to ", sum);
  const std::vector<int64_t> order = permutation(samples, seed);
  int64_t begin = 0;
  double before = 0;
  for (const double size : sizes) {
    before += size;
    const auto end = std::min(
        samples, static_cast<int64_t>(std::llround(before * static_cast<double>(samples))));
    ZP_CHECK(end > begin, "DataPartitioner: part ", parts_.size(), " of size ", size, " of ",
             samples, " samples would have none; give more samples or fewer parts");
    parts_.emplace_back(order.begin() + begin, order.begin() + end);
    begin = end;
  }
}

DataPartitioner DataPartitioner::equal(int64_t samples, int parts, uint64_t seed) {
  ZP_CHECK(parts >= 1, "DataPartitioner: expected at least one part, got ", parts);
  return {samples, std::vector<double>(static_cast<size_t>(parts), 1.0 / parts), seed};
}

const std::vector<int64_t>& DataPartitioner::use(int part) const {
  ZP_CHECK(part >= 0 && part < parts(), "DataPartitioner::use(): there is no part ", part,
           "; expected 0 to ", parts() - 1);
  return parts_[static_cast<size_t>(part)];
}

}  // namespace zeropage::data
