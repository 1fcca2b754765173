// What carries activations and their gradients between the stages of a pipeline.
//
// Each direction between two neighbours has a communicator of its own: a communicator runs its operations one after
// the other, and a stage that sends forwards while its neighbour sends backwards would otherwise wait for itself.
// Messages of one direction arrive in the order in which they are sent. What is sent is copied from where it lies, and
// may not be changed until wait_for_sent().
//
// In a simulated world the messages are counted by the world along the pipeline itself.
//
// Cost: where stages are ranks, a rank meets each of its neighbours twice, at two threads a time.
// Lifetime: shares the world. Threads: the training thread. Collective: construction.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "pipeline/schedule/message.h"
#include "zeropage/world.h"

namespace zeropage::pipeline {

class StageLinks {
 public:
  // ranks: along the pipeline. chunks: stages a rank; with several the last rank's neighbour is the first one.
  StageLinks(const comm::World& ranks, int chunks);

  int rank_of(int stage) const { return stage % ranks_.size(); }
  // Whether the message stays on this rank.
  bool is_local(const Message& message) const;

  // tensor: any shape, on the world's device. Returns at once.
  void send(const Message& message, const at::Tensor& tensor, const std::string& what);
  // The next message from there, which has arrived when `pending` has ended. sizes and dtype: of what was sent.
  struct Arriving {
    at::Tensor tensor;
    comm::Pending pending;
  };
  Arriving receive(const Message& message, at::IntArrayRef sizes, at::ScalarType dtype,
                   const std::string& what);
  // Ends when all that this rank sent has arrived.
  void wait_for_sent();

  c10::Device device() const { return ranks_.device(); }
  // What this rank has sent.
  comm::Traffic sent() const;

 private:
  // What is sent, and the lower of the two ranks (the last one, where the last meets the first).
  using Direction = std::pair<Message::What, int>;

  struct End {
    comm::Communicator* link;
    int other;  // its rank there
  };

  Direction direction_of(const Message& message) const;
  End end_of(const Message& message) const;
  void join(int edge, Message::What what);

  // Constant after construction.
  const comm::World ranks_;
  std::map<Direction, comm::World> links_;

  // In flight.
  struct Sent {
    comm::Pending pending;
    at::Tensor buffer;
  };
  std::deque<Sent> sent_;
};

}  // namespace zeropage::pipeline
