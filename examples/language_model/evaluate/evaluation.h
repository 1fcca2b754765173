// The loss of a model on a text.
#pragma once

#include <cstdint>
#include <vector>

#include "language_model/data/rows.h"
#include "language_model/model/wrapped_model.h"

namespace language_model {

struct TextLoss {
  double loss = 0;     // mean over the predicted tokens, in nats
  int64_t tokens = 0;  // that were predicted
  double perplexity() const;
};

// The loss of each token from the second on, predicted from those before it in its window. Windows of `window` tokens follow each other and
// overlap in one; the ranks share them. tokens: the same on all ranks, two or more. window: from 2 to longest_sequence(); it
// predicts one token less than it has.
// batch: windows of one forward. Throws for tokens of another vocabulary. Collective. Threads: the training thread.
TextLoss evaluate(WrappedModel& model, const std::vector<int32_t>& tokens, int64_t window,
                  int64_t batch = 1);

// The mean over all targets of these rows, which the ranks share. batch: rows of one forward. NaN where there is no target.
// Collective. Threads: the training thread.
TextLoss evaluate(WrappedModel& model, const TrainingRows& rows, int64_t batch = 1);

}  // namespace language_model
