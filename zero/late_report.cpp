#include "zero/late_report.h"

namespace zeropage {

EnqueuedStep::EnqueuedStep(std::shared_ptr<zero::LateReport> report) : report_(std::move(report)) {}

const StepReport& EnqueuedStep::report() const {
  return report_->get();
}

}  // namespace zeropage
