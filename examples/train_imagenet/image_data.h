// The images of a run: which are for training and which for validation, and batches of them as the network sees them.
//
// Threads: constant after construction, so any number may make batches. Throws c10::Error: which folder or key, what was expected, what is
// there.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <zeropage/data/image_folder.h>
#include <zeropage/data/prefetching_loader.h>
#include <zeropage/data/random.h>
#include <zeropage/data/transforms.h>

#include "train_imagenet/config.h"

namespace train_imagenet {

// The files that a rank could not read as it used them: each is told on stderr once, and counted.
// Threads: any.
class BrokenFiles {
 public:
  explicit BrokenFiles(int64_t most) : most_(most) {}

  // why: names the file. Throws where there are more than `most`.
  void add(const std::string& why);
  int64_t count() const;

 private:
  const int64_t most_;
  mutable std::mutex mutex_;
  std::set<std::string> told_;
};

// Some images of a folder.
struct ImageSubset {
  const zeropage::data::ImageFolder* folder = nullptr;
  std::vector<int64_t> samples;  // of the folder
  std::vector<int64_t> labels;   // of the folder's classes -> the network's

  int64_t size() const { return static_cast<int64_t>(samples.size()); }
};

class ImageData {
 public:
  using Batch = zeropage::data::PrefetchingLoader::Batch;

  // Reads all images, unless they stay in their files. threads: that read them.
  ImageData(const Config& config, int threads);

  // Number of the network's classes: those of the data, or more.
  int64_t classes() const { return classes_; }
  const std::vector<std::string>& class_names() const { return images_.classes(); }
  const ImageSubset& training() const { return training_; }
  const ImageSubset& validation() const { return validation_; }
  // Files that could not be read when they were used.
  int64_t broken_files() const { return broken_.count(); }
  // What resuming compares, by name: the classes, and a hash of the files that are trained on and validated.
  std::map<std::string, std::string> lists() const;
  // Messages of files that could not be read.
  std::vector<std::string> skipped() const;

  // What the network sees of an image in a validation.
  static zeropage::data::Transform centre(const Config& config);

  // samples: numbers within the subset. {[batch, 3, side, side] fp32, [batch] int64}
  // What cannot be read is replaced: in training by the next sample that can be, in a validation by a black
  // image of label -1.
  Batch training_batch(const std::vector<int64_t>& samples, int64_t epoch) const;
  Batch validation_batch(const std::vector<int64_t>& samples) const;

 private:
  void choose_samples(const Config& config);
  // Undefined where the file cannot be read.
  torch::Tensor image_of(const ImageSubset& subset, const zeropage::data::Transform& transform,
                         const zeropage::data::SampleRandom& random, int64_t sample) const;

  const zeropage::data::ImageFolder images_;
  const std::optional<zeropage::data::ImageFolder> validation_images_;
  const zeropage::data::Transform augment_, centre_;
  const std::string train_folder_, validation_folder_;
  const int64_t image_side_;
  const uint64_t seed_;
  int64_t classes_ = 0;
  ImageSubset training_, validation_;
  mutable BrokenFiles broken_;
};

}  // namespace train_imagenet
