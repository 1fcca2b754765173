#include "saving/detail/element_runs.h"

#include <algorithm>
#include <vector>

namespace zeropage::saving {
namespace {

// A slice lies in blocks: of each index of the dimensions before the cut one, a block for each part.
class SliceBlocks {
 public:
  SliceBlocks(const zero::ParameterSlice& slice, at::IntArrayRef sizes) {
    int64_t inner = 1;
    for (size_t dim = sizes.size(); dim-- > static_cast<size_t>(slice.cut.dim()) + 1;) {
      inner *= sizes[dim];
    }
    const int rank = slice.ranks.rank();
    for (const parallel::Slices& part : slice.cut.parts()) {
      blocks_.push_back({in_slice_, in_whole_ + part.begin(rank) * inner, part.size(rank) * inner});
      in_slice_ += part.size(rank) * inner;
      in_whole_ += part.total() * inner;
    }
  }

  // run: by the order of the slice.
  void visit(ElementRun run, const std::function<void(const ElementRun&)>& visit) const {
    while (run.numel > 0) {
      const int64_t index = run.in_whole / in_slice_, past = run.in_whole % in_slice_;
      const auto block = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& candidate) {
        return past < candidate.in_slice + candidate.numel;
      });
      const int64_t here = std::min(run.numel, block->in_slice + block->numel - past);
      visit({index * in_whole_ + block->in_whole + past - block->in_slice, run.in_page, here});
      run = {run.in_whole + here, run.in_page + here, run.numel - here};
    }
  }

 private:
  struct Block {
    int64_t in_slice;  // where it begins, in elements
    int64_t in_whole;
    int64_t numel;
  };

  std::vector<Block> blocks_;  // of one index, by part
  int64_t in_slice_ = 0;       // elements of them, and of the whole
  int64_t in_whole_ = 0;
};

}  // namespace

void for_each_run(const zero::PlacedParameter& placed, const Range& in_page,
                  const std::function<void(const ElementRun&)>& visit) {
  const at::Tensor& tensor = placed.parameter.tensor;
  const auto& slice = placed.parameter.slice;
  if (tensor.numel() == 0) return;
  const auto visit_run = [&](const ElementRun& run) {
    if (slice) {
      SliceBlocks(*slice, tensor.sizes()).visit(run, visit);
    } else {
      visit(run);
    }
  };
  // The last dimensions that lie as in a contiguous tensor are one stretch.
  int64_t stretch = 1;
  int64_t outer = tensor.dim();
  while (outer > 0 && (tensor.size(outer - 1) == 1 || tensor.stride(outer - 1) == stretch)) {
    stretch *= tensor.size(--outer);
  }
  std::vector<int64_t> index(static_cast<size_t>(outer), 0);
  for (int64_t first = 0; first < tensor.numel(); first += stretch) {
    int64_t begin = placed.offset;
    for (int64_t dim = 0; dim < outer; ++dim) {
      begin += index[static_cast<size_t>(dim)] * tensor.stride(dim);
    }
    const Range found = intersection(in_page, {begin, begin + stretch});
    if (!found.empty()) visit_run({first + found.begin - begin, found.begin, found.numel()});
    for (int64_t dim = outer; dim-- > 0;) {
      if (++index[static_cast<size_t>(dim)] < tensor.size(dim)) break;
      index[static_cast<size_t>(dim)] = 0;
    }
  }
}

}  // namespace zeropage::saving
