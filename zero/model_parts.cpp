#include "zero/model_parts.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "zero/gradients/hooks.h"
#include "zeropage/check.h"

namespace zeropage::zero {

ModelParts::ModelParts(ShardedModel sharded, comm::World all_ranks,
                       std::shared_ptr<const torch::nn::Module> module)
    : sharded_(std::move(sharded)), all_ranks_(std::move(all_ranks)), module_(std::move(module)) {}

ModelParts::ModelParts(ShardedModel sharded, const torch::nn::Module& module)
    : sharded_(std::move(sharded)), all_ranks_(world()), module_(std::shared_ptr<void>(), &module) {
  ZP_CHECK(sharded_.reducer->training().adopted_in() == Unfrozen::kInBackward,
           "a plain module with an optimizer that was made of a wrapped model: give the "
           "DistributedDataParallel in place of the module");
  const PlacedParameters& in_pages = sharded_.pages->parameters();
  std::vector<PlacedParameter> named(in_pages.begin(), in_pages.end());
  places_.assign(named.size(), named.size());
  size_t place = 0;
  for (NamedParameter& parameter : parameters_of(module)) {
    const int64_t index = in_pages.index_of(parameter.tensor);
    ZP_CHECK(index >= 0 || !has_accumulate_hooks(parameter.tensor), "parameter \"",
             parameter.name(),
             "\" of the module is stepped by another zeropage::Optimizer than the one that was "
             "given, and a state has one optimizer: make one of all parameters, with a group for "
             "each set of options");
    if (index < 0) continue;
    named[static_cast<size_t>(index)].parameter.names = std::move(parameter.names);
    places_[static_cast<size_t>(index)] = place++;
  }
  for (size_t index = 0; index < places_.size(); ++index) {
    ZP_CHECK(places_[index] < places_.size(), "the optimizer's ", in_pages[index].parameter.name(),
             " is no parameter of the module that was given; give the module whose parameters() "
             "the optimizer was made of");
  }
  named_ = PlacedParameters(std::move(named), sharded_.pages->layouts().size());
}

std::vector<NamedParameter> ModelParts::buffers() const {
  TORCH_INTERNAL_ASSERT(module_ != nullptr, "buffers of a model whose module nobody gave");
  std::vector<NamedParameter> buffers;
  for (NamedParameter& parameter : parameters_of(*module_)) {
    if (parameters().index_of(parameter.tensor) < 0) buffers.push_back(std::move(parameter));
  }
  for (NamedParameter& buffer : buffers_each_once(*module_)) buffers.push_back(std::move(buffer));
  return buffers;
}

std::vector<NamedParameter> buffers_each_once(const torch::nn::Module& module) {
  std::vector<NamedParameter> buffers;
  // Those of one storage are few, and may be the same elements. A tensor without a storage is itself alone.
  std::unordered_map<const void*, std::vector<size_t>> of_storage;
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& tensor = item.value();
    const void* const storage =
        tensor.has_storage() ? static_cast<const void*>(tensor.storage().unsafeGetStorageImpl())
                             : tensor.unsafeGetTensorImpl();
    std::vector<size_t>& beside = of_storage[storage];
    const auto known = std::find_if(beside.begin(), beside.end(), [&](size_t index) {
      return same_elements(buffers[index].tensor, tensor);
    });
    if (known != beside.end()) {
      buffers[*known].names.push_back(item.key());
    } else {
      beside.push_back(buffers.size());
      buffers.push_back({.names = {item.key()}, .tensor = tensor});
    }
  }
  return buffers;
}

}  // namespace zeropage::zero
