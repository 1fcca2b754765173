#include "zero/pages/module_placement.h"

#include <utility>

#include <ATen/core/grad_mode.h>

#include "memory/storage.h"
#include "parallel/slice_mark.h"
#include "zero/parameter_scan.h"
#include "zeropage/check.h"

namespace zeropage::zero {
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

ModulePlacement::ModulePlacement(std::shared_ptr<const ParameterPages> pages,
                                 std::shared_ptr<const PageMemory> memory)
    : pages_(std::move(pages)), memory_(std::move(memory)) {
  for (const PlacedParameter& placed : pages_->parameters()) {
    const at::Tensor& tensor = placed.parameter.tensor;
    in_place_.push_back(tensor.detach());
    places_.push_back({.storage = tensor.storage().unsafeGetStorageImpl()});
  }
  note_moved();
}

void ModulePlacement::note_moved() {
  for (size_t index = 0; index < places_.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    const at::Tensor& tensor = in_place_[index];
    // Without memory there is no address either.
    if (pages_->is_sharded(placed.page) || tensor.numel() == 0 || tensor.is_meta()) continue;
    places_[index].first = static_cast<const char*>(memory_->whole(placed.page).const_data_ptr()) +
                           placed.offset * static_cast<int64_t>(tensor.element_size());
  }
}

bool ModulePlacement::has(size_t parameter) const {
  const c10::TensorImpl& impl = pages_->parameters().impl(parameter);
  const Place& place = places_[parameter];
  if (impl.unsafe_storage().unsafeGetStorageImpl() != place.storage) return false;
  return place.first == nullptr || impl.data() == place.first;
}

void ModulePlacement::check(const char* who) const {
  memory_->check_not_parked(who);
  const size_t elsewhere = first_in_parallel(in_place_.size(), [this](size_t index) {
    const auto& parameters = pages_->parameters();
    look_ahead(index, places_.size(), [&](size_t other) { return &parameters.impl(other); });
    look_ahead(index, places_.size(), [&](size_t other) { return places_[other].storage; });
    return !has(index);
  });
  if (elsewhere != in_place_.size()) throw_elsewhere(elsewhere, who);
}

void ModulePlacement::throw_elsewhere(size_t parameter, const char* who) const {
  ZP_THROW(who, ": parameter \"", pages_->parameters()[parameter].parameter.name(),
           "\" no longer lives in its page: torch::load(), ->to() or set_data() replaced its "
           "memory after the module was wrapped; load under zeropage::GatheredParameters(model, "
           "Modified::on_every_rank()), or change the module before wrapping it. Where nothing "
           "wraps it, the optimizer is the model");
}

std::string ModulePlacement::put_back(const std::vector<size_t>& pages) const {
  const at::NoGradGuard no_grad;
  const parallel::SlicesAsTheyAre scope;
  std::string wrong;
  for (const size_t page : pages) {
    for (const size_t index : pages_->parameters().of_page(page)) {
      if (!has(index)) put_back(index, wrong);
    }
  }
  return wrong;
}

void ModulePlacement::put_back(size_t parameter, std::string& wrong) const {
  const NamedParameter& named = pages_->parameters()[parameter].parameter;
  const at::Tensor& in_place = in_place_[parameter];
  const at::Tensor given = as_given(named.tensor);
  named.tensor.unsafeGetTensorImpl()->shallow_copy_from(in_place.getIntrusivePtr());
  if (given.sizes() == in_place.sizes()) {
    in_place.copy_(given);
  } else if (wrong.empty()) {
    wrong =
        c10::str("parameter \"", named.name(), "\": expected values of sizes ", in_place.sizes(),
                 ", got ", given.sizes(), "; it keeps what it had: load a file of this model");
  }
}

}  // namespace zeropage::zero
