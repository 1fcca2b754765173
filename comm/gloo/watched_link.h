// Messages between all ranks, with a watch over who waits in vain and the whole account of who fails.
//
// A rank that fails writes the reason to the store for the others, reads theirs, and ends with one
// error that has both; the rank that serves the store lets the others ask before it ends.
//
// Threads: perform() and what it calls on the thread that performs the operations; abort() and
// lost_peers() from any. Owns the watch's thread.
// Throws: perform() c10::Error with the call and who is to blame, or what the body throws.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/detail/call.h"
#include "comm/detail/peer_error.h"
#include "comm/gloo/gloo_link.h"
#include "comm/watch/failure_reason.h"
#include "comm/watch/watch.h"
#include "zeropage/check.h"

namespace zeropage::comm::detail {

class WatchedLink {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;  // ranks meet here; keys are prefixed by the caller
    // The same keys, for what waits behind no other call: accounts of failures. Null: store.
    c10::intrusive_ptr<c10d::Store> watched_store = nullptr;
    int rank = 0;
    int size = 1;
    // This host's name or address as its peers reach it.
    std::string bind_address = "127.0.0.1";
    // The rank whose process serves the store; -1: none of them.
    int store_server = -1;
    // What it is called, also where it is none of these ranks; -1: no rank of the world serves the store.
    int store_server_name = -1;
    RankNames names;
    // How long connecting may take.
    std::chrono::milliseconds deadline = std::chrono::seconds(60);
    // Decides how long an operation waits for a peer; not started. Null: one of its own, with that
    // deadline.
    std::shared_ptr<Watch> watch;
    std::vector<std::string> hosts;                 // by rank; none: not known
    std::function<std::string(int rank)> state_of;  // of a rank's process, for errors
    // What else the operations wait in, if anything. Ends it, and all later waits, with a PeerError
    // of an abort.
    std::function<void()> abort_others = [] {};
    // Told what this rank fails with, before it is thrown.
    std::function<void(const FailureReason& account)> on_failure = [](const FailureReason&) {};
  };

  // Connects to all peers; throws if one does not come within the deadline.
  explicit WatchedLink(Options options);
  ~WatchedLink() { watch_->stop(); }

  const std::shared_ptr<Watch>& watch() const { return watch_; }
  GlooLink& messages() { return link_; }

  // Does `body`, which waits in messages() or in what abort_others() ends.
  template <typename Body>
  void perform(const Call& call, const Body& body) {
    try {
      watch_->activity().perform(call, body);
    } catch (const PeerError& error) {
      fail(call, error);
    } catch (const std::exception& error) {
      const FailureReason ours{memory::message_of(error), call.describe()};
      options_.on_failure(ours);
      watch_->fail_group(ours);
      throw;
    }
  }

  // Ends what waits, and all later waits, with an error. For destruction.
  void abort();
  // Those whose connection has broken.
  std::vector<int> lost_peers() { return link_.lost_peers(); }

 private:
  [[noreturn]] void fail(const Call& call, const PeerError& error);
  [[noreturn]] void fail_without(int peer, const Call& call, const std::string& reason);
  [[noreturn]] void fail_late(const Call& call, int peer, const std::string& reason);
  std::optional<FailureReason> failure_of(int peer, const FailureReason& ours,
                                          std::chrono::seconds patience) const;
  [[noreturn]] void part(const FailureReason& ours, int silent);
  [[noreturn]] void end(const FailureReason& ours) const;
  void leave_for_others(const FailureReason& account) const;

  // Constant after construction.
  const Options options_;
  const c10::intrusive_ptr<c10d::Store> store_;  // the watched one

  GlooLink link_;
  const std::shared_ptr<Watch> watch_;  // its thread uses everything above
};

}  // namespace zeropage::comm::detail
