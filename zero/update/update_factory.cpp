#include "zero/update/update_factory.h"

#include <utility>

#include "zero/update/class_update.h"
#include "zero/update/fused_update.h"
#include "zero/update/stochastic_update.h"
#include "zeropage/check.h"

namespace zeropage::zero {

// The option that the class itself cannot do; null: none.
const char* UpdateFactory::what_needs_fused() const {
  if (parameters_.options.optimizer_state != StateFormat::kFp32) {
    return "options.optimizer_state";
  }
  return parameters_.masters->are_split() ? "options.low_precision_update" : nullptr;
}

bool UpdateFactory::updates_fused() const {
  const bool has_fused = static_cast<bool>(algorithm_.make_fused);
  if (const char* const option = what_needs_fused()) {
    ZP_CHECK(has_fused, option, ": is done by the fused update, but ", algorithm_.class_name,
             " has no fused form, ", names_with_fused_form(), " have; leave it out");
    return true;
  }
  switch (parameters_.options.update_by) {
    case UpdateBy::kClass:
      ZP_CHECK(
          algorithm_.tensors == nullptr, "options.update_by: ", algorithm_.class_name,
          " reads whole tensors, and the class by itself would take a rank's part for one; use "
          "UpdateBy::kAuto or UpdateBy::kFused");
      return false;
    case UpdateBy::kFused:
      ZP_CHECK(has_fused, "options.update_by: ", algorithm_.class_name, " has no fused form, ",
               names_with_fused_form(), " have; use UpdateBy::kAuto or UpdateBy::kClass");
      return true;
    case UpdateBy::kAuto:
      break;
  }
  const c10::Device device = parameters_.pages->world().communicator().device();
  const bool can = has_fused && (device.is_cpu() || device.is_cuda() || device.is_meta());
  ZP_CHECK(can || algorithm_.tensors == nullptr, algorithm_.class_name, ": has no update on ",
           device, "; use a device of CUDA or the CPU, or offload the optimizer to the host");
  return can;
}

bool UpdateFactory::rounds_stochastically(const PageLayout& layout) const {
  if (parameters_.options.low_precision_update != LowPrecisionUpdate::kStochasticRounding) {
    return false;
  }
  ZP_CHECK(layout.dtype != at::kHalf,
           "options.low_precision_update: LowPrecisionUpdate::kStochasticRounding is for bfloat16, "
           "but page \"",
           layout.name, "\" is half; use LowPrecisionUpdate::kMasterWeights");
  return layout.dtype == at::kBFloat16;
}

OwnedPart UpdateFactory::owned_part(size_t page) const {
  return {.values = parameters_.memory->owned(page),
          .remainders = parameters_.masters->remainders(page),
          .rounding_seed = parameters_.options.rounding_seed};
}

std::unique_ptr<PageUpdate> UpdateFactory::make_fused(OwnedPart part) const {
  return algorithm_.make_fused(std::move(part));
}

std::unique_ptr<PageUpdate> UpdateFactory::make(size_t page) const {
  const PageLayout& layout = parameters_.pages->layouts()[page];
  const MakePageUpdate make_update = [&](OwnedPart part) -> std::unique_ptr<PageUpdate> {
    if (fused_ && (part.values.scalar_type() == at::kFloat || part.remainders.defined())) {
      return algorithm_.make_fused(std::move(part));
    }
    ZP_CHECK(
        algorithm_.tensors == nullptr, algorithm_.class_name,
        ": expected fp32 values or master weights, but page \"", layout.name, "\" has ",
        part.values.scalar_type(),
        " without them; set options.low_precision_update to LowPrecisionUpdate::kMasterWeights "
        "or LowPrecisionUpdate::kStochasticRounding for low precision, or convert the module to "
        "fp32");
    return std::make_unique<ClassUpdate>(std::move(part), algorithm_.make_class_optimizer);
  };
  OwnedPart part = owned_part(page);
  if (rounds_stochastically(layout)) {
    return std::make_unique<StochasticUpdate>(part, parameters_.options.rounding_seed, make_update);
  }
  const at::Tensor& master_copy = parameters_.masters->copy(page);
  if (master_copy.defined()) {
    part.copy_out = std::exchange(part.values, master_copy);
    part.adopts_copy = true;
  }
  const char* const option = what_needs_fused();
  ZP_CHECK(part.values.scalar_type() == at::kFloat || part.remainders.defined() ||
               (parameters_.options.update_by != UpdateBy::kFused && option == nullptr),
           option == nullptr ? "options.update_by" : option,
           ": the fused update is of fp32 values, but page \"", layout.name, "\" has ",
           part.values.scalar_type(),
           " and is rounded to nearest without master weights; set options.low_precision_update to "
           "LowPrecisionUpdate::kMasterWeights or LowPrecisionUpdate::kStochasticRounding, or use "
           "UpdateBy::kAuto");
  return make_update(std::move(part));
}

}  // namespace zeropage::zero
