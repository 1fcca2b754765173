#include "zeropage/data/image_folder.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <map>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "zeropage/check.h"
#include "zeropage/data/transforms.h"
#include "zeropage/ledger.h"

namespace zeropage::data {
namespace {

namespace fs = std::filesystem;

std::string ending_of(const fs::path& file) {
  std::string ending = file.extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  return ending;
}

bool is_read(const std::string& ending) {
  return ending == ".png" || ending == ".jpg" || ending == ".jpeg";
}

// Images that are not read: to pass over them without a word would train on a part of the data.
bool is_other_image(const std::string& ending) {
  constexpr std::array kEndings = {".bmp", ".gif",  ".webp", ".tif",  ".tiff",
                                   ".ppm", ".jfif", ".jp2",  ".heic", ".avif"};
  return std::find(kEndings.begin(), kEndings.end(), ending) != kEndings.end();
}

}  // namespace

ImageFolder::ImageFolder(const fs::path& root, const ImageFolderOptions& options)
    : options_(options) {
  ZP_CHECK(options.short_side >= 1 && options.most_pixels >= 1 && options.threads >= 0,
           "ImageFolder: expected a short side and most pixels of at least 1 and threads of at "
           "least 0, got ",
           options.short_side, ", ", options.most_pixels, " and ", options.threads);
  ZP_CHECK(fs::is_directory(root), root.string(),
           fs::exists(root) ? ": expected a folder with a folder a class, got a file"
                            : ": there is no such folder; expected one with a folder a class");
  list(root);
  if (options.images_in == ImagesIn::kMemory) read_all();
  check_classes(root);
}

void ImageFolder::check_classes(const fs::path& root) const {
  std::vector<int64_t> of_class(classes_.size());
  for (const Sample& sample : samples_) ++of_class[static_cast<size_t>(sample.label)];
  for (size_t label = 0; label < classes_.size(); ++label) {
    ZP_CHECK(
        of_class[label] > 0, (root / classes_[label]).string(),
        ": expected PNG or JPEG files that can be read, got none",
        skipped_.empty() ? std::string() : "; the first that could not be: " + skipped_.front());
  }
}

void ImageFolder::list(const fs::path& root) {
  for (const auto& entry : fs::directory_iterator(root)) {
    if (entry.is_directory()) classes_.push_back(entry.path().filename().string());
  }
  std::sort(classes_.begin(), classes_.end());
  ZP_CHECK(classes_.size() >= 2, root.string(),
           ": expected at least two folders, one a class, got ", classes_.size());
  for (size_t label = 0; label < classes_.size(); ++label) list_class(root, label);
}

void ImageFolder::list_class(const fs::path& root, size_t label) {
  const auto first = static_cast<std::ptrdiff_t>(samples_.size());
  std::map<std::string, std::vector<fs::path>> others;  // by ending
  bool has_links = false;
  for (const auto& entry : fs::recursive_directory_iterator(root / classes_[label])) {
    const std::string ending = ending_of(entry.path());
    const bool is_link = entry.is_symlink();
    if (is_link && !fs::exists(entry.status())) {
      skipped_.push_back(entry.path().string() + ": is a link to a file that is not there");
    } else if (is_link && entry.is_directory()) {
      skipped_.push_back(entry.path().string() +
                         ": is a link to a folder within a class, whose files are passed over; "
                         "link the class's folder, or its files");
    } else if (entry.is_regular_file() && is_read(ending)) {
      has_links |= is_link;
      samples_.push_back({entry.path(), static_cast<int64_t>(label), {}});
    } else if (entry.is_regular_file() && is_other_image(ending)) {
      others[ending].push_back(entry.path());
    }
  }
  for (const auto& [ending, files] : others) {
    skipped_.push_back(c10::str((root / classes_[label]).string(), ": ", files.size(),
                                " files that end in ", ending, " are passed over, such as ",
                                std::min_element(files.begin(), files.end())->string(),
                                "; expected PNG or JPEG, convert them"));
  }
  std::sort(samples_.begin() + first, samples_.end(),
            [](const Sample& a, const Sample& b) { return a.path < b.path; });
  if (has_links) drop_other_names(first);
}

// A link beside what it leads to would show an image twice.
void ImageFolder::drop_other_names(std::ptrdiff_t first) {
  std::map<fs::path, fs::path> name_of;
  std::vector<Sample> kept(samples_.begin(), samples_.begin() + first);
  // Files come before links to them, so that they keep their own names.
  for (const bool links : {false, true}) {
    for (auto sample = samples_.begin() + first; sample != samples_.end(); ++sample) {
      if (fs::is_symlink(sample->path) != links) continue;
      const auto [known, is_new] = name_of.emplace(fs::canonical(sample->path), sample->path);
      if (is_new) {
        kept.push_back(std::move(*sample));
      } else {
        skipped_.push_back(sample->path.string() + ": is a link to " + known->second.string() +
                           ", which is a sample already");
      }
    }
  }
  std::sort(kept.begin() + first, kept.end(),
            [](const Sample& a, const Sample& b) { return a.path < b.path; });
  samples_ = std::move(kept);
}

at::Tensor ImageFolder::read(const Sample& sample) const {
  return with_short_side(read_image(sample.path, options_.most_pixels), options_.short_side);
}

void ImageFolder::read_all() {
  std::vector<std::string> errors(samples_.size());
  std::atomic<size_t> next = 0;
  const auto ledger = memory::Ledger::current();
  const auto read_some = [&] {
    const memory::LedgerScope scope(ledger);
    const at::NoGradGuard no_grad;
    for (size_t i = next++; i < samples_.size(); i = next++) {
      try {
        samples_[i].image = read(samples_[i]);
      } catch (const std::exception& error) {
        errors[i] = memory::message_of(error);
      }
    }
  };
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const unsigned count = options_.threads > 0 ? static_cast<unsigned>(options_.threads) : cores;
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < count; ++i) threads.emplace_back(read_some);
  read_some();
  for (std::thread& thread : threads) thread.join();

  for (std::string& error : errors) {
    if (!error.empty()) skipped_.push_back(std::move(error));
  }
  std::erase_if(samples_, [](const Sample& sample) { return !sample.image.defined(); });
}

const ImageFolder::Sample& ImageFolder::at(int64_t sample) const {
  ZP_CHECK(sample >= 0 && sample < size(), "ImageFolder: there is no sample ", sample,
           "; expected 0 to ", size() - 1);
  return samples_[static_cast<size_t>(sample)];
}

at::Tensor ImageFolder::image(int64_t sample) const {
  const Sample& found = at(sample);
  return found.image.defined() ? found.image : read(found);
}

at::Tensor ImageFolder::labels() const {
  at::Tensor labels = at::empty({size()}, at::kLong);
  for (int64_t i = 0; i < size(); ++i) labels.mutable_data_ptr<int64_t>()[i] = label(i);
  return labels;
}

}  // namespace zeropage::data
