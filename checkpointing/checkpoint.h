// checkpoint: a part of a forward that is repeated in backward instead of kept (Chen et al. 2016,
// "Training Deep Nets with Sublinear Memory Cost").
//
//   x = checkpointing::checkpoint([&](const at::Tensor& x) { return block(x); }, x);
//
// Only the region's inputs are kept of what autograd saves inside such a *region*. When backward first
// needs one of those tensors, the function runs again, up to the last tensor that is needed, with
// the grad mode, autocast and random numbers of its first run: those of the default generators, and those
// of a generator that an operator is given, as in torch::rand(sizes, generator). Numbers that the function
// draws without an operator, as from <random>, are not put back. Gradients have the same bits.
//
// The function is any callable; arguments and results are any values. Tensors among the arguments,
// also inside containers (operators/tensor_structure.h), are kept as autograd keeps saved tensors: by
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
#pragma once

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "checkpointing/region_run.h"
#include "operators/tensor_structure.h"

namespace zeropage::checkpointing {

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

}  // namespace zeropage::checkpointing
