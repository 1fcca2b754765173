// Whether lists of actions can be run at all.
#pragma once

#include "zeropage/schedule.h"

namespace zeropage::pipeline {

// Throws std::invalid_argument, and names the rank and the action,
// * unless every rank does the forward of each micro-batch through each of its chunks once, and after it the backward, or the gradient
//   of the inputs and then that of the weights;
// * unless the ranks come to the end: a rank waits for a message until it was sent, and sends without waiting. The error says who
//   waits for what, around the circle;
// * unless each rank receives the messages of one kind from another rank in the order in which they are sent.
void check_order(const parallel::ActionLists& lists);

}  // namespace zeropage::pipeline
