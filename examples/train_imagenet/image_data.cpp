#include "train_imagenet/image_data.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include <zeropage/check.h>
#include <zeropage/data/labelled_images.h>

#include "weights_hash/weights_hash.h"

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

// SHA-256 of the samples' paths below the folder, in their order.
std::string hash_of(const ImageSubset& subset, const std::string& folder) {
  std::string names;
  for (const int64_t sample : subset.samples) {
    names += subset.folder->path(sample).lexically_relative(folder).string() + '\n';
  }
  train_gpt::WeightsHash hash;
  hash.add(torch::from_blob(names.data(), {static_cast<int64_t>(names.size())}, torch::kByte));
  return hash.hex();
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
      train_folder_(config.data.train),
      validation_folder_(config.data.validation),
      image_side_(config.data.image_side),
      seed_(static_cast<uint64_t>(config.train.seed)),
      broken_(config.data.most_broken_files) {
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

torch::Tensor ImageData::image_of(const ImageSubset& subset, const data::Transform& transform,
                                  const data::SampleRandom& random, int64_t sample) const {
  torch::Tensor pixels;
  try {
    pixels = subset.folder->image(sample);
  } catch (const c10::Error& error) {
    broken_.add(zeropage::memory::message_of(error));
    return {};
  }
  return transform(pixels, random);
}

ImageData::Batch ImageData::training_batch(const std::vector<int64_t>& samples,
                                           int64_t epoch) const {
  std::vector<torch::Tensor> images;
  torch::Tensor labels = torch::empty({static_cast<int64_t>(samples.size())}, torch::kLong);
  for (size_t i = 0; i < samples.size(); ++i) {
    torch::Tensor image;
    for (int64_t next = samples[i]; !image.defined(); next = (next + 1) % training_.size()) {
      const int64_t sample = training_.samples.at(static_cast<size_t>(next));
      image = image_of(training_, augment_, data::SampleRandom(seed_, epoch, sample), sample);
      labels[static_cast<int64_t>(i)] =
          training_.labels.at(static_cast<size_t>(training_.folder->label(sample)));
    }
    images.push_back(image);
  }
  return {torch::stack(images), labels};
}

ImageData::Batch ImageData::validation_batch(const std::vector<int64_t>& samples) const {
  std::vector<torch::Tensor> images;
  torch::Tensor labels = torch::empty({static_cast<int64_t>(samples.size())}, torch::kLong);
  for (size_t i = 0; i < samples.size(); ++i) {
    const int64_t sample = validation_.samples.at(static_cast<size_t>(samples[i]));
    torch::Tensor image =
        image_of(validation_, centre_, data::SampleRandom(seed_, 0, sample), sample);
    const bool is_read = image.defined();
    if (!is_read) image = torch::zeros({3, image_side_, image_side_});
    images.push_back(image);
    labels[static_cast<int64_t>(i)] =
        is_read ? validation_.labels.at(static_cast<size_t>(validation_.folder->label(sample)))
                : -1;
  }
  return {torch::stack(images), labels};
}

std::map<std::string, std::string> ImageData::lists() const {
  std::string classes;
  for (const std::string& name : class_names()) classes += (classes.empty() ? "" : ", ") + name;
  return {{"classes", classes},
          {"training", hash_of(training_, train_folder_)},
          {"validation",
           hash_of(validation_, validation_images_ ? validation_folder_ : train_folder_)}};
}

void BrokenFiles::add(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!told_.insert(why).second) return;
  std::fprintf(stderr, "skipped %s\n", why.c_str());
  ZP_CHECK(static_cast<int64_t>(told_.size()) <= most_, "DATA.MOST_BROKEN_FILES ", most_, ": ",
           told_.size(), " files of this rank cannot be read, the last: ", why,
           "; mend or remove them, or allow more");
}

int64_t BrokenFiles::count() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(told_.size());
}

}  // namespace train_imagenet
