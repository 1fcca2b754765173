// `checkpoint()` and `Checkpointed`: regions whose activations are computed again in backward.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "zeropage/check.h"
#include "zeropage/detail/tensor_structure.h"

// What a checkpointed region may be asked for, and how its function gets its inputs again.

namespace zeropage::checkpointing {

struct RegionOptions {
  std::string name = {};
  bool preserve_random_state;
  bool early_stop;
  bool check_geometry;
  bool check_values;
};

// Gives the inputs, in the order in which they were kept.
using NextInput = std::function<at::Tensor()>;

// The part of checkpoint() that does not depend on its function's type: the first run of a region.
//
// Lifetime: of the first run; what backward needs is kept by the graph.
// Threads and errors: see zeropage/checkpoint.h.

namespace detail {
class Region;
class RegionForward;
}  // namespace detail

class RegionRun {
 public:
  using NextInput = checkpointing::NextInput;

  explicit RegionRun(RegionOptions options);
  ~RegionRun();
  RegionRun(const RegionRun&) = delete;
  RegionRun& operator=(const RegionRun&) = delete;

  // Whether anything would be saved: grad mode is on.
  static bool worth_it();

  void keep_input(const at::Tensor& tensor, const std::string& name);
  // From here on the region runs. again: repeats it.
  void begin(std::function<void(const NextInput&)> again);
  void see_result(const at::Tensor& tensor);
  // It has ended without an error.
  void end();

 private:
  const std::shared_ptr<detail::Region> region_;
  std::unique_ptr<detail::RegionForward> forward_;
};

// checkpoint: a part of a forward that is repeated in backward instead of kept (Chen et al. 2016,
// "Training Deep Nets with Sublinear Memory Cost").
//
//   x = checkpointing::checkpoint([&](const at::Tensor& x) { return block(x); }, x);
//
// Only the region's inputs are kept of what autograd saves inside such a *region*. When backward first
// needs one of those tensors, the function runs again, up to the last tensor that is needed, with
// the grad mode, autocast and random numbers of its first run: those of the default generators, and those
// of a generator that an operator is given, as in torch::rand(sizes, generator). Numbers that the function
// draws without an operator, as from <random>, are not put back. Gradients have the same bits. Where ranks are threads
// of one process, whose default generator they share, each operator of a region that would draw from it draws from a generator
// with a seed of its own, and the repetition has that seed. So there a region draws other numbers than the same code without one.
//
// The function is any callable; arguments and results are any values. Tensors among the arguments,
// also inside containers (zeropage/detail/tensor_structure.h), are kept as autograd keeps saved tensors: by
// the hooks of the enclosing SavedTensorScope or region, so regions nest, and inputs can be
// offloaded. What the callable captures, it keeps itself; by reference it must live until backward.
// Memory that was there before and that the function writes in place, such as a BatchNorm's running
// statistics or its own inputs, is copied before the first write, so that a repetition begins with
// what the first run found and leaves no trace.
//
// Not re-entrant: backward runs once through one graph, so torch::autograd::grad, hooks on
// parameters, retain_graph and create_graph work as without regions.
//
// Lifetime: a region lives as long as the part of the graph that it made.
// Threads: a region may be repeated by autograd's threads; its function then runs there.
// Errors: an input, or a tensor that the function captured and reads, such as a parameter, that was
// changed in place after the region, and a repetition that saves other tensors than the first run,
// throw c10::Error from backward() with the region's name and the first tensor that differs. So
// backward() comes before optimizer.step(), as without regions; as there, writes through .data(), such
// as torch::optim::SGD's, are not seen. What the function throws when it is repeated, backward() throws,
// behind the region's name. After an error, hooks, random state and modes are as they were. A region
// none of whose results requires a gradient warns: it keeps nothing anyway.
// How a repetition is compared with the first run, besides by the number of its saved tensors.
enum class RecomputeCheck {
  kNothing,
  kGeometry,  // shape, dtype and device of each
  // And a hash of its values, which reads each tensor twice more. Not of bytes: there LibTorch has
  // work space of its kernels (mkldnn's LSTM, cuDNN), which nobody fills.
  kValues,
};

struct CheckpointOptions {
  std::string name = "checkpoint";  // the region's, in errors
  // Repeats with the same random numbers; costs a copy of each generator's state, 5 KB.
  bool preserve_random_state = true;
  // Ends a repetition when the last tensor is there that backward still needs. The function is left
  // by an exception that is not a std::exception.
  bool early_stop = true;
  RecomputeCheck check = RecomputeCheck::kGeometry;
};

template <typename Function, typename... Arguments>
auto checkpoint(const CheckpointOptions& options, Function&& function, Arguments&&... arguments) {
  using Kept = std::tuple<std::decay_t<Arguments>...>;
  if (!RegionRun::worth_it()) {
    return std::forward<Function>(function)(std::forward<Arguments>(arguments)...);
  }
  RegionRun run({options.name, options.preserve_random_state, options.early_stop,
                 options.check != RecomputeCheck::kNothing,
                 options.check == RecomputeCheck::kValues});
  const auto keep_input = [&](const at::Tensor& tensor, const std::string& name) {
    run.keep_input(tensor, name);
    return at::Tensor();
  };
  // Without its tensors, which the region keeps.
  Kept shell = memory::map_tensors(Kept(arguments...), keep_input, "arguments");
  auto again = std::make_shared<std::decay_t<Function>>(std::forward<Function>(function));
  run.begin([again, shell = std::move(shell)](const RegionRun::NextInput& next_input) {
    const auto input = [&](const at::Tensor&, const std::string&) { return next_input(); };
    std::apply(*again, memory::map_tensors(shell, input, "arguments"));
  });
  auto result = (*again)(std::forward<Arguments>(arguments)...);
  if constexpr (memory::kIsStructure<decltype(result)>) {
    const auto see = [&](const at::Tensor& tensor, const std::string&) {
      run.see_result(tensor);
      return tensor;
    };
    memory::map_tensors(result, see, "result");
  }
  run.end();
  return result;
}

template <typename Function, typename... Arguments>
requires std::is_invocable_v<Function, Arguments...>
auto checkpoint(Function&& function, Arguments&&... arguments) {
  return checkpoint(CheckpointOptions(), std::forward<Function>(function),
                    std::forward<Arguments>(arguments)...);
}

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
