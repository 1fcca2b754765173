#include "checkpointing/detail/offload_traffic.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "zeropage/bytes.h"

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
    : out(device::Stream::another(device)), back(device::Stream::another(device)) {}

OffloadTraffic::OffloadTraffic(const ActivationOffloadOptions& options)
    : options_(options), streams_(by_device) {
  statistics_.compression = options.compression;
  if (options.store) statistics_.where = options.store->describe();
}

void OffloadTraffic::note_saved_tensor() {
  const std::lock_guard lock(mutex_);
  ++statistics_.saved_tensors;
}

void OffloadTraffic::add(int64_t place, const std::shared_ptr<OffloadedCopy>& copy) {
  const std::lock_guard lock(mutex_);
  order_[place] = copy;
}

ActivationOffloadStatistics OffloadTraffic::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

CopyStreams OffloadTraffic::streams(c10::Device device) {
  const std::lock_guard lock(mutex_);
  return streams_.try_emplace(device, device).first->second;
}

int64_t OffloadTraffic::note_copy(int64_t host_bytes) {
  const std::lock_guard lock(mutex_);
  ++statistics_.copies;
  statistics_.host_bytes += host_bytes;
  statistics_.host_total_bytes += host_bytes;
  statistics_.host_peak_bytes = std::max(statistics_.host_peak_bytes, statistics_.host_bytes);
  return next_place_++;
}

void OffloadTraffic::forget_copy(int64_t place, int64_t host_bytes) {
  std::vector<at::Tensor> buffers;  // freed outside of the lock
  const std::lock_guard lock(mutex_);
  statistics_.host_bytes -= host_bytes;
  order_.erase(place);
  buffers = leaving_.forget(place);
}

void OffloadTraffic::wait_to_leave(int64_t bytes) {
  for (;;) {
    go_to_store(let_go_what_has_left());
    std::unique_lock lock(mutex_);
    largest_bytes_ = std::max(largest_bytes_, bytes);
    if (leaving_.empty() || leaving_.bytes() + bytes <= staging_bytes()) return;
    const device::Event oldest = leaving_.oldest_end();
    lock.unlock();
    const auto begun = std::chrono::steady_clock::now();
    oldest.synchronize();
    lock.lock();
    statistics_.waited_seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  }
}

void OffloadTraffic::note_leaving(int64_t place, device::Event end, int64_t bytes,
                                  std::vector<at::Tensor> buffers) {
  const std::lock_guard lock(mutex_);
  leaving_.add({place, std::move(end), bytes, std::move(buffers)});
  statistics_.most_leaving_bytes = std::max(statistics_.most_leaving_bytes, leaving_.bytes());
}

OffloadTraffic::Copies OffloadTraffic::let_go_what_has_left() {
  std::vector<LeavingCopy> gone;  // freed outside of the lock
  Copies copies;
  const std::lock_guard lock(mutex_);
  gone = leaving_.take_ended();
  for (const LeavingCopy& left : gone) {
    const auto known = order_.find(left.place);
    auto copy = known != order_.end() ? known->second.lock() : nullptr;
    if (copy) copies.push_back(std::move(copy));
  }
  return copies;
}

void OffloadTraffic::go_to_store(const Copies& copies) {
  if (!options_.store) return;
  for (const auto& copy : copies) copy->go_to_store();
}

bool OffloadTraffic::take_ahead(int64_t place, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!ahead_.empty() && ahead_bytes_ + bytes > staging_bytes()) return false;
  ahead_[place] = bytes;
  ahead_bytes_ += bytes;
  statistics_.most_ahead_bytes = std::max(statistics_.most_ahead_bytes, ahead_bytes_);
  return true;
}

void OffloadTraffic::let_go_ahead(int64_t place) {
  const std::lock_guard lock(mutex_);
  const auto ahead = ahead_.find(place);
  ahead_bytes_ -= ahead->second;
  ahead_.erase(ahead);
}

void OffloadTraffic::note_fetch(int64_t bytes, bool was_ahead) {
  const std::lock_guard lock(mutex_);
  statistics_.fetched_bytes += bytes;
  if (was_ahead) statistics_.fetched_ahead_bytes += bytes;
}

void OffloadTraffic::fetch_before(int64_t place) {
  Copies next;
  // On the host in time for backward: no store has to take them.
  const Copies arrived = let_go_what_has_left();
  drop_what_was_passed_by(place);
  {
    const std::lock_guard lock(mutex_);
    auto before = order_.lower_bound(place);
    for (int64_t looked = 0; looked < kMostLooked && before != order_.begin(); ++looked) {
      auto copy = (--before)->second.lock();
      if (copy) next.push_back(std::move(copy));
    }
  }
  for (const auto& copy : next) {
    if (!copy->fetch_ahead()) return;
  }
}

void OffloadTraffic::drop_what_was_passed_by(int64_t place) {
  Copies passed_by;
  {
    const std::lock_guard lock(mutex_);
    for (auto ahead = ahead_.upper_bound(place + kSlack); ahead != ahead_.end(); ++ahead) {
      const auto known = order_.find(ahead->first);
      auto copy = known != order_.end() ? known->second.lock() : nullptr;
      if (copy) passed_by.push_back(std::move(copy));
    }
  }
  for (const auto& copy : passed_by) copy->drop_ahead();
}

int64_t OffloadTraffic::staging_bytes() const {
  return options_.staging_bytes > 0 ? options_.staging_bytes
                                    : std::max(kLeastStagingBytes, 2 * largest_bytes_);
}

}  // namespace zeropage::checkpointing::detail
