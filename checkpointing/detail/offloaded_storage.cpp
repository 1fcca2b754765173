#include <cstdint>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include "checkpointing/detail/activation_offloader.h"
#include "memory/exact.h"

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

// uint8 [bytes] in memory that copies of the device read and write beside the host.
at::Tensor host_bytes(int64_t bytes, c10::Device device) {
  if (!memory::has_streams(device.type())) return at::empty({bytes}, at::kByte);
  auto block = std::make_shared<PinnedBlock>(bytes, device.type());
  void* const data = block->data.get();
  return at::from_blob(
      data, {bytes}, [block = std::move(block)](void*) {}, at::kByte);
}

int64_t past_alignment(const at::Tensor& bytes, int64_t alignment) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes.const_data_ptr()) %
                              static_cast<uintptr_t>(alignment));
}

}  // namespace

OffloadedStorage::OffloadedStorage(std::shared_ptr<ActivationOffloader> offloader,
                                   const at::Tensor& tensor, const Span& span)
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
  copy_ = host_memory();
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
      copy_.values.copy_(encoded, /*non_blocking=*/true);
    } else {
      encode(offloader_->compression(), flat, copy_.values);
    }
  }
  copied_ = streams_.out.record();
  if (has_streams()) {
    offloader_->note_leaving(place_, copied_, bytes(), {flat, encoded, copy_.values});
  } else {
    go_to_store();
  }
}

HostBlock OffloadedStorage::host_memory() const {
  const KindScope kind(Kind::kActivationOffloaded);
  const int64_t alignment = offloader_->store() ? offloader_->store()->alignment() : 1;
  const int64_t padded = memory::round_up(form_.bytes(), alignment);
  at::Tensor bytes = host_bytes(padded, options().device());
  if (past_alignment(bytes, alignment) != 0) {
    bytes = host_bytes(padded + alignment, options().device());
    const int64_t past = past_alignment(bytes, alignment);
    bytes = bytes.narrow(0, past == 0 ? 0 : alignment - past, padded);
  }
  return {bytes.narrow(0, 0, form_.bytes()).view(form_.dtype), bytes};
}

void OffloadedStorage::go_to_store() {
  const std::lock_guard lock(mutex_);
  // One that is back already was in time for the host's memory.
  if (!offloader_->store() || stored_ || was_fetched_) return;
  stored_ = offloader_->store()->put(copy_.bytes);
  copy_ = {};
}

// Under mutex_.
void OffloadedStorage::read_ahead() {
  const LedgerScope ledger(offloader_->ledger());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  copy_ = host_memory();
  reading_ = stored_->start_get(copy_.bytes);
}

// Under mutex_. The copy, on the host.
const HostBlock& OffloadedStorage::host_copy() {
  if (stored_ && !copy_.bytes.defined()) read_ahead();
  if (reading_) {
    const memory::Pending reading = *std::exchange(reading_, std::nullopt);
    try {
      reading.wait();
    } catch (...) {
      copy_ = {};
      throw;
    }
  }
  return copy_;
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
  const bool was_ahead = std::exchange(counts_ahead_, false);
  if (was_ahead) offloader_->let_go_ahead(place_);
  at::Tensor flat = ahead_.defined() ? std::exchange(ahead_, {}) : start_fetch();
  stream().wait(arrived_);
  offloader_->note_fetch(bytes(), was_ahead);
  return flat;
}

at::Tensor OffloadedStorage::start_fetch() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const LedgerScope ledger(offloader_->ledger());
  const at::Tensor copy = host_copy().values;
  was_fetched_ = true;
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
      encoded.copy_(copy, /*non_blocking=*/true);
      decode(offloader_->compression(), encoded, flat);
    } else if (has_streams()) {
      flat.copy_(copy, /*non_blocking=*/true);
    } else {
      decode(offloader_->compression(), copy, flat);
    }
  }
  arrived_ = streams_.back.record();
  // A copy that is under way reads it still.
  if (stored_ && !has_streams()) copy_ = {};
  return flat;
}

void OffloadedStorage::after_unpack() {
  // On the host a copy ahead would take the same thread's time, and memory; a store has its own.
  if (has_streams() || offloader_->store()) offloader_->fetch_before(place_);
}

bool OffloadedStorage::fetch_ahead() {
  const std::lock_guard lock(mutex_);
  if (is_back() || ahead_.defined() || source().defined()) return true;
  if (!counts_ahead_ && !offloader_->take_ahead(place_, bytes())) return false;
  counts_ahead_ = true;
  try {
    if (stored_ && !copy_.bytes.defined()) read_ahead();
    const bool is_on_host = !reading_ || reading_->done();
    if (has_streams() && is_on_host) ahead_ = start_fetch();
  } catch (const c10::OutOfMemoryError&) {
    // It will be asked for again, by who needs it.
    let_go_ahead();
    return false;
  }
  return true;
}

void OffloadedStorage::drop_ahead() {
  const std::lock_guard lock(mutex_);
  if (!counts_ahead_) return;
  // The block is reused in the order of its stream, which must not come before the copy into it.
  if (ahead_.defined()) stream().wait(arrived_);
  ahead_.reset();
  let_go_ahead();
}

// Under mutex_. What is being read goes when it has been.
void OffloadedStorage::let_go_ahead() {
  counts_ahead_ = false;
  if (reading_) copy_ = {};
  reading_.reset();
  offloader_->let_go_ahead(place_);
}

}  // namespace zeropage::checkpointing::detail
