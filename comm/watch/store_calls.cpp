#include "comm/watch/store_calls.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <netinet/in.h>
#include <sstream>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/detail/broken_pipe.h"
#include "comm/watch/detached_thread.h"
#include "comm/watch/short_lookups.h"

namespace zeropage::comm::detail {
namespace {

// The store's own limit comes first; ours is for when it does not come at all.
constexpr auto kMargin = std::chrono::seconds(1);

// What `store` holds; null: it is of another kind.
const c10d::TCPStore* tcp_store_below(const c10::intrusive_ptr<c10d::Store>& store) {
  auto innermost = store;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    innermost = prefixed->getUnderlyingNonPrefixStore();
  }
  return dynamic_cast<const c10d::TCPStore*>(innermost.get());
}

// Whether this descriptor is a connection to that port which the other end has closed.
bool is_closed_connection_to(uint16_t port, int fd) {
  sockaddr_in6 peer{};
  socklen_t length = sizeof(peer);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) return false;
  // The port lies at the same place in an address of either version of IP.
  if (peer.sin6_family != AF_INET6 && peer.sin6_family != AF_INET) return false;
  if (ntohs(peer.sin6_port) != port) return false;
  char byte = 0;
  const ssize_t count = ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
}

struct StoreGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

std::optional<std::string> ask_within(std::chrono::milliseconds limit,
                                      std::function<std::string()> ask, bool* store_is_gone) {
  const auto task = std::make_shared<std::packaged_task<std::string()>>(std::move(ask));
  std::future<std::string> answer = task->get_future();
  start_detached([task] {
    const BrokenPipeScope scope;
    (*task)();
  });
  if (answer.wait_for(limit) != std::future_status::ready) return std::nullopt;
  try {
    return answer.get();
  } catch (const StoreGone&) {
    if (store_is_gone != nullptr) *store_is_gone = true;
    return std::nullopt;
  } catch (const c10::DistNetworkError&) {
    if (store_is_gone != nullptr) *store_is_gone = true;
    return std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::optional<std::vector<std::string>> read_keys(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const std::vector<std::string>& keys,
                                                  std::chrono::milliseconds limit,
                                                  bool* store_is_gone, LookPauses pauses) {
  const auto texts = std::make_shared<std::vector<std::string>>();
  const auto look = [store, keys, limit, pauses, texts] {
    // The store's own wait prints a stack trace when it ends in vain.
    const auto give_up_at = std::chrono::steady_clock::now() + limit;
    auto pause = pauses.first;
    while (!store->check(keys)) {
      if (std::chrono::steady_clock::now() >= give_up_at) throw std::runtime_error(keys.front());
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, pauses.longest);
      if (pause == pauses.longest && !is_served(store)) throw StoreGone(keys.front());
    }
    if (keys.size() == 1) {
      const std::vector<uint8_t> bytes = store->get(keys.front());
      texts->emplace_back(bytes.begin(), bytes.end());
      return std::string();
    }
    for (const std::vector<uint8_t>& bytes : store->multiGet(keys)) {
      texts->emplace_back(bytes.begin(), bytes.end());
    }
    return std::string();
  };
  if (!ask_within(limit + kMargin, look, store_is_gone)) return std::nullopt;
  return std::move(*texts);
}

std::optional<std::string> read_key(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::string& key, std::chrono::milliseconds limit,
                                    bool* store_is_gone, LookPauses pauses) {
  auto texts = read_keys(store, {key}, limit, store_is_gone, pauses);
  if (!texts) return std::nullopt;
  return std::move(texts->front());
}

std::optional<bool> are_there(const c10::intrusive_ptr<c10d::Store>& store,
                              std::vector<std::string> keys, std::chrono::milliseconds limit,
                              bool* store_is_gone) {
  const auto answer = ask_within(
      limit,
      [store, keys = std::move(keys)] { return std::string(store->check(keys) ? "yes" : "no"); },
      store_is_gone);
  if (!answer) return std::nullopt;
  return answer == "yes";
}

bool is_served(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto* over_tcp = tcp_store_below(store);
  if (over_tcp == nullptr) return true;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    if (is_closed_connection_to(over_tcp->getPort(), std::stoi(entry.path().filename()))) {
      return false;
    }
  }
  return true;
}

bool is_listened_to(uint16_t port) {
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream in(table);
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      // sl local_address:port remote_address:port state ...; 0A is LISTEN.
      std::istringstream fields(line);
      std::string slot;
      std::string local;
      std::string remote;
      std::string state;
      fields >> slot >> local >> remote >> state;
      if (state != "0A") continue;
      if (std::stoul(local.substr(local.rfind(':') + 1), nullptr, 16) == port) return true;
    }
  }
  return false;
}

c10::intrusive_ptr<c10d::Store> connect_again(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto* over_tcp = tcp_store_below(store);
  const ShortLookups lookups(over_tcp != nullptr ? over_tcp->getHost() : "");
  return store->clone();
}

void write_key(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

}  // namespace zeropage::comm::detail
