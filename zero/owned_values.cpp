#include "zero/owned_values.h"

#include "optim/split_values.h"
#include "zero/model_parts.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/check.h"

namespace zeropage::zero {

void check_values_can_be_read(const ModelRef& model, const char* who) {
  const ShardedModel& sharded = model->sharded();
  const ParameterPages& pages = *sharded.pages;
  ZP_CHECK(!model->world().device().is_meta(), who, ": a simulated world has no values");
  sharded.in_place->check(who);
  if (!pages.page_offload()) return;
  ZP_CHECK(pages.page_offload()->options().step != StepWhen::kOneStepLate, who,
           ": with StepWhen::kOneStepLate a step is always under way, which changes what this rank "
           "owns; use StepWhen::kInStep or StepWhen::kInBackward");
  for (size_t index = 0; index < pages.parameters().size(); ++index) {
    ZP_CHECK(!sharded.writes->is_in_update(index), who,
             ": backward() has begun the step of parameter \"",
             pages.parameters()[index].parameter.name(),
             "\" (StepWhen::kInBackward), which changes what this rank owns; call it after step()");
  }
}

void visit_exact_values(const ModelRef& model, const char* who,
                        const std::function<void(size_t page, const at::Tensor& exact)>& visit) {
  check_values_can_be_read(model, who);
  const ShardedModel& sharded = model->sharded();
  for (size_t page = 0; page < sharded.pages->layouts().size(); ++page) {
    sharded.writes->take_over(page);
    sharded.masters->visit_owned(page, TierStorage::Use::kRead, [&](const auto& owned) {
      if (is_low_precision(owned.values.scalar_type()) && owned.copy.defined()) {
        visit(page, owned.copy);
      } else if (owned.remainders.defined()) {
        visit(page, optim::joined_values(owned.values, owned.remainders));
      } else {
        visit(page, owned.values);
      }
    });
  }
}

}  // namespace zeropage::zero
