#include "language_model/model/wrapped_model.h"

namespace language_model {

Rows own_part(const WrappedModel& model, const Rows& rows) {
  const ContextAxis* const context = model->context();
  const auto own = [&](const torch::Tensor& whole) {
    if (!whole.defined()) return whole;
    const torch::Tensor part =
        context == nullptr ? whole : zeropage::parallel::split_context(whole, 1, context->ranks);
    return part.to(model.world().device());
  };
  // Ranks compare what they split last, so that is the tokens.
  const torch::Tensor documents = own(rows.documents), targets = own(rows.targets);
  return {.tokens = own(rows.tokens), .targets = targets, .documents = documents};
}

}  // namespace language_model
