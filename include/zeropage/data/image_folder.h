// Images in a folder with a folder a class: root/tools/hammer.png. In memory, or read whenever they are used.
//
//   ImageFolder images("datasets/clipart", {.short_side = 72});
//   for (const auto& skipped : images.skipped()) std::cerr << skipped << '\n';
//
// Classes are the folders of the root in the order of their names; images of a class are all PNG and JPEG files below its folder, in
// the order of their paths. Links to images and to classes' folders are followed; a link to an image that is a sample of the class already is
// none. The samples are the same on every machine and with any number of threads. What looks like an image and is none of the samples
// (other formats, links that lead nowhere) is named in skipped().
//
// In memory, a file that cannot be read is named in skipped() and is no sample. All files are read once, when the object is made: the 6,465
// PNGs of scripts/get_data.sh clipart take some 40 s on two cores. Memory: 3 bytes a pixel.
// With ImagesIn::kFiles nothing is read before it is used, and nothing is kept: 100 bytes a sample. Which files are broken is then not
// known, so image() throws and names one.
// Threads: constant after construction. Throws c10::Error where the root is missing, has fewer than two classes, or has a class without
// an image that can be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zeropage/data/image_file.h"

namespace zeropage::data {

enum class ImagesIn : uint8_t { kMemory, kFiles };

struct ImageFolderOptions {
  ImagesIn images_in = ImagesIn::kMemory;
  // Larger images are made smaller, until the shorter side has so many pixels (bilinear, antialiased).
  int64_t short_side = 256;
  int64_t most_pixels = kMostPixels;  // files with more are skipped
  int threads = 0;                    // that read into memory; 0: a core each
};

class ImageFolder {
 public:
  explicit ImageFolder(const std::filesystem::path& root, const ImageFolderOptions& options = {});

  int64_t size() const { return static_cast<int64_t>(samples_.size()); }
  const std::vector<std::string>& classes() const { return classes_; }
  at::Tensor image(int64_t sample) const;  // [3, height, width] uint8
  int64_t label(int64_t sample) const { return at(sample).label; }
  const std::filesystem::path& path(int64_t sample) const { return at(sample).path; }
  at::Tensor labels() const;  // [samples] int64
  // What is passed over and why, a message a file, or for all files of a class with another format.
  const std::vector<std::string>& skipped() const { return skipped_; }

 private:
  struct Sample {
    std::filesystem::path path;
    int64_t label = 0;
    at::Tensor image;  // undefined: in the file
  };

  const Sample& at(int64_t sample) const;
  void list(const std::filesystem::path& root);
  void list_class(const std::filesystem::path& root, size_t label);
  void drop_other_names(std::ptrdiff_t first);
  at::Tensor read(const Sample& sample) const;
  void read_all();
  void check_classes(const std::filesystem::path& root) const;

  const ImageFolderOptions options_;
  std::vector<std::string> classes_;
  std::vector<Sample> samples_;
  std::vector<std::string> skipped_;
};

}  // namespace zeropage::data
