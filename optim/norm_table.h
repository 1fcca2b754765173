// The norms of a flat gradient's parts, made where the gradient is: a table of the parts, which lies
// there too, and integers that come to the host when somebody wants them.
//
//   const offload::NormTable table(parts, {.sums = 1, .flags = parameters}, device);      // once
//   const at::Tensor words = table.sizes().make_words(device);                            // zeros
//   table.add_squares(gradient, words);                                                   // enqueues
//   const at::Tensor on_host = words.cpu();
//   const double norm = std::sqrt(table.sizes().sum(on_host, 0).value());
//
// Each square is added exactly (optim/exact_squares.h), and digits are integers. So the words' sum
// depends on the elements alone: not on the device, the order, or where parts and tables cut them.
//
// Several tables, say one a page, may add to the same words, in up to 2^16 calls. On CUDA a call is one
// launch; on the host the loops of this folder; other accelerators do it by LibTorch's operators, some
// 50 for every million elements. No call waits for a device, but for the constructor: its table is
// copied there from pageable memory.
// Lifetime: tensors must live until the device has done the work. Threads: any.
// Throws c10::Error on parts outside the gradient, and on what flat_norm.h refuses.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "optim/exact_sum.h"
#include "optim/norm_part.h"

namespace zeropage::optim {

// What words there are: for each sum kExactWords, then the flags.
struct NormSizes {
  int64_t sums = 0;
  int64_t flags = 0;

  int64_t flag_words() const { return (flags + kFlagsPerWord - 1) / kFlagsPerWord; }
  int64_t words() const { return sums * kExactWords + flag_words(); }

  // Zeros. int64 [words()]
  at::Tensor make_words(const at::Device& device) const;
  // These read words on the host, wherever the words were made.
  ExactSum sum(const int64_t* words, int64_t index) const;
  bool flag(const int64_t* words, int64_t index) const;
};

class NormTable {
 public:
  // parts: of one gradient, each with elements. first_block is filled in. Those that do not overlap
  // in memory may share sums and flags.
  NormTable(std::vector<NormPart> parts, const NormSizes& sizes, const at::Device& device);

  const NormSizes& sizes() const { return sizes_; }
  bool empty() const { return parts_.empty(); }

  // gradient: fp64, fp32, bf16 or fp16, flat, on the table's device. Adds what the parts are to
  // words, int64 [sizes().words()] there.
  void add_squares(const at::Tensor& gradient, const at::Tensor& words) const;

 private:
  void check(const at::Tensor& gradient, const at::Tensor& words) const;
  void add_on_host(const at::Tensor& gradient, int64_t* words) const;
  void add_by_operators(const at::Tensor& gradient, const at::Tensor& words) const;

  const NormSizes sizes_;
  const at::Device device_;
  std::vector<NormPart> parts_;         // by sum
  std::vector<int64_t> first_element_;  // how many elements the parts before each have
  int64_t numel_ = 0;                   // of all parts
  int64_t end_ = 0;                     // of the elements
  int64_t most_blocks_ = 0;             // of a sum
  // On a CUDA device: NormParts and NormRanges, as they lie.
  at::Tensor parts_there_;
  at::Tensor ranges_there_;
  // On another accelerator: of each block. int64 [blocks]
  at::Tensor sum_of_block_;
  at::Tensor flag_of_block_;
  at::Tensor bit_values_;  // 1, 2, 4, ...: int64 [kFlagsPerWord]
};

}  // namespace zeropage::optim
