// Cuts a data set into parts, such as one a rank, as the DataPartitioner of PyTorch's tutorial on writing distributed
// applications does.
//
//   DataPartitioner parts(images.size(), {0.5, 0.5}, /*seed=*/1234);  // alike on all ranks
//   auto mine = images.of(parts.use(world.rank()));
//
// Every sample is in exactly one part where the sizes add up to 1. (The tutorial's rounds each part down, so that it may lose some.)
// Threads: constant after construction.
#pragma once

#include <cstdint>
#include <vector>

namespace zeropage::data {

class DataPartitioner {
 public:
  // sizes: of the parts, as fractions of all samples; each above 0, together at most 1. The samples are
  // shuffled by the seed first. Throws c10::Error for other sizes, and for a part that would have no sample.
  DataPartitioner(int64_t samples, const std::vector<double>& sizes, uint64_t seed);
  // The same with `parts` equal sizes, which differ by at most one sample.
  static DataPartitioner equal(int64_t samples, int parts, uint64_t seed);

  int parts() const { return static_cast<int>(parts_.size()); }
  // The samples of a part, shuffled. Throws for a part that there is not.
  const std::vector<int64_t>& use(int part) const;

 private:
  std::vector<std::vector<int64_t>> parts_;
};

}  // namespace zeropage::data
