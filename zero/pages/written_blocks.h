// Notices what the user wrote to parameters whose fp32 copy is in another tier, and takes it over:
// blocks of 256 elements that have other bits than when they were noted are brought to the copy, and
// no others. A write is noticed whoever made it: operators, .data(), or a kernel past the dispatcher.
//
// Costs 8 bytes for 256 elements of what this rank owns, on their device, and two readings of the
// parameters a step. On an accelerator the host waits once for the answer of all pages together.
//
// Threads: the training thread, or the one that runs backward.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/memory_holders.h"

namespace zeropage::zero {

class WrittenBlocks {
 public:
  // owned: bf16, fp16 or fp32, of whole blocks; always the same memory. Notes what it has.
  void add(size_t page, const at::Tensor& owned);
  bool has(size_t page) const { return pages_.contains(page); }

  // What the pages have is from here on what they were left with.
  void note();
  void note(size_t page);

  // The hashes.
  void visit(const VisitMemory& visit) const {
    for (const auto& [page, of_page] : pages_) {
      visit(of_page.hashes, memory::Kind::kActivationAndOther);
    }
  }

  // Calls take_over(page, blocks) for each page that was written to since. blocks: int64 [written], on
  // the page's device.
  using TakeOver = std::function<void(size_t page, const at::Tensor& blocks)>;
  void visit_written(const TakeOver& take_over) const;
  void visit_written(size_t page, const TakeOver& take_over) const;

 private:
  struct OfPage {
    at::Tensor owned;   // [owned numel]
    at::Tensor hashes;  // int64 [owned numel / 256]
  };

  std::map<size_t, OfPage> pages_;
};

// For each of these blocks: elements of `values`, on the host, take over those of `owned` that are
// something else than `values`, rounded. values: fp32; owned: as above, of the same numel.
void adopt_blocks(const at::Tensor& values, const at::Tensor& owned, const at::Tensor& blocks);

}  // namespace zeropage::zero
