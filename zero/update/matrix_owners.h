// Which rank computes the update of which matrix, where an optimizer reads whole ones (optim/tensor_form.h). The rank has the
// matrix for that time only: states stay where they are.
//
// Pages go in buckets, one after the other, so that what ranks hold of other ranks' matrices is bounded. Within a bucket the
// dearest matrix goes first, to the rank that has the least to do so far (longest processing time; Graham 1969).
//
// Pure: follows from the layout and the groups' options, and is the same on all ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace zeropage::zero {

struct OwnedMatrix {
  size_t parameter = 0;
  double cost = 0;
  int owner = 0;
};

struct PageOfMatrices {
  int64_t numel = 0;  // of all parameters that have directions
  std::vector<OwnedMatrix> matrices = {};
};

// Pages [first_page, end_page) of a list of pages, and the matrices in them.
struct MatrixBucket {
  size_t first_page = 0;
  size_t end_page = 0;
  std::vector<OwnedMatrix> matrices = {};
};

// Elements of a bucket, for each rank: 32 MiB in fp32.
inline constexpr int64_t kBucketNumel = int64_t{8} << 20;

// pages: the owners of their matrices are not known yet. Makes as many buckets as have about that many elements a rank each.
// Several ranks have at least four buckets where that leaves each rank four matrices of a bucket, so that messages travel beside
// the work; with fewer matrices, fewer buckets. A page is in one.
std::vector<MatrixBucket> matrix_buckets(const std::vector<PageOfMatrices>& pages, int ranks,
                                         int64_t bucket_numel = kBucketNumel);

}  // namespace zeropage::zero
