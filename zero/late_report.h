// The report of a step that was enqueued (zeropage/step_report.h): known, or on its way.
//
// Threads: the training thread.
#pragma once

#include <functional>
#include <optional>
#include <utility>

#include "zeropage/step_report.h"

namespace zeropage::zero {

// A report that is known, or that the device still works at. Copies share it.
class LateReport {
 public:
  explicit LateReport(StepReport known) : report_(std::move(known)) {}
  // wait: blocks until it is known; may throw, and is then called again.
  explicit LateReport(std::function<StepReport()> wait) : wait_(std::move(wait)) {}

  const StepReport& get() {
    if (!report_) {
      report_ = wait_();
      wait_ = nullptr;
    }
    return *report_;
  }

 private:
  std::function<StepReport()> wait_;
  std::optional<StepReport> report_;
};

}  // namespace zeropage::zero
