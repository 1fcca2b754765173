// Activations and gradients between the stages of a pipeline, whatever their shape.
//
// The first activation over a boundary in a step goes behind a header with its sizes and dtype, 88 bytes. The others of
// the step must be like it, and so are the gradients.
//
// Lifetime: shares the world. Threads: the training thread.
// Throws for what cannot be sent, and names the stage and the micro-batch.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "parallel/stage_links.h"

namespace zeropage::parallel {

class StageMessages {
 public:
  struct Shape {
    std::vector<int64_t> sizes;
    at::ScalarType dtype = at::kFloat;

    friend bool operator==(const Shape&, const Shape&) = default;
    std::string describe() const;
  };

  // Collective.
  StageMessages(const comm::World& ranks, int chunks) : links_(ranks, chunks) {}

  // What is to pass each boundary, where no header can say it, as in a simulated world.
  void expect(const Shape& shape) { expected_ = shape; }
  bool are_counted_only() const { return links_.device().is_meta(); }

  // Returns at once.
  void send(const Message& message, const at::Tensor& tensor);
  at::Tensor receive(const Message& message);
  // Begins to receive what receive() will be asked for next from there, if its shape is known.
  void receive_ahead(const Message& message);
  // Ends when all that was sent has arrived; the next step may have other shapes.
  void end_step();

  comm::Traffic sent() const { return links_.sent(); }

 private:
  void check_can_be_sent(const Message& message, const at::Tensor& tensor) const;
  void agree_on_shape(const Message& message, const at::Tensor& tensor);
  void learn_shape(const Message& message);

  StageLinks links_;
  std::optional<Shape> expected_;
  std::map<int, Shape> shapes_;              // in this step, by boundary
  std::map<Message, at::Tensor> stay_here_;  // between two stages of this rank
  std::map<Message, StageLinks::Arriving> ahead_;
};

}  // namespace zeropage::parallel
