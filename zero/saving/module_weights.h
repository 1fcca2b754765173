// Weights from a safetensors file into a plain module of one process, without a world: for inference, tests,
// or a start from what others trained.
//
//   Gpt gpt(config);
//   zeropage::load_weights("gpt2/model.safetensors", gpt);
//   zeropage::load_weights("run", gpt);  // of a saved run: what its `latest` names
//
// A module that DistributedDataParallel has wrapped takes a saved state by the other load_weights()
// (zero/saving/sharded_state.h), and a plain file under a guard that says where it writes:
//
//   zeropage::GatheredParameters guard(model, zeropage::Modified::on_rank(0));
//   if (world.rank() == 0) zeropage::load_weights("gpt2/model.safetensors", model.module());
//
// Memory: the file's largest tensor. Threads: any. Throws state::StateError for what is wrong with a file or does not
// fit, with all names; nothing of the module has changed then, unless a file cannot be read to its end.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "state/state_error.h"

namespace zeropage {

struct ModuleLoadOptions {
  // true: the file must have every parameter and buffer, and nothing else. false: what is there is loaded, and the
  // report says what was missing. A different shape, or floating point for whole numbers, is an error in both
  // cases.
  bool strict = true;
  // The module's names -> names in the file; others are as they are.
  std::map<std::string, std::string> names = {};
  // Text in front of every name in the file, also of those in `names`: "model.". Names without it are not the
  // module's, so they are unexpected.
  std::string prefix = {};
};

struct ModuleLoadReport {
  std::vector<std::string> missing;     // of the module, not in the file
  std::vector<std::string> unexpected;  // in the file, not of the module
};

// path: a safetensors file; an index of several (model.safetensors.index.json), as Hugging Face's
// save_pretrained() writes it, beside them; a saved state, or a run's folder, whose checksums are looked at.
// Values are converted to the module's dtypes and go to the devices where its tensors are, which stay the
// same tensors. A tied parameter is found under any of its names, in the file's metadata too
// (safetensors.torch.save_model).
ModuleLoadReport load_weights(const std::filesystem::path& path, torch::nn::Module& module,
                              const ModuleLoadOptions& options = {});

template <typename Impl>
ModuleLoadReport load_weights(const std::filesystem::path& path,
                              const torch::nn::ModuleHolder<Impl>& module,
                              const ModuleLoadOptions& options = {}) {
  return load_weights(path, static_cast<torch::nn::Module&>(*module.ptr()), options);
}

template <typename M>
requires std::is_base_of_v<torch::nn::Module, M> ModuleLoadReport
load_weights(const std::filesystem::path& path, const std::shared_ptr<M>& module,
             const ModuleLoadOptions& options = {}) {
  return load_weights(path, static_cast<torch::nn::Module&>(*module), options);
}

}  // namespace zeropage
