#include "bench/train_gpt/text_data.h"

#include <algorithm>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <ATen/Context.h>

#include "device/page_locked.h"
#include "examples/byte_gpt/gpt.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace train_gpt {
namespace {

namespace fs = std::filesystem;

// Enough text for the largest run of the examples, little enough to be read at once.
constexpr int64_t kMostHeaderBytes = int64_t{4} << 20;

// Beside the library that runs, wherever it was found: <torch>/lib/libtorch_cpu.so.
fs::path folder_of_headers() {
  Dl_info library{};
  const bool found = dladdr(reinterpret_cast<const void*>(&at::globalContext), &library) != 0;
  ZP_CHECK(found,
           "--data auto: the system does not tell where LibTorch is; give a text file or a "
           "folder of headers with --data PATH");
  return fs::path(library.dli_fname).parent_path().parent_path() /
         "include/torch/csrc/api/include/torch";
}

}  // namespace

Batch to_device(const Batch& batch, torch::Device device) {
  return {zeropage::device::start_copy_to_device(batch.inputs, device),
          zeropage::device::start_copy_to_device(batch.targets, device)};
}

TextData::TextData(const std::string& path, int64_t sequence) : sequence_(sequence) {
  if (path == "auto") {
    read_headers(folder_of_headers());
    description_ = "LibTorch's headers";
  } else if (fs::is_directory(path)) {
    read_headers(path);
    description_ = "the headers in " + path;
  } else {
    read_file(path);
    description_ = path;
  }
  const auto total = static_cast<int64_t>(tokens_.size());
  training_tokens_ = total - std::max(sequence + 1, total / 20);
  ZP_CHECK(training_tokens_ > sequence, "--data ", path, ": ", total,
           " tokens are too few for --sequence ", sequence,
           " with a held-out part; expected at least ", 2 * sequence + 3,
           ": give more text or a shorter sequence");
  description_ += " (" + zeropage::memory::format_bytes(total) + ")";
}

void TextData::read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  ZP_CHECK(in && fs::is_regular_file(path), "--data ", path,
           ": cannot be read as a file; give a text file, a folder of headers, or `auto` for "
           "LibTorch's");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  ZP_CHECK(!text.empty(), "--data ", path, ": is empty; give a file with text");
  for (const char byte : text) tokens_.push_back(static_cast<unsigned char>(byte));
  tokens_.push_back(kEndOfText);
}

void TextData::read_headers(const fs::path& root) {
  ZP_CHECK(fs::is_directory(root), "--data auto: LibTorch's headers are not at ", root.string(),
           "; give a text file or a folder of headers with --data PATH");
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.path().extension() == ".h") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    if (static_cast<int64_t>(tokens_.size()) > kMostHeaderBytes) break;
    if (fs::file_size(file) > 0) read_file(file.string());
  }
  ZP_CHECK(!tokens_.empty(), "--data ", root.string(),
           ": has no header (*.h) with text; give a text file or another folder");
}

Batch TextData::windows(const std::vector<int64_t>& starts) const {
  Batch batch;
  batch.inputs = torch::empty({static_cast<int64_t>(starts.size()), sequence_}, torch::kInt64);
  batch.targets = torch::empty_like(batch.inputs);
  auto* inputs = batch.inputs.mutable_data_ptr<int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<int64_t>();
  for (const int64_t start : starts) {
    const auto first = tokens_.begin() + start;
    inputs = std::copy(first, first + sequence_, inputs);
    targets = std::copy(first + 1, first + 1 + sequence_, targets);
  }
  return batch;
}

Batch TextData::training_batch(uint64_t seed, uint64_t first_sample, int64_t batch) const {
  const auto possible_starts = static_cast<uint64_t>(training_tokens_ - sequence_);
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < batch; ++i) {
    const uint64_t draw = splitmix64(splitmix64(seed) + first_sample + static_cast<uint64_t>(i));
    starts.push_back(static_cast<int64_t>(draw % possible_starts));
  }
  return windows(starts);
}

int64_t TextData::held_out_windows() const {
  return (static_cast<int64_t>(tokens_.size()) - training_tokens_ - 1) / sequence_;
}

Batch TextData::held_out_window(int64_t index) const {
  return windows({training_tokens_ + index * sequence_});
}

}  // namespace train_gpt
