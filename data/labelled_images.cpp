#include "zeropage/data/labelled_images.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include <ATen/ATen.h>

#include "zeropage/check.h"
#include "zeropage/data/csv_file.h"
#include "zeropage/data/idx_file.h"
#include "zeropage/data/random.h"

namespace zeropage::data {
namespace {

// labels: [samples] int64.
void check_labels(const std::string& file, const at::Tensor& labels, int64_t classes) {
  ZP_CHECK(labels.numel() > 0, file, ": expected samples, got none");
  const auto label = labels.accessor<int64_t, 1>();
  for (int64_t i = 0; i < labels.size(0); ++i) {
    ZP_CHECK(label[i] >= 0 && label[i] < classes, file, ": sample ", i, " has label ", label[i],
             "; expected 0 to ", classes - 1, ", as the data was opened for ", classes, " classes");
  }
}

// Whole numbers from 0 to `most`, which fp32 has exactly.
void check_whole(const std::filesystem::path& file, const at::Tensor& numbers, double most,
                 const char* what) {
  const at::Tensor wrong =
      numbers.lt(0).logical_or(numbers.gt(most)).logical_or(numbers.ne(numbers.trunc())).nonzero();
  if (wrong.size(0) == 0) return;
  const auto row = wrong[0][0].item<int64_t>(), column = wrong[0][1].item<int64_t>();
  ZP_THROW(file.string(), ", sample ", row, ": expected ", what, ", got ",
           numbers[row][column].item<double>());
}

}  // namespace

LabelledImages LabelledImages::of(const std::vector<int64_t>& samples) const {
  for (const int64_t sample : samples) {
    ZP_CHECK(sample >= 0 && sample < size(), "LabelledImages::of(): there is no sample ", sample,
             "; expected 0 to ", size() - 1);
  }
  const at::Tensor index = at::tensor(samples, at::kLong);
  return {images.index_select(0, index), labels.index_select(0, index), classes};
}

LabelledImages read_idx_images(const std::filesystem::path& images,
                               const std::filesystem::path& labels, int64_t classes) {
  at::Tensor pixels = read_idx(images);
  const at::Tensor of_each = read_idx(labels);
  ZP_CHECK(pixels.scalar_type() == at::kByte && (pixels.dim() == 3 || pixels.dim() == 4),
           images.string(), ": expected images [samples, (channels,) height, width] of bytes, got ",
           pixels.scalar_type(), " ", pixels.sizes());
  ZP_CHECK(of_each.dim() == 1 && !of_each.is_floating_point(), labels.string(),
           ": expected labels [samples] of whole numbers, got ", of_each.scalar_type(), " ",
           of_each.sizes());
  ZP_CHECK(pixels.size(0) == of_each.size(0), labels.string(), ": expected ", pixels.size(0),
           " labels, as many as ", images.string(), " has images, got ", of_each.size(0));
  if (pixels.dim() == 3) pixels = pixels.unsqueeze(1);
  const at::Tensor whole = of_each.to(at::kLong);
  check_labels(labels.string(), whole, classes);
  return {pixels, whole, classes};
}

LabelledImages read_csv_images(const std::filesystem::path& file,
                               const std::array<int64_t, 3>& sizes, int64_t classes) {
  const at::Tensor table = read_csv(file);
  const auto [channels, height, width] = sizes;
  const int64_t pixels = channels * height * width;
  ZP_CHECK(table.size(1) == pixels + 1, file.string(), ": expected lines of ", pixels + 1,
           " numbers, the ", pixels, " pixels of an image of ", channels, " x ", height, " x ",
           width, " and its label, got ", table.size(1));
  const at::Tensor values = table.narrow(1, 0, pixels), labels = table.narrow(1, pixels, 1);
  check_whole(file, values, 255, "pixels that are whole numbers from 0 to 255");
  check_whole(file, labels, 0x1p24, "a label that is a whole number");
  const at::Tensor whole = labels.squeeze(1).to(at::kLong);
  check_labels(file.string(), whole, classes);
  return {values.to(at::kByte).view({-1, channels, height, width}), whole, classes};
}

Split stratified_split(const at::Tensor& labels, int64_t held_out, uint64_t seed) {
  const int64_t samples = labels.size(0);
  ZP_CHECK(held_out >= 1 && held_out < samples, "stratified_split(): cannot hold out ", held_out,
           " of ", samples, " samples; expected 1 to ", samples - 1);
  std::map<int64_t, std::vector<int64_t>> of_class;
  const auto label = labels.accessor<int64_t, 1>();
  for (const int64_t sample : permutation(samples, seed)) of_class[label[sample]].push_back(sample);

  // Each class gives its share, rounded down; the classes that lost most by that give one more.
  std::map<int64_t, int64_t> taken;
  std::vector<std::pair<int64_t, int64_t>> lost;  // remainder, class
  int64_t left = held_out;
  for (const auto& [of, members] : of_class) {
    const int64_t product = held_out * static_cast<int64_t>(members.size());
    taken[of] = product / samples;
    left -= taken[of];
    lost.emplace_back(product % samples, of);
  }
  std::stable_sort(lost.begin(), lost.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  for (int64_t i = 0; i < left; ++i) ++taken[lost[static_cast<size_t>(i)].second];

  Split split;
  for (const auto& [of, members] : of_class) {
    const auto middle = members.begin() + taken[of];
    split.held_out.insert(split.held_out.end(), members.begin(), middle);
    split.training.insert(split.training.end(), middle, members.end());
  }
  std::sort(split.training.begin(), split.training.end());
  std::sort(split.held_out.begin(), split.held_out.end());
  return split;
}

}  // namespace zeropage::data
