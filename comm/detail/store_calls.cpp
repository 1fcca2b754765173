#include "comm/detail/store_calls.h"

#include <future>
#include <memory>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/detail/broken_pipe.h"
#include "comm/detail/file_descriptor.h"

namespace zeropage::comm::detail {
namespace {

// The store's own limit comes first; ours is for when it does not come at all.
constexpr auto kMargin = std::chrono::seconds(1);
// A host that lives accepts or refuses in a round trip.
constexpr auto kKnock = std::chrono::milliseconds(500);

bool accepts(const addrinfo& address) {
  const FileDescriptor knock(::socket(
      address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol));
  if (knock.get() < 0) return false;
  if (::connect(knock.get(), address.ai_addr, address.ai_addrlen) == 0) return true;
  if (errno != EINPROGRESS) return false;
  pollfd writable{knock.get(), POLLOUT, 0};
  int error = 0;
  socklen_t length = sizeof(error);
  return ::poll(&writable, 1, static_cast<int>(kKnock.count())) == 1 &&
         ::getsockopt(knock.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
}

}  // namespace

std::optional<std::string> ask_within(std::chrono::milliseconds limit,
                                      std::function<std::string()> ask) {
  std::packaged_task<std::string()> task(std::move(ask));
  std::future<std::string> answer = task.get_future();
  std::thread([task = std::move(task)]() mutable {
    const BrokenPipeScope scope;
    task();
  }).detach();
  if (answer.wait_for(limit) != std::future_status::ready) return std::nullopt;
  try {
    return answer.get();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::optional<std::string> read_key(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::string& key, std::chrono::milliseconds limit) {
  return ask_within(limit + kMargin, [store, key, limit] {
    store->wait({key}, limit);
    const std::vector<uint8_t> bytes = store->get(key);
    return std::string(bytes.begin(), bytes.end());
  });
}

bool accepts_connections(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    if (accepts(*address)) return true;
  }
  return false;
}

bool is_served(const c10::intrusive_ptr<c10d::Store>& store) {
  auto innermost = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    innermost = prefixed->getUnderlyingNonPrefixStore();
  }
  const auto* over_tcp = dynamic_cast<c10d::TCPStore*>(innermost.get());
  return over_tcp == nullptr || accepts_connections(over_tcp->getHost(), over_tcp->getPort());
}

void write_key(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

}  // namespace zeropage::comm::detail
