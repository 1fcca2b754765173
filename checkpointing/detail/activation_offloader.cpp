#include "checkpointing/detail/activation_offloader.h"

#include <algorithm>
#include <utility>

#include "memory/bytes.h"

namespace zeropage::checkpointing::detail {
namespace {

using memory::operator""_MiB;

constexpr int64_t kLeastStagingBytes = 64_MiB;
// A node asks for what it saved in the order of saving, so backward goes a little forth and back.
// What lies further behind will not be asked for soon.
constexpr int64_t kSlack = 32;
// How many places are looked at, at once, for what may come next.
constexpr int64_t kMostLooked = 64;

bool by_device(c10::Device left, c10::Device right) {
  return std::pair(left.type(), left.index()) < std::pair(right.type(), right.index());
}

}  // namespace

CopyStreams::CopyStreams(c10::Device device)
    : out(memory::Stream::another(device)), back(memory::Stream::another(device)) {}

ActivationOffloader::ActivationOffloader(const ActivationOffloadOptions& options)
    : options_(options), streams_(by_device) {
  statistics_.compression = options.compression;
  if (options.store) statistics_.where = options.store->describe();
}

std::unique_ptr<PackedTensor> ActivationOffloader::pack(const at::Tensor& tensor) {
  if (!spans_.may_leave(tensor)) return keep(tensor);
  const auto span = span_of(tensor);
  const auto itemsize = static_cast<int64_t>(tensor.itemsize());
  if (!span || std::min(tensor.numel(), span->numel) * itemsize < options_.least_bytes) {
    return keep(tensor);
  }
  std::shared_ptr<SavedStorage> storage = spans_.find(tensor, *span);
  if (!storage) storage = leave(tensor, *span);
  {
    const std::lock_guard lock(mutex_);
    ++statistics_.saved_tensors;
  }
  return pack_in(std::move(storage), tensor, "");
}

void ActivationOffloader::stay_here(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) spans_.stay_here(tensor);
}

std::shared_ptr<OffloadedStorage> ActivationOffloader::leave(const at::Tensor& tensor,
                                                             const Span& span) {
  auto storage = std::make_shared<OffloadedStorage>(shared_from_this(), tensor, span);
  spans_.add(tensor, storage);
  const std::lock_guard lock(mutex_);
  order_[storage->place()] = storage;
  return storage;
}

ActivationOffloadStatistics ActivationOffloader::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

CopyStreams ActivationOffloader::streams(c10::Device device) {
  const std::lock_guard lock(mutex_);
  return streams_.try_emplace(device, device).first->second;
}

int64_t ActivationOffloader::note_copy(int64_t host_bytes) {
  const std::lock_guard lock(mutex_);
  ++statistics_.copies;
  statistics_.host_bytes += host_bytes;
  statistics_.host_total_bytes += host_bytes;
  statistics_.host_peak_bytes = std::max(statistics_.host_peak_bytes, statistics_.host_bytes);
  return next_place_++;
}

void ActivationOffloader::forget_copy(int64_t place, int64_t host_bytes) {
  std::vector<at::Tensor> buffers;  // freed outside of the lock
  const std::lock_guard lock(mutex_);
  statistics_.host_bytes -= host_bytes;
  order_.erase(place);
  const auto leaving = std::find_if(leaving_.begin(), leaving_.end(),
                                    [place](const Leaving& one) { return one.place == place; });
  if (leaving == leaving_.end()) return;
  leaving_bytes_ -= leaving->bytes;
  buffers = std::move(leaving->buffers);
  leaving_.erase(leaving);
}

void ActivationOffloader::wait_to_leave(int64_t bytes) {
  for (;;) {
    go_to_store(let_go_what_has_left());
    std::unique_lock lock(mutex_);
    largest_bytes_ = std::max(largest_bytes_, bytes);
    if (leaving_.empty() || leaving_bytes_ + bytes <= staging_bytes()) return;
    const memory::Event oldest = leaving_.front().end;
    lock.unlock();
    const auto begun = std::chrono::steady_clock::now();
    oldest.synchronize();
    lock.lock();
    statistics_.waited_seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  }
}

void ActivationOffloader::note_leaving(int64_t place, memory::Event end, int64_t bytes,
                                       std::vector<at::Tensor> buffers) {
  const std::lock_guard lock(mutex_);
  leaving_.push_back({place, std::move(end), bytes, std::move(buffers)});
  leaving_bytes_ += bytes;
  statistics_.most_leaving_bytes = std::max(statistics_.most_leaving_bytes, leaving_bytes_);
}

ActivationOffloader::Storages ActivationOffloader::let_go_what_has_left() {
  std::vector<Leaving> gone;  // freed outside of the lock
  Storages storages;
  const std::lock_guard lock(mutex_);
  while (!leaving_.empty() && leaving_.front().end.passed()) {
    leaving_bytes_ -= leaving_.front().bytes;
    const auto known = order_.find(leaving_.front().place);
    auto storage = known != order_.end() ? known->second.lock() : nullptr;
    if (storage) storages.push_back(std::move(storage));
    gone.push_back(std::move(leaving_.front()));
    leaving_.pop_front();
  }
  return storages;
}

void ActivationOffloader::go_to_store(const Storages& storages) {
  if (!options_.store) return;
  for (const auto& storage : storages) storage->go_to_store();
}

bool ActivationOffloader::take_ahead(int64_t place, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!ahead_.empty() && ahead_bytes_ + bytes > staging_bytes()) return false;
  ahead_[place] = bytes;
  ahead_bytes_ += bytes;
  statistics_.most_ahead_bytes = std::max(statistics_.most_ahead_bytes, ahead_bytes_);
  return true;
}

void ActivationOffloader::let_go_ahead(int64_t place) {
  const std::lock_guard lock(mutex_);
  const auto ahead = ahead_.find(place);
  ahead_bytes_ -= ahead->second;
  ahead_.erase(ahead);
}

void ActivationOffloader::note_fetch(int64_t bytes, bool was_ahead) {
  const std::lock_guard lock(mutex_);
  statistics_.fetched_bytes += bytes;
  if (was_ahead) statistics_.fetched_ahead_bytes += bytes;
}

void ActivationOffloader::fetch_before(int64_t place) {
  Storages next;
  // On the host in time for backward: no store has to take them.
  const Storages arrived = let_go_what_has_left();
  drop_what_was_passed_by(place);
  {
    const std::lock_guard lock(mutex_);
    auto before = order_.lower_bound(place);
    for (int64_t looked = 0; looked < kMostLooked && before != order_.begin(); ++looked) {
      auto storage = (--before)->second.lock();
      if (storage) next.push_back(std::move(storage));
    }
  }
  for (const auto& storage : next) {
    if (!storage->fetch_ahead()) return;
  }
}

void ActivationOffloader::drop_what_was_passed_by(int64_t place) {
  Storages passed_by;
  {
    const std::lock_guard lock(mutex_);
    for (auto ahead = ahead_.upper_bound(place + kSlack); ahead != ahead_.end(); ++ahead) {
      const auto known = order_.find(ahead->first);
      auto storage = known != order_.end() ? known->second.lock() : nullptr;
      if (storage) passed_by.push_back(std::move(storage));
    }
  }
  for (const auto& storage : passed_by) storage->drop_ahead();
}

int64_t ActivationOffloader::staging_bytes() const {
  return options_.staging_bytes > 0 ? options_.staging_bytes
                                    : std::max(kLeastStagingBytes, 2 * largest_bytes_);
}

}  // namespace zeropage::checkpointing::detail
