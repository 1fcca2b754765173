#include "zero/pages/parameter_pages.h"

#include <unordered_map>
#include <utility>

#include "memory/storage.h"
#include "zero/layout/parameter_checks.h"
#include "zeropage/check.h"

namespace zeropage::zero {

// Not a view: zero_grad() detaches p.grad() in place, which autograd refuses for views.
at::Tensor slot_in(const at::Tensor& flat, const PlacedParameter& placed) {
  const at::Tensor& tensor = placed.parameter.tensor;
  return memory::tensor_in(flat.storage(), tensor, placed.offset, flat.scalar_type());
}

bool is_slot(const at::Tensor& tensor, const PlacedParameter& placed) {
  const at::Tensor& parameter = placed.parameter.tensor;
  return tensor.storage_offset() == placed.offset && tensor.sizes() == parameter.sizes() &&
         tensor.strides() == parameter.strides();
}

bool is_slot(const at::Tensor& tensor, const PlacedParameters& parameters, size_t parameter) {
  const c10::TensorImpl& impl = parameters.impl(parameter);
  return tensor.storage_offset() == parameters.offset(parameter) &&
         tensor.sizes() == impl.sizes() && tensor.strides() == impl.strides();
}

bool same_elements(const at::Tensor& left, const at::Tensor& right) {
  if (left.is_same(right)) return true;
  return left.has_storage() && right.has_storage() && left.is_alias_of(right) &&
         left.storage_offset() == right.storage_offset() && left.sizes() == right.sizes() &&
         left.strides() == right.strides();
}

ParameterPages::ParameterPages(PageWorlds worlds, std::vector<NamedParameter> parameters,
                               const PageOptions& options, bool is_deferred)
    : worlds_(std::move(worlds)),
      tensor_world_(options.tensor_world ? options.tensor_world : tensor_world_of(parameters)),
      options_(options),
      of_model_(world().modules() == 0 ? "" : c10::str(" of model ", world().modules() + 1)) {
  std::vector<PlacedParameter> placed;
  for (NamedParameter& named : parameters) {
    check_can_be_placed(named, world().communicator().device(), is_deferred);
    placed.push_back({std::move(named)});
  }
  const std::vector<StorageSpec> storages = group_by_storage(placed);
  lay_out(storages, std::move(placed));
  plan_ = BytePlan(layouts_, options_.sharding, places_of(worlds_));
}

const comm::World* pipeline_world_of(const ParameterPages& pages) {
  const auto& part = pages.part();
  return part && part->ranks.size() > 1 ? &part->ranks : nullptr;
}

void check_agreement(const ParameterPages& pages, const std::string& topic,
                     const std::vector<std::string>& lines) {
  pages.world().check_agreement(topic, lines);
  if (pages.tensor_world() == nullptr) return;
  pages.tensor_world()->check_agreement(topic + ", over the tensor-parallel group", lines);
}

void check_stages_agree(const ParameterPages& pages, const std::string& topic,
                        const std::vector<std::string>& lines) {
  const comm::World* const stages = pipeline_world_of(pages);
  if (stages == nullptr) return;
  stages->check_agreement(topic + ", over the stages of the pipeline", lines);
}

std::vector<StorageSpec> ParameterPages::group_by_storage(
    const std::vector<PlacedParameter>& parameters) {
  std::vector<StorageSpec> storages;
  std::unordered_map<const c10::StorageImpl*, size_t> known;
  for (size_t index = 0; index < parameters.size(); ++index) {
    const NamedParameter& named = parameters[index].parameter;
    const auto [at, is_new] =
        known.try_emplace(named.tensor.storage().unsafeGetStorageImpl(), storages.size());
    if (is_new) {
      storages.push_back({.name = named.name(),
                          .numel = memory::storage_numel(named.tensor),
                          .dtype = named.dtype,
                          .requires_grad = named.tensor.requires_grad(),
                          .unit = named.unit,
                          .alone = named.is_tied,
                          .of_experts = named.is_of_experts()});
      storages_.emplace_back();
    }
    StorageSpec& storage = storages[at->second];
    ZP_CHECK(storage.dtype == named.dtype, "parameters \"", storage.name, "\" and \"", named.name(),
             "\" share memory as ", storage.dtype, " and ", named.dtype,
             "; give them memory of their own");
    storage.requires_grad |= named.tensor.requires_grad();
    storages_[at->second].parameters.push_back(index);
  }
  for (size_t storage = 0; storage < storages.size(); ++storage) {
    std::vector<const NamedParameter*> sharing;
    for (const size_t index : storages_[storage].parameters) {
      sharing.push_back(&parameters[index].parameter);
      storages[storage].parameters.push_back(reach(sharing.back()->tensor));
    }
    check_no_overlap(sharing);
  }
  return storages;
}

void ParameterPages::lay_out(const std::vector<StorageSpec>& storages,
                             std::vector<PlacedParameter> parameters) {
  layouts_ = lay_out_pages(storages, {.world_size = shards().size(),
                                      .page_bytes = options_.page_bytes,
                                      .ranks_of_experts = places_of(worlds_).of_experts.ranks});
  for (size_t page = 0; page < layouts_.size(); ++page) {
    for (const Slot& slot : layouts_[page].slots) {
      PlacedStorage& storage = storages_[slot.storage];
      storage.page = page;
      storage.range = slot.range;
      for (const size_t index : storage.parameters) {
        PlacedParameter& placed = parameters[index];
        const Range range = reach(placed.parameter.tensor);
        placed.page = page;
        placed.range = {slot.range.begin + range.begin, slot.range.begin + range.end};
        placed.offset = slot.range.begin + placed.parameter.tensor.storage_offset();
      }
    }
  }
  parameters_ = PlacedParameters(std::move(parameters), layouts_.size());
}

}  // namespace zeropage::zero
