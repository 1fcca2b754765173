#include <utility>

#include "zeropage/check.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing {

void ActivationPolicy::check_not_moved_from(bool has_state, const char* policy) {
  ZP_CHECK(has_state, "ActivationScope: this ", policy,
           " was moved from, so it has no state; use the one that it was moved to");
}

std::unique_ptr<ActivationPolicy::Forward> ActivationPolicy::forward_through(
    std::shared_ptr<SavedTensorHooks> hooks) {
  class ThroughHooks final : public Forward {
   public:
    explicit ThroughHooks(std::shared_ptr<SavedTensorHooks> hooks) : scope_(std::move(hooks)) {}

   private:
    const SavedTensorScope scope_;
  };
  return std::make_unique<ThroughHooks>(std::move(hooks));
}

}  // namespace zeropage::checkpointing
