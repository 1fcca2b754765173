// Keeps what is kept of a page in tiers in memory.
//
// Throws what a disk does not take at the end, unless an exception is passing already: the step or the
// save ends with that one.
#pragma once

#include <exception>
#include <memory>

#include "zero/tiers/page_offload.h"

namespace zeropage::zero {

class TierUse {
 public:
  // page_offload: null where all stays on the device.
  TierUse(std::shared_ptr<PageOffload> page_offload, size_t page,
          TierStorage::Use use = TierStorage::Use::kWrite)
      : page_offload_(std::move(page_offload)), page_(page), use_(use) {
    if (page_offload_) page_offload_->fetch_values(page_);
  }
  ~TierUse() noexcept(false) {
    if (!page_offload_) return;
    try {
      page_offload_->release_values(page_, use_);
    } catch (const std::exception&) {
      if (std::uncaught_exceptions() == exceptions_) throw;
    }
  }
  TierUse(const TierUse&) = delete;
  TierUse& operator=(const TierUse&) = delete;

 private:
  const std::shared_ptr<PageOffload> page_offload_;
  const size_t page_;
  const TierStorage::Use use_;
  const int exceptions_ = std::uncaught_exceptions();
};

}  // namespace zeropage::zero
