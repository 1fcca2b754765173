// Text as bytes, cut into samples by a rule that any rank count and any language can follow.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "zeropage/data/random.h"

namespace train_gpt {

struct Batch {
  torch::Tensor inputs;   // [batch, sequence], int64
  torch::Tensor targets;  // [batch, sequence], int64: the inputs one token later
};

using zeropage::data::splitmix64;

Batch to_device(const Batch& batch, torch::Device device);

// Tokens 0..255 are bytes and 256 ends a file. The last 5 % are held out from training.
class TextData {
 public:
  // path: a file, a folder with headers, or "auto" for those of the LibTorch that runs (real text on
  // every machine). Throws if it cannot be read, is empty, or is shorter than a few sequences.
  TextData(const std::string& path, int64_t sequence);

  // Sample g of a run starts at splitmix64(splitmix64(seed) + g) modulo the possible starts.
  Batch training_batch(uint64_t seed, uint64_t first_sample, int64_t batch) const;

  // Windows that follow each other through the held-out text.
  int64_t held_out_windows() const;
  Batch held_out_window(int64_t index) const;

  const std::string& description() const { return description_; }

 private:
  void read_file(const std::string& path);
  void read_headers(const std::filesystem::path& root);
  Batch windows(const std::vector<int64_t>& starts) const;

  const int64_t sequence_;
  std::vector<uint16_t> tokens_;
  int64_t training_tokens_ = 0;  // the first ones
  std::string description_;
};

}  // namespace train_gpt
