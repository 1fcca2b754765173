#include "zero/pages/parameter_pages.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <torch/csrc/autograd/variable.h>

#include "memory/bytes.h"
#include "memory/check.h"
#include "memory/ledger.h"
#include "memory/storage.h"
#include "offload/split_values.h"
#include "operators/tensor_mark.h"
#include "paging/trap.h"
#include "zero/layout/parameter_checks.h"
#include "zero/pages/tier_use.h"

namespace zeropage {
namespace {

// As memory::adopt_storage, which would take a mark and its key away.
void adopt_with_mark(const at::Tensor& tensor, const c10::Storage& storage, at::ScalarType dtype) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  auto mark = impl->get_backend_meta_intrusive_ptr();
  memory::adopt_storage(tensor, storage, dtype);
  if (!mark) return;
  memory::add_trap_key(tensor);
  impl->set_backend_meta(std::move(mark));
}

}  // namespace

// Not a view: zero_grad() detaches p.grad() in place, which autograd refuses for views.
at::Tensor slot_in(const at::Tensor& flat, const PlacedParameter& placed) {
  const at::Tensor& tensor = placed.parameter.tensor;
  return memory::tensor_in(flat.storage(), tensor, placed.offset, flat.scalar_type());
}

bool same_elements(const at::Tensor& left, const at::Tensor& right) {
  if (left.is_same(right)) return true;
  return left.has_storage() && right.has_storage() && left.is_alias_of(right) &&
         left.storage_offset() == right.storage_offset() && left.sizes() == right.sizes() &&
         left.strides() == right.strides();
}

ParameterPages::ParameterPages(comm::World world, std::vector<NamedParameter> parameters,
                               const PageOptions& options, const DeferredValues* deferred,
                               const CheckLayouts& check)
    : world_(std::move(world)),
      options_(options),
      compute_(memory::Stream::current(world_.communicator().device())) {
  TORCH_INTERNAL_ASSERT(
      options_.ownership == Ownership::kShard || options_.shard_from_bytes == PageOptions::kNever,
      "a rank that updates whole pages holds them");
  for (NamedParameter& named : parameters) {
    check_can_be_placed(named, world_.communicator().device(), deferred != nullptr);
    parameters_.push_back({std::move(named)});
  }
  lay_out(group_by_storage());
  check_before_moving();
  if (options_.page_offload) options_.page_offload->choose(layouts_);
  if (check) check(layouts_);
  make_what_leaves();
  fill(deferred);
  for (size_t page = 0; page < layouts_.size(); ++page) {
    if (is_copied_elsewhere(page)) written_.add(page, memory_[page].owned);
  }
  if (options_.shard_from_bytes != PageOptions::kNever) hand_to_pager();
  for (PlacedParameter& placed : parameters_) placed.in_place = placed.parameter.tensor.detach();
}

void ParameterPages::hand_to_pager() {
  memory::check_dispatcher();
  auto source =
      std::make_unique<ShardSource>(world_, "page", /*hint=*/"", memory::Kind::kParameter);
  source_ = source.get();
  pager_ = memory::Pager::make(std::move(source), options_.paging);
  for (size_t page = 0; page < layouts_.size(); ++page) {
    if (shards(page)) hand_to_pager(page);
  }
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
                          .dtype = named.dtype,
                          .requires_grad = named.tensor.requires_grad(),
                          .unit = named.unit});
      storages_.emplace_back();
    }
    StorageSpec& storage = storages[at->second];
    ZP_CHECK(storage.dtype == named.dtype, "parameters \"", storage.name, "\" and \"", named.name(),
             "\" share memory as ", storage.dtype, " and ", named.dtype,
             "; give them memory of their own");
    storage.requires_grad |= named.tensor.requires_grad();
    storages_[at->second].parameters.push_back(index);
  }
  for (const PlacedStorage& storage : storages_) {
    std::vector<const NamedParameter*> sharing;
    for (const size_t index : storage.parameters) sharing.push_back(&parameters_[index].parameter);
    check_no_overlap(sharing);
  }
  return storages;
}

void ParameterPages::lay_out(const std::vector<StorageSpec>& storages) {
  layouts_ =
      lay_out_pages(storages, {.world_size = world_.size(), .page_bytes = options_.page_bytes});
  memory_.resize(layouts_.size());
  for (size_t page = 0; page < layouts_.size(); ++page) {
    for (const Slot& slot : layouts_[page].slots) {
      PlacedStorage& storage = storages_[slot.storage];
      storage.page = page;
      storage.range = slot.range;
      for (const size_t index : storage.parameters) {
        PlacedParameter& placed = parameters_[index];
        const Range range = reach(placed.parameter.tensor);
        placed.page = page;
        placed.range = {slot.range.begin + range.begin, slot.range.begin + range.end};
        placed.offset = slot.range.begin + placed.parameter.tensor.storage_offset();
      }
    }
  }
}

bool ParameterPages::shards(size_t page) const {
  return whole_bytes(page) >= options_.shard_from_bytes;
}

// Refuses before anything is moved.
void ParameterPages::check_before_moving() const {
  for (size_t page = 0; page < layouts_.size(); ++page) {
    if (shards(page)) check_fits_budget(page);
    for (const Slot& slot : layouts_[page].slots) {
      const auto& sharing = storages_[slot.storage].parameters;
      const NamedParameter& first = parameters_[sharing.front()].parameter;
      const bool is_cast = first.dtype != first.tensor.scalar_type();
      if (!shards(page) && !is_cast) continue;
      size_t holders = sharing.size();
      for (const size_t index : sharing) {
        // A parameter that was made as a view keeps what it is a view of.
        if (parameters_[index].parameter.tensor.is_view()) ++holders;
      }
      // A deferred module's storages are on its tape too.
      ZP_CHECK(first.tensor.is_meta() || first.tensor.storage().use_count() <= holders,
               "parameter \"", first.name(),
               "\": something else holds its memory, such as a view of it or a graph that used it, "
               "and would not notice when the parameter is ",
               is_cast ? "cast to options.compute_dtype" : "sharded",
               "; let that go before wrapping");
      ZP_CHECK(!is_cast || !torch::autograd::impl::try_get_grad_accumulator(first.tensor),
               "parameter \"", first.name(), "\": a graph that used it in ",
               first.tensor.scalar_type(), " is alive, and options.compute_dtype is to make it ",
               first.dtype, "; let the loss and its outputs go before wrapping");
    }
  }
}

void ParameterPages::check_fits_budget(size_t page) const {
  const int64_t bytes = whole_bytes(page);
  const int64_t budget = options_.paging.budget_bytes;
  ZP_CHECK(budget == 0 || bytes <= budget || world_.size() == 1, describe(page), " has ",
           memory::format_bytes(bytes), ", but ", options_.paging.budget_option, " is ",
           memory::format_bytes(budget), ": no operator could use it; raise it to at least ", bytes,
           " bytes, or use smaller pages if the page has several parameters");
}

int64_t ParameterPages::whole_bytes(size_t page) const {
  const PageLayout& layout = layouts_[page];
  return layout.padded_numel(world_.size()) * static_cast<int64_t>(c10::elementSize(layout.dtype));
}

// Brings the values of all storages into the pages' memory, one storage after the other.
void ParameterPages::fill(const DeferredValues* deferred) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> targets;  // without values yet
  std::unordered_map<const c10::StorageImpl*, size_t> storage_of_target;
  for (const PageLayout& layout : layouts_) {
    for (const Slot& slot : layout.slots) {
      const auto& sharing = storages_[slot.storage].parameters;
      const at::Tensor& first = parameters_[sharing.front()].parameter.tensor;
      if (first.device() == world_.communicator().device()) {
        take_over(slot.storage, memory::whole_storage(first));
        continue;
      }
      storage_of_target.emplace(first.storage().unsafeGetStorageImpl(), slot.storage);
      for (const size_t index : sharing) targets.push_back(parameters_[index].parameter.tensor);
    }
  }
  if (deferred == nullptr) return;
  for (const at::Tensor& buffer : deferred->buffers) {
    if (buffer.is_meta()) targets.push_back(buffer);
  }
  deferred->tape.replay(targets, [&](const c10::StorageImpl& storage, const at::Tensor& values) {
    const auto known = storage_of_target.find(&storage);
    if (known != storage_of_target.end()) {
      take_over(known->second, values);
      return;
    }
    for (const at::Tensor& buffer : deferred->buffers) {
      if (buffer.storage().unsafeGetStorageImpl() == &storage) {
        memory::adopt_storage(buffer, values.storage(), values.scalar_type());
      }
    }
  });
}

bool ParameterPages::has_master(size_t page) const {
  const PageLayout& layout = layouts_[page];
  if (!layout.requires_grad) return false;
  if (is_low_precision(layout.dtype)) return options_.master_weights == MasterWeights::kFp32;
  // Offloaded fp32 shards are themselves what the optimizer updates.
  return offloads_optimizer(page) && !offloads_parameters(page);
}

at::Tensor ParameterPages::make_master(size_t page) {
  const int64_t numel = owned(page).numel();
  if (offloads_optimizer(page)) {
    return options_.page_offload->values().add(page, numel, at::kFloat, 0,
                                               memory::Kind::kMasterWeights);
  }
  const memory::KindScope kind(memory::Kind::kMasterWeights);
  return world_.communicator().buffer(numel, at::kFloat).zero_();
}

at::Tensor ParameterPages::make_shard(size_t page) {
  const PageLayout& layout = layouts_[page];
  if (offloads_parameters(page)) {
    return options_.page_offload->parameters().add(page, layout.shard_numel, layout.dtype, 0,
                                                   memory::Kind::kParameter);
  }
  const memory::KindScope kind(memory::Kind::kParameter);
  return world_.communicator().buffer(layout.shard_numel, layout.dtype).zero_();
}

// A file has its size before the first use of what is in it.
void ParameterPages::make_what_leaves() {
  for (size_t page = 0; page < layouts_.size(); ++page) {
    if (offloads_optimizer(page) && has_master(page)) memory_[page].master = make_master(page);
    if (offloads_parameters(page)) memory_[page].owned = make_shard(page);
  }
}

void ParameterPages::make_masters(size_t page) {
  PageMemory& memory = memory_[page];
  const PageLayout& layout = layouts_[page];
  if (has_master(page) && !memory.master.defined()) memory.master = make_master(page);
  if (layout.requires_grad && is_low_precision(layout.dtype) &&
      options_.master_weights == MasterWeights::kRemainders) {
    const memory::KindScope kind(memory::Kind::kMasterWeights);
    memory.remainders = world_.communicator().buffer(owned(page).numel(), at::kShort).zero_();
  }
}

void ParameterPages::make_memory(size_t page) {
  PageMemory& memory = memory_[page];
  if (memory.owned.defined()) return;
  const PageLayout& layout = layouts_[page];
  make_masters(page);
  if (shards(page)) {
    memory.owned = make_shard(page);
    return;
  }
  const memory::KindScope kind(memory::Kind::kParameter);
  const Range own = owned(page);
  memory.whole =
      world_.communicator().buffer(layout.padded_numel(world_.size()), layout.dtype).zero_();
  memory.owned = memory.whole.narrow(0, own.begin, own.numel());
}

// values: [numel of the storage]; become rank 0's, and are let go.
void ParameterPages::take_over(size_t storage, const at::Tensor& values) {
  const PlacedStorage& placed = storages_[storage];
  make_memory(placed.page);
  if (values.numel() > 0) {
    world_.communicator()
        .broadcast(values, /*root=*/0,
                   "parameter \"" + parameters_[placed.parameters.front()].parameter.name() + "\"")
        .wait();
  }
  const PageMemory& memory = memory_[placed.page];
  const TierUse use(page_offload(), placed.page);
  // The part of `from` that a buffer keeps which begins at an element of the page.
  const auto copy_into = [&](const at::Tensor& kept, int64_t begin, const at::Tensor& from) {
    const Range range = intersection(placed.range, {begin, begin + kept.numel()});
    if (range.empty()) return;
    kept.narrow(0, range.begin - begin, range.numel())
        .copy_(from.narrow(0, range.begin - placed.range.begin, range.numel()));
  };
  const int64_t own = owned(placed.page).begin;
  const auto fill_parameters = [&](const at::Tensor& from) {
    const bool is_whole = memory.whole.defined();
    copy_into(is_whole ? memory.whole : memory.owned, is_whole ? 0 : own, from);
  };
  if (memory.remainders.defined()) {
    const offload::SplitValues split = offload::split_values(values);
    fill_parameters(split.high);
    copy_into(memory.remainders, own, split.low);
  } else {
    fill_parameters(values);
  }
  if (memory.master.defined()) copy_into(memory.master, own, values);
  live_in_page(storage);
}

// Gives the storage its place in a whole page, or no memory for the time being. A deferred one, of
// the meta device, and one of another dtype are replaced by one of the page's.
void ParameterPages::live_in_page(size_t storage) {
  const PlacedStorage& placed = storages_[storage];
  const at::Tensor& whole = memory_[placed.page].whole;
  const at::Tensor& first = parameters_[placed.parameters.front()].parameter.tensor;
  const c10::ScalarType dtype = layouts_[placed.page].dtype;
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const c10::Device device = world_.communicator().device();
  if (first.device() != device || first.scalar_type() != dtype) {
    const c10::Storage there =
        whole.defined()
            ? memory::storage_within(whole, placed.range.begin, placed.range.numel())
            : memory::storage_without_memory(placed.range.numel() * element_bytes, device);
    for (const size_t index : placed.parameters) {
      adopt_with_mark(parameters_[index].parameter.tensor, there, dtype);
    }
  } else if (whole.defined()) {
    memory::move_storage_into(first, whole, placed.range.begin);
  } else {
    memory::drop_memory(*first.storage().unsafeGetStorageImpl());
  }
}

void ParameterPages::hand_to_pager(size_t page) {
  const PageLayout& layout = layouts_[page];
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(layout.dtype));
  std::vector<memory::Page::Tenant> tenants;
  for (const Slot& slot : layout.slots) {
    const auto& sharing = storages_[slot.storage].parameters;
    for (const size_t index : sharing) memory::set_trap(parameters_[index].parameter.tensor);
    tenants.push_back({parameters_[sharing.front()].parameter.tensor.storage(),
                       slot.range.begin * element_bytes});
  }
  ShardSource::Away away;
  if (offloads_parameters(page)) {
    away = {&options_.page_offload->parameters(), page, options_.page_offload};
  }
  const int64_t bytes = source_->add_shard(layout, memory_[page].owned, away);
  memory_[page].pager_index = pager_->add_page(layout.name, bytes, std::move(tenants));
}

std::string ParameterPages::describe(size_t page) const {
  return "page \"" + layouts_[page].name + "\"";
}

int64_t ParameterPages::index_of(const at::Tensor& tensor) const {
  const auto at = std::find_if(parameters_.begin(), parameters_.end(), [&](const auto& placed) {
    return placed.parameter.tensor.is_same(tensor);
  });
  return at == parameters_.end() ? -1 : at - parameters_.begin();
}

Range ParameterPages::owned(size_t page) const {
  const PageLayout& layout = layouts_[page];
  return options_.ownership == Ownership::kShard ? layout.shard(world_.rank())
                                                 : Range{0, layout.padded_numel(world_.size())};
}

void ParameterPages::end_backward() {
  if (pager_ && options_.reshard == Reshard::kAfterBackward) pager_->release_unpinned();
}

void ParameterPages::visit_owned(size_t page, TierStorage::Use use,
                                 const std::function<void(const Owned&)>& visit) const {
  const TierUse in_use(page_offload(), page, use);
  visit({memory_[page].owned, memory_[page].master, memory_[page].remainders});
}

comm::Pending ParameterPages::start_gather_shards(size_t page) const {
  if (world_.size() == 1 || is_sharded(page)) return {};
  return world_.communicator().all_gather(memory_[page].whole, describe(page));
}

void ParameterPages::end_load() {
  for (PlacedParameter& placed : parameters_) {
    placed.parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
  written_.note();
}

// The update went through the pages, behind autograd's back.
void ParameterPages::end_update(const std::vector<bool>& updated) {
  if (pager_) pager_->end_pass(memory::Pass::kTraining);
  for (size_t index = 0; index < parameters_.size(); ++index) {
    PlacedParameter& placed = parameters_[index];
    if (updated[index]) placed.parameter.tensor.unsafeGetTensorImpl()->bump_version();
    placed.version = 0;
  }
  written_.note();
  was_updated_ = true;
}

void ParameterPages::skip_update() {
  if (!pager_) return;
  pager_->release_all("step()");
  pager_->end_pass(memory::Pass::kTraining);
}

void ParameterPages::add_to(memory::Pins& pins, size_t parameter, bool writes) const {
  const size_t page = parameters_[parameter].page;
  if (is_sharded(page)) pins.add({pager_, memory_[page].pager_index}, writes);
}

comm::Pending ParameterPages::start_broadcast(size_t page, int root) const {
  const at::Tensor whole =
      is_sharded(page) ? pager_->buffer(memory_[page].pager_index) : memory_[page].whole;
  return world_.communicator().broadcast(whole, root, describe(page));
}

comm::Pending ParameterPages::start_gather(size_t page) const {
  if (options_.ownership == Ownership::kWholePage || is_sharded(page)) return {};
  return world_.communicator().all_gather(memory_[page].whole, describe(page));
}

}  // namespace zeropage
