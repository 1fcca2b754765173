#include "comm/gloo/gloo_link.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/detail/broken_pipe.h"

namespace zeropage::comm::detail {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// c10d takes non-negative 31-bit tags.
int gloo_tag(uint64_t tag) {
  return static_cast<int>((tag ^ (tag >> 31)) & 0x7fffffff);
}

// A tag that no message has: no operation's hash is likely to be it.
constexpr int kSentinelTag = 0x7fffffff;

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

}  // namespace

struct GlooLink::Impl {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
  std::chrono::milliseconds deadline;
  std::chrono::milliseconds longest_wait;
  std::mutex mutex;
  std::vector<WorkPointer> in_flight;  // guarded by mutex
  // A message from each peer that never comes; guarded by mutex.
  std::vector<std::pair<int, WorkPointer>> sentinels;
  bool aborted = false;  // guarded by mutex
};

struct GlooLink::Exchange::Message {
  WorkPointer work;
  int peer;
  bool waited = false;
};

struct GlooLink::Exchange::State {
  std::deque<Message> sends;
  std::deque<Message> recvs;
};

GlooLink::GlooLink(const Options& options) : impl_(std::make_unique<Impl>()) {
  impl_->deadline = options.deadline;
  impl_->longest_wait = options.longest_wait;
  // For Gloo's thread, which is started here.
  const BrokenPipeScope broken_pipe;
  // Gloo tries a peer five times over; messages are waited for with limits of their own.
  auto gloo = c10d::ProcessGroupGloo::Options::create(
      std::max<std::chrono::milliseconds>(options.deadline / 5, std::chrono::seconds(1)));
  gloo->devices = {c10d::ProcessGroupGloo::createDeviceForHostname(options.bind_address)};
  // Its worker threads serve its collectives, of which we use none.
  gloo->threads = 1;
  impl_->group =
      c10::make_intrusive<c10d::ProcessGroupGloo>(options.store, options.rank, options.size, gloo);
  for (int peer = 0; peer < options.size; ++peer) {
    if (peer == options.rank) continue;
    std::vector<at::Tensor> nothing = {at::empty({1}, at::kByte)};
    impl_->sentinels.emplace_back(peer, impl_->group->recv(nothing, peer, kSentinelTag));
  }
}

GlooLink::~GlooLink() = default;

void GlooLink::abort() {
  std::lock_guard lock(impl_->mutex);
  impl_->aborted = true;
  for (const WorkPointer& work : impl_->in_flight) work->abort();
}

void GlooLink::close() {
  std::lock_guard lock(impl_->mutex);
  impl_->aborted = true;
  impl_->sentinels.clear();
  impl_->group.reset();
}

// Gloo does not tell who waits for a message that was under way when its connection broke. It does
// tell who waits for one that has not begun.
std::vector<int> GlooLink::lost_peers() {
  std::lock_guard lock(impl_->mutex);
  std::vector<int> lost;
  for (const auto& [peer, sentinel] : impl_->sentinels) {
    try {
      // Aborted beforehand, it does not block.
      sentinel->abort();
      sentinel->wait(impl_->deadline);
    } catch (const std::exception&) {
      lost.push_back(peer);
    }
  }
  return lost;
}

GlooLink::Exchange::Exchange(GlooLink& link)
    : link_(link),
      state_(std::make_unique<State>()),
      give_up_at_(Clock::now() + link.impl_->longest_wait) {}

GlooLink::Exchange::~Exchange() {
  std::lock_guard lock(link_.impl_->mutex);
  link_.impl_->in_flight.clear();
}

size_t GlooLink::Exchange::send(const at::Tensor& tensor, int peer, uint64_t tag) {
  std::vector<at::Tensor> tensors = {tensor};
  std::lock_guard lock(link_.impl_->mutex);
  if (link_.impl_->aborted) throw PeerError::of_abort(peer);
  try {
    state_->sends.push_back({link_.impl_->group->send(tensors, peer, gloo_tag(tag)), peer});
  } catch (const std::exception& error) {
    throw PeerError(peer, first_line(error.what()));
  }
  link_.impl_->in_flight.push_back(state_->sends.back().work);
  return state_->sends.size() - 1;
}

size_t GlooLink::Exchange::recv(const at::Tensor& tensor, int peer, uint64_t tag) {
  std::vector<at::Tensor> tensors = {tensor};
  std::lock_guard lock(link_.impl_->mutex);
  if (link_.impl_->aborted) throw PeerError::of_abort(peer);
  try {
    state_->recvs.push_back({link_.impl_->group->recv(tensors, peer, gloo_tag(tag)), peer});
  } catch (const std::exception& error) {
    throw PeerError(peer, first_line(error.what()));
  }
  link_.impl_->in_flight.push_back(state_->recvs.back().work);
  return state_->recvs.size() - 1;
}

void GlooLink::Exchange::wait_send(size_t ticket) {
  wait(state_->sends[ticket]);
}

void GlooLink::Exchange::wait_recv(size_t ticket) {
  wait(state_->recvs[ticket]);
}

void GlooLink::Exchange::wait_sends() {
  for (Message& message : state_->sends) wait(message);
}

void GlooLink::Exchange::wait(Message& message) {
  if (message.waited) return;
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(give_up_at_ - Clock::now());
  bool completed = false;
  try {
    completed = message.work->wait(std::max(left, std::chrono::milliseconds(1)));
  } catch (const std::exception& error) {
    const std::string reason = first_line(error.what());
    throw PeerError(message.peer, reason, reason.find("Timed out") != std::string::npos);
  }
  if (!completed) throw PeerError::of_abort(message.peer);
  message.waited = true;
}

}  // namespace zeropage::comm::detail
