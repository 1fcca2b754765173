// A pass over the validation images.
#pragma once

#include "examples/train_imagenet/image_data.h"
#include "examples/train_imagenet/trained_model.h"

namespace train_imagenet {

// Each image counts once, and the network sees batches of one size, the last one filled up with images that do not count. So the score is
// the same, to the last digit, at any number of ranks. batch: of a rank. Collective; the same on all ranks.
Score validate(TrainedModel& trained, const ImageData& images, int64_t batch,
               const zeropage::World& world);

}  // namespace train_imagenet
