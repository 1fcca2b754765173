#include "zero/pages/page_filler.h"

#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include "memory/storage.h"
#include "operators/tensor_mark.h"
#include "optim/split_values.h"
#include "parallel/experts/experts_mark.h"
#include "zero/pages/tier_use.h"

namespace zeropage::zero {
namespace {

// Does what memory::adopt_storage does, and keeps the tensor's mark and its key, which that call would take away.
void adopt_with_mark(const at::Tensor& tensor, const c10::Storage& storage, at::ScalarType dtype) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  auto mark = impl->get_backend_meta_intrusive_ptr();
  memory::adopt_storage(tensor, storage, dtype);
  if (!mark) return;
  operators::add_trap_key(tensor);
  impl->set_backend_meta(std::move(mark));
}

}  // namespace

const at::Tensor& PageFiller::first_in(size_t storage) const {
  return pages_.parameters()[pages_.storages()[storage].parameters.front()].parameter.tensor;
}

void PageFiller::fill(const DeferredValues* deferred) {
  const at::NoGradGuard no_grad;
  std::vector<size_t> without_values;
  for (const PageLayout& layout : pages_.layouts()) {
    for (const Slot& slot : layout.slots) {
      const at::Tensor& first = first_in(slot.storage);
      if (first.device() == pages_.world().communicator().device()) {
        take_over(slot.storage, memory::whole_storage(first));
      } else {
        without_values.push_back(slot.storage);
      }
    }
  }
  if (deferred != nullptr) replay(*deferred, without_values);
}

void PageFiller::replay(const DeferredValues& deferred, const std::vector<size_t>& storages) {
  std::vector<at::Tensor> targets;
  std::unordered_map<const c10::StorageImpl*, size_t> storage_of_target;
  std::unordered_multimap<const c10::StorageImpl*, at::Tensor> buffers;
  std::unordered_map<const c10::StorageImpl*, at::Tensor> wholes;  // of experts that were cut
  for (const size_t storage : storages) {
    auto* const cut = parallel::experts::experts_mark_of(first_in(storage));
    if (cut != nullptr && cut->is_without_values()) {
      const at::Tensor whole = cut->take_whole_without_values();
      storage_of_target.emplace(whole.storage().unsafeGetStorageImpl(), storage);
      wholes.emplace(whole.storage().unsafeGetStorageImpl(), whole);
      targets.push_back(whole);
      continue;
    }
    storage_of_target.emplace(first_in(storage).storage().unsafeGetStorageImpl(), storage);
    for (const size_t index : pages_.storages()[storage].parameters) {
      targets.push_back(pages_.parameters()[index].parameter.tensor);
    }
  }
  for (const at::Tensor& buffer : deferred.buffers) {
    if (!buffer.is_meta()) continue;
    targets.push_back(buffer);
    buffers.emplace(buffer.storage().unsafeGetStorageImpl(), buffer);
  }
  deferred.tape.replay(targets, [&](const c10::StorageImpl& storage, const at::Tensor& values) {
    const auto known = storage_of_target.find(&storage);
    if (known != storage_of_target.end()) {
      const auto whole = wholes.find(&storage);
      take_over(known->second,
                whole == wholes.end() ? values : own_experts(known->second, whole->second, values));
      return;
    }
    const auto [first, last] = buffers.equal_range(&storage);
    for (auto buffer = first; buffer != last; ++buffer) {
      memory::adopt_storage(buffer->second, values.storage(), values.scalar_type());
    }
  });
}

// values: [numel of all experts], which become those of rank 0 along "expert". Returns this rank's.
at::Tensor PageFiller::own_experts(size_t storage, const at::Tensor& whole,
                                   const at::Tensor& values) const {
  const NamedParameter& named =
      pages_.parameters()[pages_.storages()[storage].parameters.front()].parameter;
  const ParameterSlice& slice = *named.slice;
  const std::string what = "parameter \"" + named.name() + "\"";
  slice.ranks.communicator().broadcast(values, /*root=*/0, what).wait();
  return slice.cut.take(values.view(whole.sizes()), slice.ranks.rank()).view(-1);
}

// values: [numel of the storage]; become rank 0's, and are let go.
void PageFiller::take_over(size_t storage, const at::Tensor& values) {
  const PlacedStorage& placed = pages_.storages()[storage];
  if (!memory_.has(placed.page)) {
    masters_.make(placed.page);
    memory_.make(placed.page);
  }
  if (values.numel() > 0) {
    const NamedParameter& first = pages_.parameters()[placed.parameters.front()].parameter;
    const std::string what = "parameter \"" + first.name() + "\"";
    pages_.world(placed.page).communicator().broadcast(values, /*root=*/0, what).wait();
    // What no rank of a tensor-parallel group has a slice of, all have alike.
    const comm::World* const slices = pages_.tensor_world();
    if (slices != nullptr && !first.slice) {
      slices->communicator().broadcast(values, /*root=*/0, what).wait();
    }
  }
  keep_part(storage, values);
  live_in_page(storage);
}

// Copies what this rank has of the page, and its master weights.
void PageFiller::keep_part(size_t storage, const at::Tensor& values) {
  const PlacedStorage& placed = pages_.storages()[storage];
  const TierUse use(pages_.page_offload(), placed.page);
  // The part of `from` that a buffer keeps which begins at an element of the page.
  const auto copy_into = [&](const at::Tensor& kept, int64_t begin, const at::Tensor& from) {
    const Range range = intersection(placed.range, {begin, begin + kept.numel()});
    if (range.empty()) return;
    kept.narrow(0, range.begin - begin, range.numel())
        .copy_(from.narrow(0, range.begin - placed.range.begin, range.numel()));
  };
  const int64_t own = pages_.owned(placed.page).begin;
  const at::Tensor& whole = memory_.whole(placed.page);
  const auto fill_parameters = [&](const at::Tensor& from) {
    const bool is_whole = whole.defined();
    copy_into(is_whole ? whole : memory_.owned(placed.page), is_whole ? 0 : own, from);
  };
  const at::Tensor& remainders = masters_.remainders(placed.page);
  if (remainders.defined()) {
    const optim::SplitValues split = optim::split_values(values);
    fill_parameters(split.high);
    copy_into(remainders, own, split.low);
  } else {
    fill_parameters(values);
  }
  const at::Tensor& copy = masters_.copy(placed.page);
  if (copy.defined()) copy_into(copy, own, values);
}

// Gives the storage its place in a whole page, or no memory for the time being. A deferred one, of
// the meta device, and one of another dtype are replaced by one of the page's.
void PageFiller::live_in_page(size_t storage) {
  const PlacedStorage& placed = pages_.storages()[storage];
  const at::Tensor& whole = memory_.whole(placed.page);
  const at::Tensor& first = first_in(storage);
  const c10::ScalarType dtype = pages_.layouts()[placed.page].dtype;
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  const c10::Device device = pages_.world().communicator().device();
  if (first.device() != device || first.scalar_type() != dtype) {
    const c10::Storage there =
        whole.defined()
            ? memory::storage_within(whole, placed.range.begin, placed.range.numel())
            : memory::storage_without_memory(placed.range.numel() * element_bytes, device);
    for (const size_t index : placed.parameters) {
      adopt_with_mark(pages_.parameters()[index].parameter.tensor, there, dtype);
    }
  } else if (whole.defined()) {
    memory::move_storage_into(first, whole, placed.range.begin);
  } else {
    memory::drop_memory(*first.storage().unsafeGetStorageImpl());
  }
}

}  // namespace zeropage::zero
