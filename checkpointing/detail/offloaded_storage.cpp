#include "checkpointing/detail/offloaded_storage.h"

#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "device/page_locked.h"

namespace zeropage::checkpointing::detail {
namespace {

using device::StreamScope;
using memory::Kind;
using memory::KindScope;
using memory::LedgerScope;

}  // namespace

OffloadedStorage::OffloadedStorage(std::shared_ptr<OffloadTraffic> traffic,
                                   const at::Tensor& tensor, const Span& span)
    : SavedStorage(tensor, span),
      traffic_(std::move(traffic)),
      streams_(traffic_->streams(tensor.device())),
      source_(tensor.storage().getWeakStorageImpl()),
      copy_(traffic_->ledger(), traffic_->options().store,
            encoded_form(traffic_->options().compression, tensor.scalar_type(), span.numel),
            tensor.device()),
      place_(traffic_->note_copy(copy_.form().bytes())) {
  try {
    copy_out(flat_of(tensor, span));
  } catch (...) {
    traffic_->forget_copy(place_, copy_.form().bytes());
    throw;
  }
}

OffloadedStorage::~OffloadedStorage() {
  drop_ahead();
  traffic_->forget_copy(place_, copy_.form().bytes());
}

void OffloadedStorage::copy_out(const at::Tensor& flat) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const LedgerScope ledger(traffic_->ledger());
  if (has_streams()) traffic_->wait_to_leave(bytes());
  const at::Tensor copy = copy_.allocate();
  streams_.out.wait_for(stream());
  at::Tensor encoded = flat;
  {
    const StreamScope scope(streams_.out);
    const KindScope kind(Kind::kStaging);
    const bool is_encoded_there =
        has_streams() && compresses(traffic_->options().compression, flat.scalar_type());
    if (is_encoded_there) {
      encoded = at::empty({copy_.form().numel}, flat.options().dtype(copy_.form().dtype));
      encode(traffic_->options().compression, flat, encoded);
    }
    if (has_streams()) {
      device::start_copy(copy, encoded);
    } else {
      encode(traffic_->options().compression, flat, copy);
    }
  }
  copied_ = streams_.out.record();
  if (has_streams()) {
    traffic_->note_leaving(place_, copied_, bytes(), {flat, encoded, copy});
  } else {
    go_to_store();
  }
}

void OffloadedStorage::go_to_store() {
  const std::lock_guard lock(mutex_);
  // One that is back already was in time for the host's memory.
  if (!was_fetched_) copy_.go_to_store();
}

at::Tensor OffloadedStorage::source() const {
  if (compresses(traffic_->options().compression, c10::typeMetaToScalarType(options().dtype()))) {
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
  if (was_ahead) traffic_->let_go_ahead(place_);
  at::Tensor flat = ahead_.defined() ? std::exchange(ahead_, {}) : start_fetch();
  stream().wait(arrived_);
  traffic_->note_fetch(bytes(), was_ahead);
  return flat;
}

at::Tensor OffloadedStorage::start_fetch() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const LedgerScope ledger(traffic_->ledger());
  const at::Tensor copy = copy_.values();
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
        has_streams() && compresses(traffic_->options().compression, flat.scalar_type());
    if (is_decoded_there) {
      const at::Tensor encoded =
          at::empty({copy_.form().numel}, options().dtype(copy_.form().dtype));
      device::start_copy(encoded, copy);
      decode(traffic_->options().compression, encoded, flat);
    } else if (has_streams()) {
      device::start_copy(flat, copy);
    } else {
      decode(traffic_->options().compression, copy, flat);
    }
  }
  arrived_ = streams_.back.record();
  // A copy that is under way reads it still.
  if (!has_streams()) copy_.let_go();
  return flat;
}

void OffloadedStorage::after_unpack() {
  // On the host a copy ahead would take the same thread's time, and memory; a store has its own.
  if (has_streams() || traffic_->options().store) traffic_->fetch_before(place_);
}

bool OffloadedStorage::fetch_ahead() {
  const std::lock_guard lock(mutex_);
  if (is_back() || ahead_.defined() || source().defined()) return true;
  if (!counts_ahead_ && !traffic_->take_ahead(place_, bytes())) return false;
  counts_ahead_ = true;
  try {
    copy_.read_ahead();
    if (has_streams() && copy_.is_read()) ahead_ = start_fetch();
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

// Under mutex_.
void OffloadedStorage::let_go_ahead() {
  counts_ahead_ = false;
  copy_.stop_reading();
  traffic_->let_go_ahead(place_);
}

}  // namespace zeropage::checkpointing::detail
