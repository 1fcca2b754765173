// Calls to the store that give up.
//
// c10d's TCPStore waits without a limit for some answers, so a stopped host of the store would hang
// who asks. Here a call runs on a thread of its own; one that does not come back is left behind
// with what it holds.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace zeropage::comm::detail {

// What `ask` returns; nothing if it throws or takes longer. `ask` must own all that it uses.
// store_is_gone: becomes true where the connection to the store broke.
std::optional<std::string> ask_within(std::chrono::milliseconds limit,
                                      std::function<std::string()> ask,
                                      bool* store_is_gone = nullptr);

// Between two looks for keys that are not there yet: from the first on twice as long each time, up to the longest.
struct LookPauses {
  std::chrono::microseconds first{100};
  std::chrono::microseconds longest{102'400};
};

// The text under `key` once it is there; nothing if it does not come within `limit`.
std::optional<std::string> read_key(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::string& key, std::chrono::milliseconds limit,
                                    bool* store_is_gone = nullptr, LookPauses pauses = {});

// The texts under `keys` once all are there; nothing if one does not come within `limit`. A few requests, however many keys.
std::optional<std::vector<std::string>> read_keys(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const std::vector<std::string>& keys,
                                                  std::chrono::milliseconds limit,
                                                  bool* store_is_gone = nullptr,
                                                  LookPauses pauses = {});

// Whether all of the keys are there; nothing if the store does not say within `limit`.
std::optional<bool> are_there(const c10::intrusive_ptr<c10d::Store>& store,
                              std::vector<std::string> keys, std::chrono::milliseconds limit,
                              bool* store_is_gone = nullptr);

// Whether something of this host listens at that port. Asked of the kernel: c10d's store looks up
// the name of whoever knocks, which takes seconds where no name service answers.
bool is_listened_to(uint16_t port);

// Whether the connections of this process to the store still stand. A call to a store that is gone
// throws, but c10d prints a stack trace before; a knock at its port would make it look up our name,
// for seconds where nobody answers such questions.
bool is_served(const c10::intrusive_ptr<c10d::Store>& store);

// Another connection to that store, under the same keys.
c10::intrusive_ptr<c10d::Store> connect_again(const c10::intrusive_ptr<c10d::Store>& store);

void write_key(c10d::Store& store, const std::string& key, const std::string& text);

}  // namespace zeropage::comm::detail
