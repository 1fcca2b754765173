#include "zero/parameter_pages.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "memory/check.h"
#include "memory/ledger.h"
#include "memory/storage.h"

namespace zeropage {
namespace {

// The elements of its storage that a tensor reaches: [first, last + 1). Empty tensors reach none.
Range reach(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {tensor.storage_offset(), tensor.storage_offset()};
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {tensor.storage_offset(), last + 1};
}

}  // namespace

ParameterPages::ParameterPages(comm::World world, std::vector<NamedParameter> parameters,
                               const PageOptions& options)
    : world_(std::move(world)), ownership_(options.ownership) {
  for (NamedParameter& named : parameters) {
    check(named);
    parameters_.push_back({std::move(named)});
  }
  place(group_by_storage(), options);
}

void ParameterPages::check(const NamedParameter& named) const {
  const at::Tensor& tensor = named.tensor;
  ZP_CHECK(tensor.device().is_cpu(), "parameter \"", named.name(), "\": expected it on cpu, got ",
           tensor.device(),
           "; this version trains on the host: move the module with ->to(torch::kCPU)");
  ZP_CHECK(tensor.layout() == at::kStrided && tensor.has_storage(), "parameter \"", named.name(),
           "\": expected a dense tensor, got layout ", tensor.layout(), "; densify it first");
  ZP_CHECK(tensor.is_leaf(), "parameter \"", named.name(),
           "\": expected a leaf tensor, got the result of ", tensor.grad_fn()->name(),
           "; register the leaf itself");
  ZP_CHECK(tensor.is_non_overlapping_and_dense(), "parameter \"", named.name(), "\": sizes ",
           tensor.sizes(), " with strides ", tensor.strides(),
           " leave gaps or repeat elements; make it .contiguous() before registering it");
  const auto dtype = tensor.scalar_type();
  ZP_CHECK(!tensor.requires_grad() || dtype == at::kFloat || dtype == at::kDouble ||
               dtype == at::kBFloat16 || dtype == at::kHalf,
           "parameter \"", named.name(), "\" trains in ", dtype,
           ", whose gradients are not reduced over ranks; use float, double, bfloat16 or half");
}

std::vector<StorageSpec> ParameterPages::group_by_storage() {
  std::vector<StorageSpec> storages;
  std::unordered_map<const c10::StorageImpl*, size_t> known;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    const NamedParameter& named = parameters_[index].parameter;
    const auto [at, is_new] =
        known.try_emplace(named.tensor.storage().unsafeGetStorageImpl(), storages.size());
    if (is_new) {
      storages.push_back({.name = named.name(),
                          .numel = memory::storage_numel(named.tensor),
                          .dtype = named.tensor.scalar_type(),
                          .requires_grad = named.tensor.requires_grad(),
                          .unit = named.unit});
      parameters_of_storage_.emplace_back();
    }
    StorageSpec& storage = storages[at->second];
    ZP_CHECK(storage.dtype == named.tensor.scalar_type(), "parameters \"", storage.name,
             "\" and \"", named.name(), "\" share memory as ", storage.dtype, " and ",
             named.tensor.scalar_type(), "; give them memory of their own");
    storage.requires_grad |= named.tensor.requires_grad();
    parameters_of_storage_[at->second].push_back(index);
  }
  for (const auto& sharing : parameters_of_storage_) check_no_overlap(sharing);
  return storages;
}

void ParameterPages::check_no_overlap(const std::vector<size_t>& sharing) const {
  std::vector<std::pair<Range, size_t>> reaches;
  for (const size_t index : sharing) {
    reaches.emplace_back(reach(parameters_[index].parameter.tensor), index);
  }
  std::sort(reaches.begin(), reaches.end(), [](const auto& left, const auto& right) {
    return left.first.begin < right.first.begin;
  });
  for (size_t i = 1; i < reaches.size(); ++i) {
    ZP_CHECK(
        reaches[i - 1].first.end <= reaches[i].first.begin, "parameters \"",
        parameters_[reaches[i - 1].second].parameter.name(), "\" and \"",
        parameters_[reaches[i].second].parameter.name(),
        "\" are different tensors over the same memory, so each would be updated by the other's "
        "gradient; to tie them, register one and the same tensor under both names");
  }
}

void ParameterPages::place(const std::vector<StorageSpec>& storages, const PageOptions& options) {
  layouts_ =
      lay_out_pages(storages, {.world_size = world_.size(), .page_bytes = options.page_bytes});
  for (size_t page = 0; page < layouts_.size(); ++page) {
    const PageLayout& layout = layouts_[page];
    {
      memory::KindScope kind(memory::Kind::kParameter);
      flats_.push_back(at::zeros({layout.padded_numel(world_.size())}, layout.dtype));
    }
    for (const Slot& slot : layout.slots) {
      const auto& sharing = parameters_of_storage_[slot.storage];
      const at::Tensor& first = parameters_[sharing.front()].parameter.tensor;
      memory::move_storage_into(first, flats_.back(), slot.range.begin);
      for (const size_t index : sharing) {
        PlacedParameter& placed = parameters_[index];
        const Range range = reach(placed.parameter.tensor);
        placed.page = page;
        placed.range = {slot.range.begin + range.begin, slot.range.begin + range.end};
        placed.offset = slot.range.begin + placed.parameter.tensor.storage_offset();
      }
    }
  }
}

int64_t ParameterPages::index_of(const at::Tensor& tensor) const {
  const auto at = std::find_if(parameters_.begin(), parameters_.end(), [&](const auto& placed) {
    return placed.parameter.tensor.is_same(tensor);
  });
  return at == parameters_.end() ? -1 : at - parameters_.begin();
}

Range ParameterPages::owned(size_t page) const {
  const PageLayout& layout = layouts_[page];
  return ownership_ == Ownership::kShard ? layout.shard(world_.rank())
                                         : Range{0, layout.padded_numel(world_.size())};
}

void ParameterPages::broadcast_from_rank_zero() {
  std::vector<comm::Pending> in_flight;
  for (size_t page = 0; page < layouts_.size(); ++page) {
    in_flight.push_back(world_.communicator().broadcast(flats_[page], /*root=*/0,
                                                        "page \"" + layouts_[page].name + "\""));
  }
  for (const comm::Pending& pending : in_flight) pending.wait();
}

comm::Pending ParameterPages::start_gather(size_t page) const {
  if (ownership_ == Ownership::kWholePage) return {};
  return world_.communicator().all_gather(flats_[page], "page \"" + layouts_[page].name + "\"");
}

void ParameterPages::check_parameters_are_in_place() const {
  for (const PlacedParameter& placed : parameters_) {
    const at::Tensor& tensor = placed.parameter.tensor;
    const auto* expected = static_cast<const char*>(flats_[placed.page].const_data_ptr()) +
                           placed.offset * static_cast<int64_t>(tensor.element_size());
    ZP_CHECK(
        tensor.numel() == 0 || tensor.const_data_ptr() == expected, "parameter \"",
        placed.parameter.name(),
        "\" no longer lives in its page: set_data() or ->to() replaced its memory after it was "
        "wrapped; change the module first, then wrap it");
    const bool trains = tensor.requires_grad();
    ZP_CHECK(
        !trains || layouts_[placed.page].requires_grad, "parameter \"", placed.parameter.name(),
        "\" was frozen when it was wrapped and requires grad now; unfreeze it first, then wrap");
  }
}

}  // namespace zeropage
