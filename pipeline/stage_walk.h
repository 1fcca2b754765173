// Passes over a rank's actions of a schedule, with the messages between stages. Where a rank fails, all ranks of the
// pipeline end the pass together, and each says what failed where.
//
// A rank that fails goes on with its messages alone: it receives what the others send, and sends nothing in the places
// of what it would have sent (pipeline/stage_messages.h). So no rank waits for it, the others hear of it with the next
// message from there, and no message is under way when the pass has ended. The ranks may go on, if their script does.
// Where ranks are lost, or out of step, that cannot be, and the error is the communicator's.
//
// Where the mesh has more ranks than the pipeline, they wait for the rank that fails in other places, and ranks of the
// pipeline may wait for them. So the rank waits for nobody: it fails in all of its worlds (comm/failure.h), all ranks of
// the mesh end with its words, and none can go on.
//
// Cost: a message of a byte between all ranks of the pipeline at the end of each pass, which the host waits for.
// Lifetime: shares the ranks; the lists outlive it. Threads: the training thread. Collective: construction, run().
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "pipeline/schedule/message.h"
#include "pipeline/stage_messages.h"
#include "zeropage/schedule.h"
#include "zeropage/world.h"

namespace zeropage::pipeline {

class StageWalk {
 public:
  // all_ranks: of the mesh.
  StageWalk(const comm::World& ranks, const comm::World& all_ranks,
            const parallel::ActionLists& lists);

  struct Pass {
    const std::vector<parallel::Action>& actions;
    std::function<void()> begin;  // before the first one
    std::function<void(const parallel::Action&)> perform;
    // What holds where the pass has failed and all ranks know it: the end of their errors.
    std::string advice;
  };
  // Calls pass.perform for each action in order. Throws on all ranks where one of them throws.
  void run(const Pass& pass);
  // Whether a pass has ended on some ranks alone. No other can follow.
  bool is_broken() const { return is_broken_; }

  // For `perform`. What the action waits for; throws where the other stage has failed.
  at::Tensor received(const parallel::Action& action);
  // To whom waits for what the action makes.
  void send(const parallel::Action& action, const at::Tensor& tensor);
  bool sends(const parallel::Action& action) const;
  // Begins to receive what the action waits for, beside one before it.
  void receive_ahead_of(const parallel::Action& action);

  // When the action's message was there, or the action begun, in seconds of the host's clock.
  double begun_s() const { return begun_s_; }
  static double now_s();
  StageMessages& messages() { return messages_; }
  const StageMessages& messages() const { return messages_; }

 private:
  std::string at_action(const Pass& pass, size_t index) const;
  void pass_by(const Pass& pass, size_t from);
  std::vector<std::string> told(const std::string& own) const;
  [[noreturn]] void fail(const Pass& pass, size_t index, const std::string& own,
                         const std::vector<std::string>& by_rank) const;

  // Constant after construction.
  const comm::World ranks_;
  const comm::World all_ranks_;
  const parallel::ActionLists& lists_;

  StageMessages messages_;
  // In this pass.
  std::optional<Message> last_received_;
  std::optional<Message> last_sent_;
  double begun_s_ = 0;
  bool is_broken_ = false;  // while a pass runs, too
};

}  // namespace zeropage::pipeline
