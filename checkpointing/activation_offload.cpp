#include "zeropage/activation_offload.h"

#include <sstream>

#include "checkpointing/detail/activation_offloader.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::checkpointing {

std::string_view name(Compression compression) {
  switch (compression) {
    case Compression::kNone:
      return "none";
    case Compression::kBf16:
      return "bf16";
    case Compression::k8Bit:
      return "8-bit";
  }
  return "unknown";
}

std::string to_string(const ActivationOffloadStatistics& statistics) {
  using memory::format_bytes;
  std::ostringstream out;
  out << statistics.saved_tensors << " saved tensors in " << statistics.copies << " copies, "
      << format_bytes(statistics.host_total_bytes) << " in all and at most "
      << format_bytes(statistics.host_peak_bytes) << " at once " << statistics.where;
  if (statistics.compression != Compression::kNone) {
    out << " (lossy: " << name(statistics.compression) << ")";
  }
  out << "; " << format_bytes(statistics.fetched_bytes) << " brought back, "
      << format_bytes(statistics.fetched_ahead_bytes) << " of it ahead; waited "
      << statistics.waited_seconds << " s";
  return out.str();
}

ActivationOffload::ActivationOffload(const ActivationOffloadOptions& options)
    : offloader_(std::make_shared<detail::ActivationOffloader>(options)) {
  ZP_CHECK(options.least_bytes >= 0 && options.staging_bytes >= 0,
           "ActivationOffload: expected bytes of 0 or more, got least_bytes ", options.least_bytes,
           " and staging_bytes ", options.staging_bytes, "; 0 leaves the choice of staging to it");
}

ActivationOffload::~ActivationOffload() = default;
ActivationOffload::ActivationOffload(ActivationOffload&&) noexcept = default;
ActivationOffload& ActivationOffload::operator=(ActivationOffload&&) noexcept = default;

std::shared_ptr<SavedTensorHooks> ActivationOffload::hooks() const {
  return offloader_;
}

std::unique_ptr<ActivationPolicy::Forward> ActivationOffload::begin_forward() {
  check_not_moved_from(offloader_ != nullptr, "ActivationOffload");
  const auto around = SavedTensorScope::current();
  const auto deciding = around ? around->handing_on_to(offloader_) : nullptr;
  return forward_through(deciding ? deciding : offloader_);
}

void ActivationOffload::stay_here(const std::vector<at::Tensor>& tensors) {
  offloader_->stay_here(tensors);
}

ActivationOffloadStatistics ActivationOffload::statistics() const {
  return offloader_->statistics();
}

}  // namespace zeropage::checkpointing
