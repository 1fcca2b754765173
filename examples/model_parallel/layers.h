// ResNet-50 as a list of layers, which a pipeline cuts: the stem, each block, the head.
#pragma once

#include <zeropage/pipeline.h>

#include "image_models/resnet.h"

namespace model_parallel {

zeropage::PipelineLayers layers_of(image_models::ResNet& net);

}  // namespace model_parallel
