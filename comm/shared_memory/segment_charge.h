// A rank's part of the segment that the ranks of a host share, on its ledger for as long as it lives. The
// segment is counted once a host, in equal parts.
#pragma once

#include <cstdint>
#include <memory>

#include "zeropage/ledger.h"

namespace zeropage::comm::detail {

class SegmentCharge {
 public:
  explicit SegmentCharge(int64_t bytes) : bytes_(bytes) {
    ledger_->charge(memory::Kind::kStaging, bytes_);
  }
  ~SegmentCharge() { ledger_->discharge(memory::Kind::kStaging, bytes_); }
  SegmentCharge(const SegmentCharge&) = delete;
  SegmentCharge& operator=(const SegmentCharge&) = delete;

 private:
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();
  const int64_t bytes_;
};

}  // namespace zeropage::comm::detail
