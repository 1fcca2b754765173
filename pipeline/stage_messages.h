// Activations and gradients between the stages of a pipeline, whatever their shape.
//
// The first activation over a boundary in a step goes behind a header with its sizes and dtype, 88 bytes. The others of
// the step must be like it, and so are the gradients.
//
// A stage that fails sends nothing in place of all that it would have sent in the step, so that no other waits for it, and
// messages still come in pairs: a header that says so, and where a header was sent before a tensor of numbers that no
// computation gives. On an accelerator these are not looked at, since the host would wait for them: there they are
// taken for values.
//
// Lifetime: shares the world. Threads: the training thread.
// Throws for what cannot be sent, and names the stage and the micro-batch.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "pipeline/stage_links.h"

namespace zeropage::pipeline {

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
  // Undefined: the stage has failed, and sent nothing.
  at::Tensor receive(const Message& message);
  // What a stage that has failed does in the places of send() and receive().
  void send_nothing(const Message& message);
  void discard(const Message& message);
  // Begins to receive what receive() will be asked for next from there, if its shape is known.
  void receive_ahead(const Message& message);
  // Ends when all that was sent has arrived; the next step may have other shapes.
  void end_step();

  comm::Traffic sent() const { return links_.sent(); }

 private:
  void check_can_be_sent(const Message& message, const at::Tensor& tensor) const;
  void agree_on_shape(const Message& message, const at::Tensor& tensor);
  void learn_shape(const Message& message);
  // Whether neither values nor gradients pass there any more in this step.
  bool is_closed(int boundary) const;

  StageLinks links_;
  std::optional<Shape> expected_;
  std::map<int, Shape> shapes_;              // in this step, by boundary
  std::map<Message, at::Tensor> stay_here_;  // between two stages of this rank
  std::map<Message, StageLinks::Arriving> ahead_;
};

}  // namespace zeropage::pipeline
