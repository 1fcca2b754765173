#include "checkpointing/detail/saved_storage.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "operators/dispatch_keys.h"

namespace zeropage::checkpointing::detail {
namespace {

// A tensor with holes that covers less of its storage than this part does not leave.
constexpr int64_t kLeastPart = 8;

bool is_parameter(const at::Tensor& tensor) {
  return tensor.is_leaf() && tensor.requires_grad();
}

// Whether a write that one of them counts is counted by the other. LibTorch compares no counters, but a counter is a
// pointer to one.
bool is_same_counter(const c10::VariableVersion& left, const c10::VariableVersion& right) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(static_cast<const void*>(&left), static_cast<const void*>(&right),
                     sizeof(void*)) == 0;
}

}  // namespace

bool is_of_parameter(const at::Tensor& tensor) {
  return is_parameter(tensor) || (tensor.is_view() && is_parameter(at::Tensor(tensor._base())));
}

std::optional<Span> span_of(const at::Tensor& tensor) {
  int64_t covered = 1, extent = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0) continue;
    covered *= tensor.size(dim);
    extent += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  if (covered >= extent) return Span{tensor.storage_offset(), extent};
  const auto all = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  if (covered < all / kLeastPart) return std::nullopt;
  return Span{0, all};
}

at::Tensor flat_of(const at::Tensor& tensor, const Span& span) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return tensor.as_strided({span.numel}, {1}, span.first);
}

SavedStorage::SavedStorage(const at::Tensor& tensor, const Span& span)
    : span_(span),
      options_(at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device())),
      stream_(device::Stream::current(tensor.device())),
      counter_(tensor.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.current_version()) {}

int64_t SavedStorage::bytes() const {
  return span_.numel * static_cast<int64_t>(options_.dtype().itemsize());
}

class SpanPack final : public PackedTensor {
 public:
  SpanPack(std::shared_ptr<SavedStorage> storage, const at::Tensor& tensor, std::string who)
      : storage_(std::move(storage)),
        sizes_(tensor.sizes().vec()),
        strides_(tensor.strides().vec()),
        first_(tensor.storage_offset() - storage_->span().first),
        unchanged_(tensor, std::move(who)) {
    const std::lock_guard lock(storage_->mutex_);
    ++storage_->packs_;
  }

  ~SpanPack() override {
    const std::lock_guard lock(storage_->mutex_);
    --storage_->packs_;
    if (round_ == storage_->round_) --storage_->served_;
    let_go_if_all_are_served();
  }

  at::Tensor unpack() override {
    unchanged_.check();
    at::Tensor tensor = take();
    storage_->after_unpack();
    return tensor;
  }

 private:
  at::Tensor take() {
    const std::lock_guard lock(storage_->mutex_);
    if (!storage_->fetched_.defined()) {
      storage_->fetched_ = storage_->fetch();
      ++storage_->round_;
      storage_->served_ = 0;
    }
    if (round_ != storage_->round_) {
      round_ = storage_->round_;
      ++storage_->served_;
    }
    at::Tensor tensor = in_geometry(storage_->fetched_);
    let_go_if_all_are_served();
    return tensor;
  }

  at::Tensor in_geometry(const at::Tensor& flat) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor tensor = flat.as_strided(sizes_, strides_, flat.storage_offset() + first_);
    const auto asking = device::Stream::current(flat.device());
    if (asking == storage_->stream_) return tensor;
    // Autograd asks on the forward's stream. Another one gets memory of its own, since this block is
    // reused in the order of the first.
    asking.wait_for(storage_->stream_);
    const at::Tensor copy = at::empty_strided(sizes_, strides_, flat.options()).copy_(tensor);
    storage_->stream_.wait_for(asking);
    return copy;
  }

  void let_go_if_all_are_served() {
    if (storage_->served_ == storage_->packs_) storage_->fetched_.reset();
  }

  const std::shared_ptr<SavedStorage> storage_;
  const std::vector<int64_t> sizes_;
  const std::vector<int64_t> strides_;
  const int64_t first_;  // in the span
  const Unchanged unchanged_;
  int64_t round_ = 0;  // that it was last asked for in; guarded by the storage's mutex_
};

std::unique_ptr<PackedTensor> pack_in(std::shared_ptr<SavedStorage> storage,
                                      const at::Tensor& tensor, std::string who) {
  return std::make_unique<SpanPack>(std::move(storage), tensor, std::move(who));
}

bool SavedSpans::may_leave(const at::Tensor& tensor) {
  const bool is_plain = tensor.layout() == at::kStrided && tensor.has_storage() &&
                        !tensor.is_quantized() && !tensor.is_meta() && !tensor.is_nested() &&
                        !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor() &&
                        !tensor.unsafeGetTensorImpl()->is_wrapped_number() &&
                        !tensor.key_set().has(operators::kTrapKey);
  if (!is_plain || tensor.numel() == 0) return false;
  if (is_parameter(tensor)) {
    stay_here(tensor);
    return false;
  }
  if (tensor.is_view()) {
    const at::Tensor base(tensor._base());
    if (is_parameter(base)) {
      stay_here(base);
      return false;
    }
  }
  const std::lock_guard lock(mutex_);
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  return found == storages_.end() || !found->second.stays;
}

void SavedSpans::stay_here(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  const std::lock_guard lock(mutex_);
  known(tensor).stays = true;
}

std::shared_ptr<SavedStorage> SavedSpans::find(const at::Tensor& tensor, const Span& span) {
  const auto stream = device::Stream::current(tensor.device());
  // Tensors may share a storage and count writes apart, as those of unsafe_chunk() in LSTM and GRU do: what has left for
  // one of them may be older than the values of another with the same version.
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  const auto version = counter.current_version();
  // What is looked at may be the last to hold its storage, whose end is not for this lock.
  std::vector<std::shared_ptr<SavedStorage>> candidates;
  const std::lock_guard lock(mutex_);
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == storages_.end()) return nullptr;
  for (const auto& left : found->second.left) {
    auto candidate = left.lock();
    if (!candidate) continue;
    const bool fits = is_same_counter(candidate->counter_, counter) &&
                      candidate->version_ == version && candidate->stream_ == stream &&
                      candidate->options_.dtype() == tensor.dtype() &&
                      candidate->span_.contains(span);
    if (fits) return candidate;
    candidates.push_back(std::move(candidate));
  }
  return nullptr;
}

void SavedSpans::add(const at::Tensor& tensor, const std::shared_ptr<SavedStorage>& storage) {
  const std::lock_guard lock(mutex_);
  auto& left = known(tensor).left;
  std::erase_if(left, [](const auto& one) { return one.expired(); });
  left.push_back(storage);
}

SavedSpans::Known& SavedSpans::known(const at::Tensor& tensor) {
  forget_the_dead();
  const c10::Storage& storage = tensor.storage();
  return storages_.try_emplace(storage.unsafeGetStorageImpl(), Known{storage.getWeakStorageImpl()})
      .first->second;
}

// Now and then, so that it costs a constant each.
void SavedSpans::forget_the_dead() {
  if (storages_.size() < forget_at_) return;
  std::erase_if(storages_, [](const auto& entry) { return entry.second.storage.expired(); });
  forget_at_ = std::max<size_t>(64, 2 * storages_.size());
}

}  // namespace zeropage::checkpointing::detail
