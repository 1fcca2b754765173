// A rank's own slice of a tensor that a reduction is made in on the way to its root: put back where the rank is
// not the root.
//
// Memory: as long as the slice, charged as kStaging. Threads: the one that performs the operations.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/ops/empty_like.h>

#include "comm/detail/call.h"
#include "zeropage/ledger.h"

namespace zeropage::comm::detail {

class KeptSlice {
 public:
  KeptSlice(const at::Tensor& slice, bool is_kept) : slice_(slice) {
    if (!is_kept || slice.numel() == 0) return;
    const memory::KindScope kind(memory::Kind::kStaging);
    kept_ = at::empty_like(slice);
    copy_bytes(kept_, slice_);
  }
  KeptSlice(const KeptSlice&) = delete;
  KeptSlice& operator=(const KeptSlice&) = delete;

  // REQUIRES: nobody reads the slice any longer.
  void put_back() const {
    if (kept_.defined()) copy_bytes(slice_, kept_);
  }

 private:
  const at::Tensor slice_;
  at::Tensor kept_;
};

}  // namespace zeropage::comm::detail
