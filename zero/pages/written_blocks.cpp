#include "zero/pages/written_blocks.h"

#include <ATen/ATen.h>

#include "optim/adopt_copy.h"
#include "optim/block_hashes.h"

namespace zeropage::zero {
namespace {

at::Tensor by_blocks(const at::Tensor& flat) {
  return flat.view({-1, optim::kHashedNumel});
}

}  // namespace

void WrittenBlocks::add(size_t page, const at::Tensor& owned) {
  pages_[page] = {owned, optim::block_hashes(owned)};
}

void WrittenBlocks::note() {
  for (auto& [page, of_page] : pages_) of_page.hashes = optim::block_hashes(of_page.owned);
}

void WrittenBlocks::note(size_t page) {
  const auto at = pages_.find(page);
  if (at != pages_.end()) at->second.hashes = optim::block_hashes(at->second.owned);
}

void WrittenBlocks::visit_written(const TakeOver& take_over) const {
  std::vector<at::Tensor> differ, any;
  for (const auto& [page, of_page] : pages_) {
    differ.push_back(optim::block_hashes(of_page.owned).ne(of_page.hashes));
    any.push_back(differ.back().any());
  }
  if (any.empty() || any.front().is_meta()) return;
  const at::Tensor written = at::stack(any).cpu();
  size_t index = 0;
  for (const auto& [page, of_page] : pages_) {
    if (written.const_data_ptr<bool>()[index]) {
      take_over(page, differ[index].nonzero().flatten());
    }
    ++index;
  }
}

void WrittenBlocks::visit_written(size_t page, const TakeOver& take_over) const {
  const auto at = pages_.find(page);
  if (at == pages_.end() || at->second.owned.is_meta()) return;
  const at::Tensor blocks =
      optim::block_hashes(at->second.owned).ne(at->second.hashes).nonzero().flatten();
  if (blocks.numel() > 0) take_over(page, blocks);
}

void adopt_blocks(const at::Tensor& values, const at::Tensor& owned, const at::Tensor& blocks) {
  const at::Tensor written = by_blocks(owned).index_select(0, blocks).to(values.device());
  const at::Tensor places = blocks.to(values.device());
  const at::Tensor adopting = by_blocks(values).index_select(0, places);
  optim::adopt_copy(adopting.flatten(), written.flatten());
  by_blocks(values).index_copy_(0, places, adopting);
}

}  // namespace zeropage::zero
