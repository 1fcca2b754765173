// What users do to parameters between two steps: write to them, also past autograd, and give them other
// memory.
#include <algorithm>

#include "memory/check.h"
#include "memory/storage.h"
#include "offload/adopt_copy.h"
#include "zero/pages/parameter_pages.h"
#include "zero/pages/tier_use.h"

namespace zeropage {
namespace {

// The values of a parameter that has other memory. torch::load() gives a parameter the storage of a file
// and leaves it its own dtype, whatever the file's is: the bytes of an element tell.
at::Tensor as_given(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  for (const at::ScalarType wide : {at::kFloat, at::kDouble}) {
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(wide));
    if (bytes != tensor.numel() * element_bytes || bytes == 0) continue;
    if (element_bytes <= static_cast<int64_t>(tensor.element_size())) break;
    return memory::tensor_in(tensor.storage(), tensor, tensor.storage_offset(), wide);
  }
  return tensor.detach();
}

}  // namespace

// The optimizer updates a copy in another tier, and the parameters are not there for a look.
bool ParameterPages::is_copied_elsewhere(size_t page) const {
  return memory_[page].master.defined() && offloads_optimizer(page) && !offloads_parameters(page);
}

// blocks: of what this rank owns, that the user wrote to.
void ParameterPages::adopt_written(size_t page, const at::Tensor& blocks) {
  ZP_CHECK(
      options_.page_offload->options().step != StepWhen::kOneStepLate || !was_updated_,
      describe(page),
      ": its parameters were written to between two steps, but with StepWhen::kOneStepLate the "
      "next update of their older values is under way already; write before the first step, or "
      "use StepWhen::kInStep");
  const TierUse use(page_offload(), page);
  adopt_blocks(memory_[page].master, memory_[page].owned, blocks);
}

void ParameterPages::begin_update() {
  if (pager_) pager_->release_all("step()");
  const bool made_in_backward =
      options_.page_offload && options_.page_offload->options().step == StepWhen::kInBackward;
  if (made_in_backward) return check_unwritten_since_backward();
  written_.visit_written(
      [this](size_t page, const at::Tensor& blocks) { adopt_written(page, blocks); });
}

void ParameterPages::begin_update_in_backward(size_t page,
                                              const std::function<bool(size_t)>& has_gradient) {
  if (is_sharded(page)) pager_->write_back(memory_[page].pager_index);
  written_.visit_written(
      page, [this](size_t written, const at::Tensor& blocks) { adopt_written(written, blocks); });
  for (size_t index = 0; index < parameters_.size(); ++index) {
    PlacedParameter& placed = parameters_[index];
    if (placed.page != page || !has_gradient(index)) continue;
    // A node of this backward that still needs the values from before is refused.
    placed.parameter.tensor.unsafeGetTensorImpl()->bump_version();
    placed.version = placed.parameter.tensor._version();
  }
}

// Backward has made the step from what was there, and nothing follows it but step().
void ParameterPages::check_unwritten_since_backward() const {
  for (const PlacedParameter& placed : parameters_) {
    ZP_CHECK(placed.version == 0 || placed.version == placed.parameter.tensor._version(),
             "parameter \"", placed.parameter.name(),
             "\" was written to between backward(), which has made its step already "
             "(StepWhen::kInBackward), and step(); write after step(), or use StepWhen::kInStep");
  }
}

void ParameterPages::take_over_writes(const char* who) {
  check_in_place(who);
  if (pager_) pager_->release_all(who);
  written_.visit_written(
      [this](size_t page, const at::Tensor& blocks) { adopt_written(page, blocks); });
  for (size_t page = 0; page < layouts_.size(); ++page) adopt_into_master(page);
}

void ParameterPages::take_over_writes(size_t page) {
  if (is_sharded(page)) pager_->write_back(memory_[page].pager_index);
  written_.visit_written(
      page, [this](size_t written, const at::Tensor& blocks) { adopt_written(written, blocks); });
  adopt_into_master(page);
}

void ParameterPages::adopt_into_master(size_t page) {
  const PageMemory& memory = memory_[page];
  if (!memory.master.defined() || is_copied_elsewhere(page)) return;
  const TierUse use(page_offload(), page);
  offload::adopt_copy(memory.master, memory.owned);
}

std::string ParameterPages::put_back(const std::vector<size_t>& pages) {
  const at::NoGradGuard no_grad;
  std::string wrong;
  for (PlacedParameter& placed : parameters_) {
    const at::Tensor& tensor = placed.parameter.tensor;
    if (std::find(pages.begin(), pages.end(), placed.page) == pages.end()) continue;
    if (is_in_place(placed)) continue;
    const at::Tensor given = as_given(tensor);
    tensor.unsafeGetTensorImpl()->shallow_copy_from(placed.in_place.getIntrusivePtr());
    if (given.sizes() == placed.in_place.sizes()) {
      placed.in_place.copy_(given);
    } else if (wrong.empty()) {
      wrong = c10::str("parameter \"", placed.parameter.name(), "\": expected values of sizes ",
                       placed.in_place.sizes(), ", got ", given.sizes(),
                       "; it keeps what it had: load a file of this model");
    }
  }
  return wrong;
}

void ParameterPages::note_written(const std::vector<size_t>& pages) {
  for (const PlacedParameter& placed : parameters_) {
    if (std::find(pages.begin(), pages.end(), placed.page) == pages.end()) continue;
    placed.parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
}

bool ParameterPages::is_in_place(const PlacedParameter& placed) const {
  const at::Tensor& tensor = placed.parameter.tensor;
  if (!tensor.is_alias_of(placed.in_place)) return false;
  // Without memory there is no address either.
  if (is_sharded(placed.page) || tensor.numel() == 0 || tensor.is_meta()) return true;
  const auto* whole = static_cast<const char*>(memory_[placed.page].whole.const_data_ptr());
  return tensor.const_data_ptr() ==
         whole + placed.offset * static_cast<int64_t>(tensor.element_size());
}

void ParameterPages::check_stream(const char* who) const {
  ZP_CHECK(
      memory::Stream::current(world_.communicator().device()) == compute_, who,
      ": the current stream of ", world_.communicator().device(),
      " is another than when the module was wrapped, in whose order its memory is reused; make "
      "that one current, or wrap under this one");
}

void ParameterPages::check_in_place(const char* who) const {
  for (const PlacedParameter& placed : parameters_) {
    ZP_CHECK(is_in_place(placed), who, ": parameter \"", placed.parameter.name(),
             "\" no longer lives in its page: torch::load(), ->to() or set_data() replaced its "
             "memory after the module was wrapped; load under zeropage::GatheredParameters(model, "
             "Modified::on_every_rank()), or change the module before wrapping it");
  }
}

void ParameterPages::check_can_update() const {
  check_stream("step()");
  check_in_place("step()");
}

void ParameterPages::begin_training(size_t parameter) {
  const size_t page = parameters_[parameter].page;
  if (layouts_[page].requires_grad) return;
  layouts_[page].requires_grad = true;
  plan_.begin_training(page, layouts_[page]);
  if (is_sharded(page)) pager_->write_back(memory_[page].pager_index);
  make_masters(page);
  if (memory_[page].master.defined()) memory_[page].master.copy_(memory_[page].owned);
}

}  // namespace zeropage
