#include "zero/layout/shard_layout.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/exact.h"

namespace zeropage::zero {
namespace {

using base::div_ceil;
using base::round_up;

// A unit smaller than this share of a page is packed together with the next one.
constexpr int64_t kLeastUnitShare = 16;

// "blocks.3" for blocks.3.norm.weight and blocks.3.up.bias; "first .. last" where nothing is
// shared.
std::string common_name(const std::string& first, const std::string& last) {
  if (first == last) return first;
  const auto mismatch = std::mismatch(first.begin(), first.end(), last.begin(), last.end());
  const size_t shared = static_cast<size_t>(mismatch.first - first.begin());
  const size_t dot = first.rfind('.', shared == 0 ? 0 : shared - 1);
  if (shared == 0 || dot == std::string::npos) return first + " .. " + last;
  return first.substr(0, dot);
}

// Errors and messages between ranks know a page by its name.
void tell_apart(std::vector<PageLayout>& pages) {
  std::map<std::string, int> seen;
  for (PageLayout& page : pages) {
    const int count = ++seen[page.name];
    if (count > 1) page.name += " (part " + std::to_string(count) + ")";
  }
}

class Packer {
 public:
  Packer(const std::vector<StorageSpec>& storages, const zero::LayoutOptions& options)
      : storages_(storages), options_(options) {}

  std::vector<PageLayout> pack() {
    for (size_t index = 0; index < storages_.size(); ++index) {
      if (index > 0 && storages_[index].unit != storages_[index - 1].unit) end_unit();
      add(index);
    }
    for (auto& [key, page] : open_) close(page);
    // Open pages of different dtypes close at different times; the order of their first storages is
    // the module's.
    std::sort(closed_.begin(), closed_.end(), [](const PageLayout& left, const PageLayout& right) {
      return left.slots.front().storage < right.slots.front().storage;
    });
    tell_apart(closed_);
    return std::move(closed_);
  }

 private:
  using Key = std::tuple<c10::ScalarType, bool, bool>;

  int64_t bytes_of(const PageLayout& page) const {
    return page.numel * static_cast<int64_t>(c10::elementSize(page.dtype));
  }

  void add(size_t index) {
    const StorageSpec& storage = storages_[index];
    PageLayout& page = open_[{storage.dtype, storage.requires_grad, storage.of_experts}];
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(storage.dtype));
    const bool is_full =
        bytes_of(page) + storage.numel * element_bytes > options_.page_bytes || storage.alone;
    if (!page.slots.empty() && is_full) close(page);
    page.dtype = storage.dtype;
    page.requires_grad = storage.requires_grad;
    page.of_experts = storage.of_experts;
    const int64_t begin = round_up(page.numel, zero::kSlotAlignmentBytes / element_bytes);
    zero::Slot& slot = page.slots.emplace_back(zero::Slot{index, {begin, begin + storage.numel}});
    for (const Range& range : storage.parameters) {
      slot.parameters.push_back({begin + range.begin, begin + range.end});
    }
    if (slot.parameters.empty()) slot.parameters.push_back(slot.range);
    page.numel = begin + storage.numel;
    if (storage.alone) close(page);
  }

  void end_unit() {
    for (auto& [key, page] : open_) {
      if (bytes_of(page) * kLeastUnitShare >= options_.page_bytes) close(page);
    }
  }

  void close(PageLayout& page) {
    if (page.slots.empty()) return;
    page.name = common_name(storages_[page.slots.front().storage].name,
                            storages_[page.slots.back().storage].name);
    const int ranks = page.of_experts ? options_.ranks_of_experts : options_.world_size;
    const int64_t share = div_ceil<int64_t>(page.numel, ranks);
    page.shard_numel = std::max(zero::kShardBlockNumel, round_up(share, zero::kShardBlockNumel));
    closed_.push_back(std::exchange(page, {}));
  }

  const std::vector<StorageSpec>& storages_;
  const zero::LayoutOptions& options_;
  std::map<Key, PageLayout> open_;
  std::vector<PageLayout> closed_;
};

}  // namespace

Range PageLayout::padding_after(int64_t end) const {
  const auto next =
      std::lower_bound(slots.begin(), slots.end(), end,
                       [](const zero::Slot& slot, int64_t at) { return slot.range.end < at; });
  if (next == slots.end() || next->range.end != end) return {end, end};
  return {end, next + 1 == slots.end() ? numel : (next + 1)->range.begin};
}

std::vector<PageLayout> lay_out_pages(const std::vector<StorageSpec>& storages,
                                      const zero::LayoutOptions& options) {
  TORCH_INTERNAL_ASSERT(options.world_size > 0 && options.page_bytes > 0);
  return Packer(storages, options).pack();
}

}  // namespace zeropage::zero

namespace zeropage {

Range intersection(const Range& left, const Range& right) {
  const int64_t begin = std::max(left.begin, right.begin);
  return {begin, std::max(begin, std::min(left.end, right.end))};
}

}  // namespace zeropage
