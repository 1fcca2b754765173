#include "zero/pages/parameters_in_place.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "memory/check.h"
#include "memory/storage.h"

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

ParametersInPlace::ParametersInPlace(std::shared_ptr<const ParameterPages> pages,
                                     std::shared_ptr<const PageMemory> memory)
    : pages_(std::move(pages)), memory_(std::move(memory)) {
  for (const PlacedParameter& placed : pages_->parameters()) {
    in_place_.push_back(placed.parameter.tensor.detach());
  }
}

bool ParametersInPlace::has(size_t parameter) const {
  const PlacedParameter& placed = pages_->parameters()[parameter];
  const at::Tensor& tensor = placed.parameter.tensor;
  if (!tensor.is_alias_of(in_place_[parameter])) return false;
  // Without memory there is no address either.
  if (pages_->is_sharded(placed.page) || tensor.numel() == 0 || tensor.is_meta()) return true;
  const auto* whole = static_cast<const char*>(memory_->whole(placed.page).const_data_ptr());
  return tensor.const_data_ptr() ==
         whole + placed.offset * static_cast<int64_t>(tensor.element_size());
}

void ParametersInPlace::check(const char* who) const {
  for (size_t index = 0; index < in_place_.size(); ++index) {
    ZP_CHECK(has(index), who, ": parameter \"", pages_->parameters()[index].parameter.name(),
             "\" no longer lives in its page: torch::load(), ->to() or set_data() replaced its "
             "memory after the module was wrapped; load under zeropage::GatheredParameters(model, "
             "Modified::on_every_rank()), or change the module before wrapping it");
  }
}

std::string ParametersInPlace::put_back(const std::vector<size_t>& pages) const {
  const at::NoGradGuard no_grad;
  std::string wrong;
  for (size_t index = 0; index < in_place_.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    const at::Tensor& tensor = placed.parameter.tensor;
    if (std::find(pages.begin(), pages.end(), placed.page) == pages.end()) continue;
    if (has(index)) continue;
    const at::Tensor& in_place = in_place_[index];
    const at::Tensor given = as_given(tensor);
    tensor.unsafeGetTensorImpl()->shallow_copy_from(in_place.getIntrusivePtr());
    if (given.sizes() == in_place.sizes()) {
      in_place.copy_(given);
    } else if (wrong.empty()) {
      wrong = c10::str("parameter \"", placed.parameter.name(), "\": expected values of sizes ",
                       in_place.sizes(), ", got ", given.sizes(),
                       "; it keeps what it had: load a file of this model");
    }
  }
  return wrong;
}

}  // namespace zeropage
