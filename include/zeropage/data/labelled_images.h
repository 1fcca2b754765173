// Small images of one size with their labels, in memory, and how they are divided for training and evaluation.
//
//   auto images = data::read_csv_images("mnist_5k.csv.gz", {1, 28, 28});
//   auto split = data::stratified_split(images.labels, 1000, /*seed=*/1);
//   auto training = images.of(split.training), held_out = images.of(split.held_out);
//
// Threads: constant after construction. Throws c10::Error that names the file, and the sample where it is one's.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <vector>

#include <ATen/core/TensorBody.h>

namespace zeropage::data {

struct LabelledImages {
  at::Tensor images = {};  // [samples, channels, height, width] uint8
  at::Tensor labels = {};  // [samples] int64, each in [0, classes)
  int64_t classes = 0;

  int64_t size() const { return labels.size(0); }
  // Copies of those samples, in their order. Throws for one that there is not.
  LabelledImages of(const std::vector<int64_t>& samples) const;
};

// Two IDX files: images [samples, height, width] or [samples, channels, height, width] of uint8, and as many
// labels. classes: as many as the user's model has; throws for a label beyond them.
LabelledImages read_idx_images(const std::filesystem::path& images,
                               const std::filesystem::path& labels, int64_t classes = 10);

// A line a sample: its pixels from 0 to 255, row by row, and its label last.
// sizes: channels, height, width.
LabelledImages read_csv_images(const std::filesystem::path& file,
                               const std::array<int64_t, 3>& sizes, int64_t classes = 10);

struct Split {
  std::vector<int64_t> training = {};  // in ascending order, as the others
  std::vector<int64_t> held_out = {};
};

// Holds out so many samples, in proportion to the classes to within one sample (largest remainders), chosen by the
// seed. labels: [samples] int64. Throws if nothing would be left on either side.
Split stratified_split(const at::Tensor& labels, int64_t held_out, uint64_t seed);

}  // namespace zeropage::data
