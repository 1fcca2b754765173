#include "pipeline/schedule/message.h"

namespace zeropage::pipeline {
namespace {

// Over the boundary below or above a stage; none at the ends of the model.
std::optional<Message> over_boundary(const parallel::ActionLists& lists, Message::What what,
                                     int boundary, int micro_batch) {
  if (boundary < 0 || boundary + 1 >= lists.stages()) return std::nullopt;
  return Message{what, boundary, micro_batch};
}

}  // namespace

std::optional<Message> received_by(const parallel::ActionLists& lists, int rank,
                                   const parallel::Action& action) {
  const int stage = lists.stage(rank, action.chunk);
  switch (action.kind) {
    case parallel::ActionKind::kForward:
      return over_boundary(lists, Message::What::kActivation, stage - 1, action.micro_batch);
    case parallel::ActionKind::kBackward:
    case parallel::ActionKind::kInputGradient:
      return over_boundary(lists, Message::What::kGradient, stage, action.micro_batch);
    case parallel::ActionKind::kWeightGradient:
      break;
  }
  return std::nullopt;
}

std::optional<Message> sent_by(const parallel::ActionLists& lists, int rank,
                               const parallel::Action& action) {
  const int stage = lists.stage(rank, action.chunk);
  switch (action.kind) {
    case parallel::ActionKind::kForward:
      return over_boundary(lists, Message::What::kActivation, stage, action.micro_batch);
    case parallel::ActionKind::kBackward:
    case parallel::ActionKind::kInputGradient:
      return over_boundary(lists, Message::What::kGradient, stage - 1, action.micro_batch);
    case parallel::ActionKind::kWeightGradient:
      break;
  }
  return std::nullopt;
}

}  // namespace zeropage::pipeline
