// What passes between the stages of a pipeline: an activation forwards, its gradient backwards. Two actions belong together when one
// sends the message that the other receives.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>

#include "zeropage/schedule.h"

namespace zeropage::pipeline {

struct Message {
  enum class What : uint8_t { kActivation, kGradient };

  What what = What::kActivation;
  int boundary = 0;  // between stages `boundary` and `boundary` + 1
  int micro_batch = 0;

  int sending_stage() const { return what == What::kActivation ? boundary : boundary + 1; }
  int receiving_stage() const { return what == What::kActivation ? boundary + 1 : boundary; }
  // The ranks that have these stages.
  int sender(const parallel::ActionLists& lists) const { return sending_stage() % lists.ranks(); }
  int receiver(const parallel::ActionLists& lists) const {
    return receiving_stage() % lists.ranks();
  }

  friend auto operator<=>(const Message&, const Message&) = default;
};

// What the action of that rank waits for, and what it sends when it ends. The first stage receives no activation, the last no
// gradient, and a weight gradient neither receives nor sends. Where a rank has both stages (a pipeline of one), the message does not
// leave it.
std::optional<Message> received_by(const parallel::ActionLists& lists, int rank,
                                   const parallel::Action& action);
std::optional<Message> sent_by(const parallel::ActionLists& lists, int rank,
                               const parallel::Action& action);

}  // namespace zeropage::pipeline
