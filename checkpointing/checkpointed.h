// Regions for modules: a block that is always a region, a Sequential in segments, and a loop over
// blocks under a policy.
//
// A segment of k blocks keeps its input, and in backward all that its blocks save, one segment at a
// time: n / k inputs and k blocks. Where a block saves A bytes and its input has x, k = sqrt(n x / A)
// is least; so sqrt(n) where the two are alike (Chen et al. 2016, section 4), and 1 for the blocks
// of a transformer until n is some 16. The last segment is not repeated: its backward comes at once,
// so it would free nothing meanwhile.
//
// Lifetime: modules must live until backward; a Checkpointed block keeps itself.
// Threads and errors: as of checkpoint().
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "checkpointing/checkpoint.h"
#include "memory/check.h"

namespace zeropage::checkpointing {

// A block that is a region whenever it runs with gradients, with the block's own names of
// parameters and buffers:
//
//   blocks->push_back(std::make_shared<checkpointing::Checkpointed<BlockImpl>>(config));
//
// Make it with std::make_shared, as LibTorch makes modules.
template <typename BlockImpl>
class Checkpointed : public BlockImpl {
 public:
  using BlockImpl::BlockImpl;

  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    const auto self = std::static_pointer_cast<Checkpointed>(this->shared_from_this());
    return checkpoint(
        {.name = this->name()},
        [self](auto&&... inputs) { return self->BlockImpl::forward(inputs...); },
        std::forward<Arguments>(arguments)...);
  }
};

// How many consecutive blocks are one region.
class EveryBlocks {
 public:
  static EveryBlocks none() { return EveryBlocks(0); }
  static EveryBlocks each() { return EveryBlocks(1); }
  // Regions of `count` blocks, 1 or more.
  static EveryBlocks every(int64_t count) {
    ZP_CHECK(count >= 1, "checkpointed blocks: expected 1 or more blocks a region, got ", count);
    return EveryBlocks(count);
  }
  // Regions of round(sqrt(n)) blocks, for n blocks.
  static EveryBlocks square_root() { return EveryBlocks(kSquareRoot); }

  // Blocks of a region, for a loop over so many blocks; 0: no regions.
  int64_t of(int64_t blocks) const {
    if (count_ != kSquareRoot) return count_;
    return std::max<int64_t>(1, std::llround(std::sqrt(static_cast<double>(blocks))));
  }

 private:
  static constexpr int64_t kSquareRoot = -1;
  explicit EveryBlocks(int64_t count) : count_(count) {}

  int64_t count_;
};

// x = step(step(x, 0), 1) ... up to `blocks`, in regions. step: (at::Tensor, int64_t) -> at::Tensor;
// it is kept until backward, with what it captures.
template <typename Step>
at::Tensor checkpoint_each(int64_t blocks, EveryBlocks every, at::Tensor x, Step step) {
  const int64_t length = every.of(blocks) > 0 ? every.of(blocks) : std::max<int64_t>(blocks, 1);
  for (int64_t start = 0; start < blocks; start += length) {
    const int64_t end = std::min(blocks, start + length);
    const auto run = [step, start, end](at::Tensor state) {
      for (int64_t block = start; block < end; ++block) state = step(std::move(state), block);
      return state;
    };
    if (end == blocks) {
      x = run(std::move(x));
    } else {
      const std::string name =
          length == 1 ? c10::str("block ", start) : c10::str("blocks ", start, " to ", end - 1);
      x = checkpoint({.name = name}, run, std::move(x));
    }
  }
  return x;
}

// The blocks of a list, each of holder type Block, whose forward takes and gives one tensor.
template <typename Block>
at::Tensor checkpoint_each(const torch::nn::ModuleList& blocks, EveryBlocks every, at::Tensor x) {
  return checkpoint_each(static_cast<int64_t>(blocks->size()), every, std::move(x),
                         [list = blocks.ptr()](at::Tensor state, int64_t index) {
                           const auto block = list->ptr(static_cast<size_t>(index));
                           return block->template as<Block>()->forward(std::move(state));
                         });
}

// A Sequential of modules that take and give one tensor, in `segments` regions as equal as they
// can be, longer ones first. 1 <= segments <= the modules.
at::Tensor checkpoint_sequential(torch::nn::Sequential sequential, int64_t segments, at::Tensor x);

}  // namespace zeropage::checkpointing
