// The metrics of a run as a picture.
#pragma once

#include <string>

namespace train_imagenet {

// metrics: the lines of metrics.jsonl. An SVG: the loss, and the share of images named rightly, each over epochs.
std::string curves(const std::string& metrics);

}  // namespace train_imagenet
