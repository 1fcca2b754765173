#include "checkpointing/detail/offloaded_storage.h"

#include <utility>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

namespace zeropage::checkpointing::detail {
namespace {

using memory::Kind;
using memory::KindScope;
using memory::LedgerScope;
using memory::StreamScope;

// Page-locked memory does not come from the allocator that the ledger wraps. That which it comes from
// does not give it out again before the copies that were enqueued have ended.
struct PinnedBlock {
  PinnedBlock(int64_t bytes, c10::DeviceType device)
      : charge(bytes, c10::DeviceType::CPU),
        data(at::globalContext().getPinnedMemoryAllocator(device)->allocate(
            static_cast<size_t>(bytes))) {}
  const memory::ChargedBlock charge;
  c10::DataPtr data;
};

// [numel] in memory that copies of the device read and write beside the host.
at::Tensor host_memory(const Encoded& form, c10::Device device) {
  const KindScope kind(Kind::kActivationOffloaded);
  const auto options = at::TensorOptions().dtype(form.dtype);
  if (!memory::has_streams(device.type())) return at::empty({form.numel}, options);
  auto block = std::make_shared<PinnedBlock>(form.bytes(), device.type());
  void* const data = block->data.get();
  return at::from_blob(
      data, {form.numel}, [block = std::move(block)](void*) {}, options);
}

}  // namespace

OffloadedStorage::OffloadedStorage(std::shared_ptr<Offloader> offloader, const at::Tensor& tensor,
                                   const Span& span)
    : SavedStorage(tensor, span),
      offloader_(std::move(offloader)),
      form_(encoded_form(offloader_->compression(), tensor.scalar_type(), span.numel)),
      streams_(offloader_->streams(tensor.device())),
      place_(offloader_->note_copy(form_.bytes())),
      source_(tensor.storage().getWeakStorageImpl()) {
  try {
    copy_out(flat_of(tensor, span));
  } catch (...) {
    offloader_->forget_copy(place_, form_.bytes());
    throw;
  }
}

OffloadedStorage::~OffloadedStorage() {
  drop_ahead();
  offloader_->forget_copy(place_, form_.bytes());
}

void OffloadedStorage::copy_out(const at::Tensor& flat) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const LedgerScope ledger(offloader_->ledger());
  if (has_streams()) offloader_->wait_to_leave(bytes());
  copy_ = host_memory(form_, flat.device());
  streams_.out.wait_for(stream());
  at::Tensor encoded = flat;
  {
    const StreamScope scope(streams_.out);
    const KindScope kind(Kind::kStaging);
    const bool is_encoded_there =
        has_streams() && compresses(offloader_->compression(), flat.scalar_type());
    if (is_encoded_there) {
      encoded = at::empty({form_.numel}, flat.options().dtype(form_.dtype));
      encode(offloader_->compression(), flat, encoded);
    }
    if (has_streams()) {
      copy_.copy_(encoded, /*non_blocking=*/true);
    } else {
      encode(offloader_->compression(), flat, copy_);
    }
  }
  copied_ = streams_.out.record();
  if (has_streams()) offloader_->note_leaving(place_, copied_, bytes(), {flat, encoded, copy_});
}

at::Tensor OffloadedStorage::source() const {
  if (compresses(offloader_->compression(), c10::typeMetaToScalarType(options().dtype()))) {
    return {};
  }
  auto held = source_.lock();
  const auto needed = static_cast<size_t>(span().end()) * options().dtype().itemsize();
  if (!held || held->nbytes() < needed) return {};
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor flat = at::empty({0}, options());
  flat.set_(c10::Storage(std::move(held)), span().first, {span().numel}, {1});
  return flat;
}

at::Tensor OffloadedStorage::fetch() {
  at::Tensor held = source();
  if (held.defined()) return held;
  const bool was_ahead = ahead_.defined();
  at::Tensor flat = was_ahead ? std::exchange(ahead_, {}) : start_fetch();
  stream().wait(arrived_);
  if (was_ahead) offloader_->let_go_ahead(place_);
  offloader_->note_fetch(bytes(), was_ahead);
  return flat;
}

at::Tensor OffloadedStorage::start_fetch() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const LedgerScope ledger(offloader_->ledger());
  at::Tensor flat;
  {
    const StreamScope scope(stream());
    const KindScope kind(Kind::kActivation);
    flat = at::empty({span().numel}, options());
  }
  // The block's last user on its own stream comes first.
  streams_.back.wait_for(stream());
  streams_.back.wait(copied_);
  {
    const StreamScope scope(streams_.back);
    const KindScope kind(Kind::kStaging);
    const bool is_decoded_there =
        has_streams() && compresses(offloader_->compression(), flat.scalar_type());
    if (is_decoded_there) {
      const at::Tensor encoded = at::empty({form_.numel}, options().dtype(form_.dtype));
      encoded.copy_(copy_, /*non_blocking=*/true);
      decode(offloader_->compression(), encoded, flat);
    } else if (has_streams()) {
      flat.copy_(copy_, /*non_blocking=*/true);
    } else {
      decode(offloader_->compression(), copy_, flat);
    }
  }
  arrived_ = streams_.back.record();
  return flat;
}

void OffloadedStorage::after_unpack() {
  // On the host a copy ahead would take the same thread's time, and memory.
  if (has_streams()) offloader_->fetch_before(place_);
}

bool OffloadedStorage::fetch_ahead() {
  const std::lock_guard lock(mutex_);
  if (is_back() || ahead_.defined() || source().defined()) return true;
  if (!offloader_->take_ahead(place_, bytes())) return false;
  try {
    ahead_ = start_fetch();
  } catch (const c10::OutOfMemoryError&) {
    // It will be asked for again, by who needs it.
    offloader_->let_go_ahead(place_);
    return false;
  }
  return true;
}

void OffloadedStorage::drop_ahead() {
  const std::lock_guard lock(mutex_);
  if (!ahead_.defined()) return;
  // The block is reused in the order of its stream, which must not come before the copy into it.
  stream().wait(arrived_);
  ahead_.reset();
  offloader_->let_go_ahead(place_);
}

}  // namespace zeropage::checkpointing::detail
