// The hooks behind ActivationOffload: which saved tensors leave.
//
// Lifetime: graphs may outlive it; what has left shares its traffic.
// Threads: any.
#pragma once

#include <memory>
#include <vector>

#include "checkpointing/detail/offload_traffic.h"
#include "checkpointing/detail/saved_storage.h"
#include "zeropage/activation_offload.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::detail {

class ActivationOffloader final : public SavedTensorHooks,
                                  public std::enable_shared_from_this<ActivationOffloader> {
 public:
  explicit ActivationOffloader(const ActivationOffloadOptions& options)
      : traffic_(std::make_shared<OffloadTraffic>(options)) {}

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override;
  std::shared_ptr<SavedTensorHooks> place_of_storages() override { return shared_from_this(); }
  void stay_here(const std::vector<at::Tensor>& tensors);
  ActivationOffloadStatistics statistics() const { return traffic_->statistics(); }

 private:
  std::shared_ptr<SavedStorage> leave(const at::Tensor& tensor, const Span& span);

  const std::shared_ptr<OffloadTraffic> traffic_;
  SavedSpans spans_;
};

}  // namespace zeropage::checkpointing::detail
