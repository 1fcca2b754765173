#include "examples/train_imagenet/image_data.h"

#include <algorithm>
#include <numeric>

#include "data/labelled_images.h"
#include "memory/check.h"

namespace train_imagenet {
namespace {

namespace data = zeropage::data;

data::ImageFolderOptions folder_options(const Config& config, int threads) {
  return {.images_in = config.data.in_memory ? data::ImagesIn::kMemory : data::ImagesIn::kFiles,
          .short_side = config.short_side(),
          .threads = threads};
}

data::Transform augmentation(const DataKeys& keys) {
  std::vector<data::Transform> chain = {
      data::random_resized_crop(keys.image_side, {.area = {keys.least_area, 1.0}})};
  if (keys.flip) chain.push_back(data::random_flip());
  if (keys.colour_jitter > 0) {
    const double x = keys.colour_jitter;
    chain.push_back(data::colour_jitter({.brightness = x, .contrast = x, .saturation = x}));
  }
  chain.push_back(data::normalise(keys.mean, keys.deviation));
  return data::chain(std::move(chain));
}

std::vector<int64_t> counted(size_t count) {
  std::vector<int64_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), int64_t{0});
  return numbers;
}

// The numbers that `classes` have among those of training.
std::vector<int64_t> labels_among(const std::vector<std::string>& training,
                                  const std::vector<std::string>& classes,
                                  const std::string& folder) {
  std::vector<int64_t> labels;
  for (const std::string& name : classes) {
    const auto found = std::find(training.begin(), training.end(), name);
    ZP_CHECK(found != training.end(), "DATA.VALIDATION ", folder, ": has a class \"", name,
             "\" that DATA.TRAIN does not have; expected the same classes");
    labels.push_back(found - training.begin());
  }
  return labels;
}

}  // namespace

ImageData::ImageData(const Config& config, int threads)
    : images_(config.data.train, folder_options(config, threads)),
      validation_images_(config.data.validation.empty()
                             ? std::nullopt
                             : std::make_optional<data::ImageFolder>(
                                   config.data.validation, folder_options(config, threads))),
      augment_(augmentation(config.data)),
      centre_(centre(config)),
      seed_(static_cast<uint64_t>(config.train.seed)) {
  const auto known = static_cast<int64_t>(images_.classes().size());
  classes_ = config.model.classes == 0 ? known : config.model.classes;
  ZP_CHECK(classes_ >= known, "MODEL.CLASSES ", classes_, ": DATA.TRAIN ", config.data.train,
           " has ", known, " classes, so labels up to ", known - 1, "; give at least ", known,
           ", or 0 for as many as the data has");
  choose_samples(config);
}

data::Transform ImageData::centre(const Config& config) {
  return data::chain({data::resize(config.short_side()), data::centre_crop(config.data.image_side),
                      data::normalise(config.data.mean, config.data.deviation)});
}

void ImageData::choose_samples(const Config& config) {
  training_ = {&images_, counted(static_cast<size_t>(images_.size())),
               counted(images_.classes().size())};
  if (validation_images_) {
    validation_ = {
        &*validation_images_, counted(static_cast<size_t>(validation_images_->size())),
        labels_among(images_.classes(), validation_images_->classes(), config.data.validation)};
  } else {
    const int64_t held_out = config.data.held_out;
    ZP_CHECK(held_out < images_.size(), "DATA.HELD_OUT ", held_out, ": DATA.TRAIN ",
             config.data.train, " has ", images_.size(),
             " samples, of which some must be left to train on");
    const data::Split split = data::stratified_split(images_.labels(), held_out, seed_);
    validation_ = {&images_, split.held_out, training_.labels};
    training_.samples = split.training;
  }
  ZP_CHECK(training_.size() >= config.train.batch, "TRAIN.BATCH ", config.train.batch,
           ": there are ", training_.size(),
           " samples to train on, so no step could be made; give a smaller one");
}

std::vector<std::string> ImageData::skipped() const {
  std::vector<std::string> messages = images_.skipped();
  if (validation_images_) {
    const auto& more = validation_images_->skipped();
    messages.insert(messages.end(), more.begin(), more.end());
  }
  return messages;
}

ImageData::Batch ImageData::batch_of(const ImageSubset& subset, const data::Transform& transform,
                                     const std::vector<int64_t>& samples, int64_t epoch) const {
  std::vector<torch::Tensor> images;
  torch::Tensor labels = torch::empty({static_cast<int64_t>(samples.size())}, torch::kLong);
  for (size_t i = 0; i < samples.size(); ++i) {
    const int64_t sample = subset.samples.at(static_cast<size_t>(samples[i]));
    images.push_back(
        transform(subset.folder->image(sample), data::SampleRandom(seed_, epoch, sample)));
    labels[static_cast<int64_t>(i)] =
        subset.labels.at(static_cast<size_t>(subset.folder->label(sample)));
  }
  return {torch::stack(images), labels};
}

ImageData::Batch ImageData::training_batch(const std::vector<int64_t>& samples,
                                           int64_t epoch) const {
  return batch_of(training_, augment_, samples, epoch);
}

ImageData::Batch ImageData::validation_batch(const std::vector<int64_t>& samples) const {
  return batch_of(validation_, centre_, samples, 0);
}

}  // namespace train_imagenet
