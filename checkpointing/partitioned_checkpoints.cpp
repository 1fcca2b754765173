#include <algorithm>
#include <string_view>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "base/exact.h"
#include "checkpointing/detail/saved_storage.h"
#include "zeropage/activation_offload.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::checkpointing {
namespace detail {
namespace {

using device::StreamScope;
using memory::Kind;
using memory::KindScope;
using memory::LedgerScope;

// What all gathers of one rank share.
struct Shared {
  const PartitionOptions options;
  const std::shared_ptr<memory::Ledger> ledger = memory::Ledger::current();

  const SliceGroup& group() const { return options.group; }
  int64_t slice_numel(int64_t numel) const { return base::div_ceil<int64_t>(numel, group().size); }
};

class SlicedStorage final : public SavedStorage {
 public:
  SlicedStorage(std::shared_ptr<const Shared> shared, const at::Tensor& tensor, const Span& span)
      : SavedStorage(tensor, span),
        shared_(std::move(shared)),
        name_(c10::str("a saved tensor of sizes ", tensor.sizes())),
        slice_(pack_with(shared_->options.onward, own_slice_of(flat_of(tensor, span)), name_)) {}

 private:
  // [slice], the last ones padded with zeros: slices are equal.
  at::Tensor own_slice_of(const at::Tensor& flat) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const LedgerScope ledger(shared_->ledger);
    const KindScope kind(Kind::kActivation);
    const int64_t numel = shared_->slice_numel(flat.numel());
    const int64_t first = std::min(numel * shared_->group().index, flat.numel());
    const int64_t count = std::min(numel, flat.numel() - first);
    const at::Tensor slice = at::empty({numel}, flat.options());
    slice.narrow(0, 0, count).copy_(flat.narrow(0, first, count));
    slice.narrow(0, count, numel - count).zero_();
    return slice;
  }

  at::Tensor fetch() override {
    const at::Tensor own = slice_->unpack();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const LedgerScope ledger(shared_->ledger);
    const StreamScope scope(stream());
    const KindScope kind(Kind::kActivation);
    const SliceGroup& group = shared_->group();
    const at::Tensor whole = at::empty({own.numel() * group.size}, own.options());
    whole.narrow(0, own.numel() * group.index, own.numel()).copy_(own);
    group.all_gather(whole, name_).wait();
    return whole.narrow(0, 0, span().numel);
  }

  const std::shared_ptr<const Shared> shared_;
  const std::string name_;
  const std::unique_ptr<PackedTensor> slice_;
};

int64_t hash_of_bytes(const at::Tensor& flat) {
  const at::Tensor bytes = flat.cpu();
  const std::string_view view(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  return static_cast<int64_t>(std::hash<std::string_view>()(view));
}

}  // namespace

class Partitioner final : public SavedTensorHooks {
 public:
  explicit Partitioner(PartitionOptions options)
      : shared_(std::make_shared<const Shared>(Shared{std::move(options)})) {}

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    const auto span = is_cut(tensor) ? span_of(tensor) : std::nullopt;
    if (!span) return pack_with(options().onward, tensor);
    std::shared_ptr<SavedStorage> storage = spans_.find(tensor, *span);
    if (!storage) {
      if (options().verify == Verify::kEachTensor) verify(tensor, *span);
      storage = std::make_shared<SlicedStorage>(shared_, tensor, *span);
      spans_.add(tensor, storage);
    }
    return pack_in(std::move(storage), tensor, "");
  }

 private:
  const PartitionOptions& options() const { return shared_->options; }

  bool is_cut(const at::Tensor& tensor) {
    if (options().group.size == 1 || !spans_.may_leave(tensor)) return false;
    const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.itemsize());
    return bytes >= options().least_bytes && options().held_by_all(tensor);
  }

  // A collective.
  void verify(const at::Tensor& tensor, const Span& span) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const SliceGroup& group = options().group;
    const int64_t own = hash_of_bytes(flat_of(tensor, span));
    const at::Tensor hashes =
        at::full({group.size}, own, at::dtype(at::kLong).device(tensor.device()));
    group.all_gather(hashes, "the hashes of a saved tensor").wait();
    const at::Tensor on_host = hashes.cpu();
    for (int member = 0; member < group.size; ++member) {
      ZP_CHECK(on_host.const_data_ptr<int64_t>()[member] == own,
               "PartitionedCheckpoints: expected a saved tensor of sizes ", tensor.sizes(),
               " to be the same on all ", group.size, " ranks of the group, but those of index ",
               group.index, " and ", member,
               " differ; let PartitionOptions::held_by_all say no to it");
    }
  }

  const std::shared_ptr<const Shared> shared_;
  SavedSpans spans_;
};

}  // namespace detail

namespace {

PartitionOptions checked(PartitionOptions options) {
  const SliceGroup& group = options.group;
  ZP_CHECK(group.size >= 1 && group.index >= 0 && group.index < group.size,
           "PartitionedCheckpoints: expected an index below the size of the group, got index ",
           group.index, " of ", group.size, "; set SliceGroup::index and ::size");
  ZP_CHECK(group.size == 1 || (group.all_gather && options.held_by_all),
           "PartitionedCheckpoints: a group of ", group.size,
           " needs both SliceGroup::all_gather and PartitionOptions::held_by_all, which says what "
           "all of its ranks hold alike; set them");
  ZP_CHECK(options.least_bytes >= 0,
           "PartitionedCheckpoints: expected least_bytes of 0 or more, got ", options.least_bytes,
           "; 0 cuts everything");
  return options;
}

}  // namespace

PartitionedCheckpoints::PartitionedCheckpoints(PartitionOptions options)
    : partitioner_(std::make_shared<detail::Partitioner>(checked(std::move(options)))) {}

PartitionedCheckpoints::~PartitionedCheckpoints() = default;
PartitionedCheckpoints::PartitionedCheckpoints(PartitionedCheckpoints&&) noexcept = default;
PartitionedCheckpoints& PartitionedCheckpoints::operator=(PartitionedCheckpoints&&) noexcept =
    default;

std::unique_ptr<ActivationPolicy::Forward> PartitionedCheckpoints::begin_forward() {
  check_not_moved_from(partitioner_ != nullptr, "PartitionedCheckpoints");
  return forward_through(partitioner_);
}

std::shared_ptr<SavedTensorHooks> PartitionedCheckpoints::hooks() const {
  return partitioner_;
}

}  // namespace zeropage::checkpointing
