#include "zero/gradients/bucket_gaps.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

namespace zeropage::zero {
namespace {

// From here on one launch over the whole bucket takes less time than one for each gap.
constexpr size_t kMostLaunches = 8;

}  // namespace

std::vector<Range> gaps_between(const ParameterPages& pages, size_t page,
                                const std::vector<size_t>& parameters) {
  std::vector<Range> taken;
  for (const size_t index : parameters) {
    const PlacedParameter& placed = pages.parameters()[index];
    // A strided parameter may have gaps of its own.
    const bool is_dense = placed.parameter.tensor.numel() == placed.range.numel();
    if (is_dense) taken.push_back(placed.range);
  }
  std::sort(taken.begin(), taken.end(),
            [](const Range& left, const Range& right) { return left.begin < right.begin; });
  const int64_t end = pages.layouts()[page].padded_numel(pages.shards(page).size());
  taken.push_back({end, end});
  std::vector<Range> gaps;
  int64_t begin = 0;
  for (const Range& range : taken) {
    if (range.begin > begin) gaps.push_back({begin, range.begin});
    begin = std::max(begin, range.end);
  }
  return gaps;
}

void zero_gaps(const at::Tensor& bucket, const std::vector<Range>& gaps) {
  if (bucket.is_meta()) return;
  if (bucket.is_cpu()) {
    // Gaps are short and many where parameters are small: an operator for each would cost more than the gradients.
    auto* const data = static_cast<char*>(bucket.mutable_data_ptr());
    const auto element = static_cast<int64_t>(bucket.element_size());
    for (const Range& gap : gaps) {
      std::memset(data + gap.begin * element, 0, static_cast<size_t>(gap.numel() * element));
    }
    return;
  }
  if (gaps.size() > kMostLaunches) {
    bucket.zero_();
    return;
  }
  for (const Range& gap : gaps) bucket.narrow(0, gap.begin, gap.numel()).zero_();
}

}  // namespace zeropage::zero
