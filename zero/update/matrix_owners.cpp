#include "zero/update/matrix_owners.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace zeropage::zero {
namespace {

// A bucket is as long as its dearest matrix, so small ones balance worse.
constexpr int64_t kBucketsBesideMessages = 4;
constexpr int64_t kLeastMatricesOfRank = 4;

int64_t bucket_count(const std::vector<PageOfMatrices>& pages, int ranks, int64_t bucket_numel) {
  int64_t numel = 0;
  int64_t matrices = 0;
  for (const PageOfMatrices& page : pages) {
    numel += page.numel;
    matrices += static_cast<int64_t>(page.matrices.size());
  }
  const int64_t full =
      std::llround(static_cast<double>(numel) / (static_cast<double>(bucket_numel) * ranks));
  const int64_t beside_messages =
      ranks == 1 ? 1 : std::min(kBucketsBesideMessages, matrices / (kLeastMatricesOfRank * ranks));
  return std::max({int64_t{1}, full, beside_messages});
}

void assign_owners(std::vector<OwnedMatrix>& matrices, std::vector<double>& loads) {
  std::vector<OwnedMatrix*> dearest_first;
  for (OwnedMatrix& matrix : matrices) dearest_first.push_back(&matrix);
  std::stable_sort(
      dearest_first.begin(), dearest_first.end(),
      [](const OwnedMatrix* left, const OwnedMatrix* right) { return left->cost > right->cost; });
  for (OwnedMatrix* const matrix : dearest_first) {
    const auto least = std::min_element(loads.begin(), loads.end());
    matrix->owner = static_cast<int>(std::distance(loads.begin(), least));
    *least += matrix->cost;
  }
}

}  // namespace

std::vector<MatrixBucket> matrix_buckets(const std::vector<PageOfMatrices>& pages, int ranks,
                                         int64_t bucket_numel) {
  int64_t all = 0;
  for (const PageOfMatrices& page : pages) all += page.numel;
  const int64_t count = bucket_count(pages, ranks, bucket_numel);
  std::vector<MatrixBucket> buckets;
  int64_t numel = 0;
  for (size_t page = 0; page < pages.size(); ++page) {
    if (buckets.empty() || (all > 0 && numel * count >= all)) {
      buckets.push_back({.first_page = page});
      numel = 0;
    }
    MatrixBucket& bucket = buckets.back();
    bucket.end_page = page + 1;
    const std::vector<OwnedMatrix>& matrices = pages[page].matrices;
    bucket.matrices.insert(bucket.matrices.end(), matrices.begin(), matrices.end());
    numel += pages[page].numel;
  }
  std::vector<double> loads(static_cast<size_t>(ranks));
  for (MatrixBucket& bucket : buckets) assign_owners(bucket.matrices, loads);
  return buckets;
}

}  // namespace zeropage::zero
