// How the learning rate runs over a training. It depends on the epochs made alone, so a run that goes on at another batch or number of
// ranks is where it was.
#pragma once

#include "train_imagenet/config.h"

namespace train_imagenet {

// The highest rate: scaled with the batch.
double base_rate(const Config& config);

// epochs: made so far, with the part of the present one.
double rate_at(const Config& config, double epochs);

}  // namespace train_imagenet
