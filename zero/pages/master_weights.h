// What a rank keeps in fp32 of the parameters that it updates: a copy of them, or the 16 bits that bf16
// parameters lack. Parameters in a lower precision have it, and offloaded fp32 ones, whose optimizer
// updates a copy in its tier.
//
// A user may write to parameters between two steps, by whatever way. Master weights beside their page
// follow in the update itself (OwnedPart::adopts_copy). A copy in another tier does not see the
// parameters, so blocks that were written to are looked for (zero/pages/written_blocks.h) and brought.
//
// Lifetime: shares the pages' memory. Threads: the training thread, or the one that runs backward.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/page_memory.h"
#include "zero/pages/parameter_pages.h"
#include "zero/pages/written_blocks.h"
#include "zero/tiers/tier_storage.h"

namespace zeropage::zero {

class MasterWeights {
 public:
  // Makes those that are in a tier: a file has its size before the first use of what is in it.
  MasterWeights(std::shared_ptr<const ParameterPages> pages,
                std::shared_ptr<const PageMemory> memory);

  // What the optimizer updates in place of the parameters: [owned numel] fp32, or undefined.
  const at::Tensor& copy(size_t page) const { return kept_[page].copy; }
  // What makes fp32 of bf16 parameters: [owned numel] int16, or undefined.
  const at::Tensor& remainders(size_t page) const { return kept_[page].remainders; }
  // Whether any page has them.
  bool are_split() const { return are_split_; }

  // Those of the page that are on the device. Zeros.
  void make(size_t page);
  // The same, of a page that was frozen: with the values of its parameters.
  void begin_training(size_t page);

  // This rank's memory of the page, which it has until visit returns.
  struct Owned {
    at::Tensor values;      // [owned numel], as PageMemory::owned()
    at::Tensor copy;        // as copy()
    at::Tensor remainders;  // as remainders()
  };
  void visit_owned(size_t page, TierStorage::Use use,
                   const std::function<void(const Owned&)>& visit) const;

  // What of it is on the device.
  void visit(const VisitMemory& visit) const;

  // All pages have their values, and writes to them are noticed from here on.
  void begin_noticing();
  // They take over what was written to parameters since then, or since the last update or load.
  void take_over_writes() const;
  void take_over_writes(size_t page) const;
  // The same, of copies in another tier alone: all that is to be done before an update.
  void take_over_writes_in_tiers() const;
  void take_over_writes_in_tiers(size_t page) const;
  // What parameters have now was written by an update, or by a load, and not by the user.
  void end_update();
  void end_load() { written_.note(); }

 private:
  struct OfPage {
    at::Tensor copy;
    at::Tensor remainders;
  };

  MasterWeightsAs kept_as(size_t page) const { return pages_->plan()[page].masters; }
  at::Tensor make_copy(size_t page) const;
  bool is_copied_elsewhere(size_t page) const;
  void adopt_blocks_of(size_t page, const at::Tensor& blocks) const;
  void adopt_page(size_t page) const;

  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<const PageMemory> memory_;
  std::vector<OfPage> kept_;  // by page
  WrittenBlocks written_;     // of pages that have a copy in another tier
  bool are_split_ = false;
  bool was_updated_ = false;
};

}  // namespace zeropage::zero
