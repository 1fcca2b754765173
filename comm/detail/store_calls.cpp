#include "comm/detail/store_calls.h"

#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "comm/detail/broken_pipe.h"

namespace zeropage::comm::detail {
namespace {

// The store's own limit comes first; ours is for when it does not come at all.
constexpr auto kMargin = std::chrono::seconds(1);

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

void write_key(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

}  // namespace zeropage::comm::detail
