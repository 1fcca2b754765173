#include "zero/pages/page_filler.h"

#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "memory/storage.h"
#include "operators/tensor_mark.h"
#include "optim/split_values.h"
#include "parallel/experts/experts_mark.h"
#include "zero/pages/first_values.h"
#include "zero/pages/replayed_values.h"
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
      if (deferred != nullptr && first.is_meta()) {
        without_values.push_back(slot.storage);
        continue;
      }
      const at::Tensor values = memory::whole_storage(first);
      if (first.is_meta() && parallel::experts::experts_mark_of(first) != nullptr) {
        // In a simulated world: what expert_parallel() sends of weights that have values when it cuts them.
        const int64_t whole = first.numel() * pages_.worlds().experts->size();
        bring_whole_experts(slot.storage, at::empty({whole}, first.options()));
      }
      bring_first_values(pages_, slot.storage, values);
      move_in(slot.storage, values);
    }
  }
  if (deferred == nullptr) return;
  if (!pages_.world().communicator().device().is_meta()) {
    replay(*deferred, without_values);
    return;
  }
  // In a simulated world nothing is computed, and nothing sent as where hashes agree.
  for (const size_t storage : without_values) {
    move_in(storage, memory::whole_storage(first_in(storage)));
  }
}

std::vector<PageFiller::OnTape> PageFiller::find_on_tape(
    const std::vector<size_t>& storages) const {
  std::vector<OnTape> on_tape;
  for (const size_t storage : storages) {
    const at::Tensor& first = first_in(storage);
    OnTape of{.storage = storage, .values = {}, .whole_experts = {}};
    auto* const cut = parallel::experts::experts_mark_of(first);
    if (cut != nullptr && cut->is_without_values()) {
      of.whole_experts = cut->take_whole_without_values();
    }
    const at::Tensor& made = of.whole_experts.defined() ? of.whole_experts : first;
    of.values = memory::flat_over(made.storage(), made.scalar_type());
    on_tape.push_back(std::move(of));
  }
  return on_tape;
}

void PageFiller::replay(const DeferredValues& deferred, const std::vector<size_t>& storages) {
  std::vector<OnTape> on_tape = find_on_tape(storages);
  ReplayedValues computed(pages_);
  compute(deferred.tape, on_tape, deferred.buffers,
          [&](const OnTape& of, const at::Tensor& values) {
            computed.note(of.storage, values);
            move_in(of.storage, own_part(of, values));
          });
  const std::set<size_t> differing = computed.find_differing();
  std::erase_if(on_tape, [&](const OnTape& of) { return !differing.contains(of.storage); });
  if (on_tape.empty()) return;
  compute(deferred.tape, on_tape, /*buffers=*/{}, [&](const OnTape& of, const at::Tensor& values) {
    if (of.whole_experts.defined()) bring_whole_experts(of.storage, values);
    const at::Tensor own = own_part(of, values);
    bring_first_values(pages_, of.storage, own);
    keep_part(of.storage, own);
  });
}

void PageFiller::compute(const operators::ConstructionTape& tape,
                         const std::vector<OnTape>& on_tape, const std::vector<at::Tensor>& buffers,
                         const TakeValues& take) const {
  std::vector<at::Tensor> targets;
  std::unordered_map<const c10::StorageImpl*, const OnTape*> known;
  std::unordered_multimap<const c10::StorageImpl*, at::Tensor> buffers_on;
  for (const OnTape& of : on_tape) {
    known.emplace(of.values.storage().unsafeGetStorageImpl(), &of);
    targets.push_back(of.values);
  }
  for (const at::Tensor& buffer : buffers) {
    if (!buffer.is_meta()) continue;
    targets.push_back(buffer);
    buffers_on.emplace(buffer.storage().unsafeGetStorageImpl(), buffer);
  }
  tape.replay(targets, [&](const c10::StorageImpl& storage, const at::Tensor& values) {
    if (const auto of = known.find(&storage); of != known.end()) {
      take(*of->second, values);
      return;
    }
    const auto [first, last] = buffers_on.equal_range(&storage);
    for (auto buffer = first; buffer != last; ++buffer) {
      memory::adopt_storage(buffer->second, values.storage(), values.scalar_type());
    }
  });
}

// values: [numel of all experts], or of the storage.
at::Tensor PageFiller::own_part(const OnTape& on_tape, const at::Tensor& values) const {
  if (!on_tape.whole_experts.defined()) return values;
  const size_t first = pages_.storages()[on_tape.storage].parameters.front();
  const ParameterSlice& slice = *pages_.parameters()[first].parameter.slice;
  return slice.cut.take(values.view(on_tape.whole_experts.sizes()), slice.ranks.rank()).view(-1);
}

// values: [numel of all experts], which become those of rank 0 along "expert".
void PageFiller::bring_whole_experts(size_t storage, const at::Tensor& values) const {
  const NamedParameter& named =
      pages_.parameters()[pages_.storages()[storage].parameters.front()].parameter;
  const std::string what = "parameter \"" + named.name() + "\"";
  named.slice->ranks.communicator().broadcast(values, /*root=*/0, what).wait();
}

// values: [numel of the storage], with what this rank keeps of it. They are let go.
void PageFiller::move_in(size_t storage, const at::Tensor& values) {
  const size_t page = pages_.storages()[storage].page;
  if (!memory_.has(page)) {
    masters_.make(page);
    memory_.make(page);
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
