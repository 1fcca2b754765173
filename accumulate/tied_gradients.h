// The gradient of a weight that two stages of a pipeline use: the sum of theirs.
//
// Each has the weight in a page of its own, so both have the same shards, and send each other what they own of its
// gradient. A sum of two does not depend on its order, so both have the same bits, and make the same update.
//
// Cost: a message of the owned part to the other, once a step, and one of a byte for each tied weight.
#pragma once

#include "zero/gradients/step_gradients.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::accumulate {

// A weight of which neither has a gradient, as a frozen one, is left alone.
// REQUIRES: the gradients are ready for a step. Throws on both where one of the stages alone has a gradient of the weight.
// Collective.
void add_tied_gradients(const zero::ParameterPages& pages, zero::StepGradients& gradients);

}  // namespace zeropage::accumulate
