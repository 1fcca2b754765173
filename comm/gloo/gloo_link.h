// Point-to-point messages over c10d's Gloo, with errors that name the peer.
//
// The only user of ProcessGroupGloo. Messages between two ranks match by tag; ours carry the
// operation and its size in the tag, so that ranks which went out of step never take each other's
// bytes for their own.
//
// Threads: one thread exchanges; abort() and lost_peers() may come from another.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/detail/peer_error.h"

namespace zeropage::comm::detail {

class GlooLink {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int size = 1;
    std::string bind_address;            // of this host, as the peers reach it
    std::chrono::milliseconds deadline;  // of connecting
    std::chrono::milliseconds
        longest_wait;  // of an exchange: the last resort, who waits is interrupted
  };
  // Connects to every peer. Throws if one does not come within the deadline.
  explicit GlooLink(const Options& options);
  ~GlooLink();

  // The messages of one operation. wait_* throw PeerError after `longest_wait` from the
  // exchange's start.
  class Exchange {
   public:
    explicit Exchange(GlooLink& link);
    ~Exchange();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    // tensor: contiguous, alive until waited for. Both return a ticket to wait with.
    size_t send(const at::Tensor& tensor, int peer, uint64_t tag);
    size_t recv(const at::Tensor& tensor, int peer, uint64_t tag);
    void wait_send(size_t ticket);
    void wait_recv(size_t ticket);
    void wait_sends();

   private:
    struct Message;
    struct State;
    void wait(Message& message);

    GlooLink& link_;
    std::unique_ptr<State> state_;
    const std::chrono::steady_clock::time_point give_up_at_;
  };

  // Ends the exchange in progress, and all later ones, with an error. For destruction.
  void abort();
  // Lets go of all connections, so that the peers notice. No exchange may be in progress.
  void close();
  // Those whose connection has broken.
  std::vector<int> lost_peers();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeropage::comm::detail
