// `WeightsSource`: whole tensors by name, from any kind of file, into a plain module or into the shards of a wrapped one.
//
//   const auto source = zeropage::open_weights("model.safetensors.index.json");
//   zeropage::DeferredModule<Gpt> deferred([&] { return Gpt(config); });
//   zeropage::DistributedDataParallel<Gpt> model(std::move(deferred), world, {.stage = zeropage::Stage::kParameters});
//   zeropage::load_weights(*source, model);
//
// Each rank reads what it owns, in pieces of 1 MiB. So with a DeferredModule no rank ever holds the model.
// A program that has weights in a format of its own derives from WeightsSource and needs nothing else.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>

#include "zeropage/saving.h"

namespace zeropage {

// Threads: one at a time; each rank has its own.
class WeightsSource {
 public:
  struct Entry {
    std::string name;
    std::vector<int64_t> sizes;  // of the whole tensor; empty: a scalar
    at::ScalarType dtype = at::kFloat;
  };

  virtual ~WeightsSource() = default;

  // What errors call it: the file's path.
  virtual std::string name() const = 0;
  // All tensors, each name once. The same until the end of the source.
  virtual const std::vector<Entry>& tensors() const = 0;
  // Further names of tensors in tensors(), such as those of tied weights.
  virtual std::map<std::string, std::string> aliases() const { return {}; }
  // Writes the elements from `first` on, in row-major order of the whole tensor, to all of `to`: flat and contiguous,
  // on the host, in the entry's dtype, within the tensor. entry: one of tensors(). Throws where they cannot be read.
  virtual void read(const Entry& entry, int64_t first, const at::Tensor& to) = 0;
};

// path: what load_weights() takes for a plain module (zeropage/saving.h). Throws state::StateError.
std::unique_ptr<WeightsSource> open_weights(const std::filesystem::path& path);

// Into a plain module of one process. Throws as load_weights() by a path does. Memory: the largest tensor.
ModuleLoadReport load_weights(WeightsSource& source, torch::nn::Module& module,
                              const ModuleLoadOptions& options = {});

// Into what this rank owns of a wrapped module, at any stage, tier and precision. Master weights take the source's values
// before they are rounded. Of the options strict, names, prefix and deadline are read.
//
// Before anything is written, ranks compare what their sources have. What is missing, unexpected or of another shape is one
// error with all names. An error while values are read leaves the model half loaded, and says so.
// Throws state::StateError on all ranks alike. Collective. Threads: the training thread. Memory: pieces of 1 MiB.
LoadReport load_weights(WeightsSource& source, const DistributedDataParallelBase& model,
                        const LoadOptions& options = {});
// The same where an optimizer alone shards a plain module.
LoadReport load_weights(WeightsSource& source, const TrainedModule& model,
                        const ShardedOptimizer& optimizer, const LoadOptions& options = {});

}  // namespace zeropage
