// A pass over the validation images.
#pragma once

#include "train_imagenet/image_data.h"
#include "train_imagenet/trained_model.h"

namespace train_imagenet {

// Each image counts once. The network sees the same batches at any number of ranks, of one size: the last one is filled up with images
// that do not count. So the score is the same, to the last digit, at any number of ranks. Collective; the same on all ranks.
Score validate(TrainedModel& trained, const ImageData& images, int64_t batch,
               const zeropage::World& world);

}  // namespace train_imagenet
