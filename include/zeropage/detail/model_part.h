// What a rank of a pipeline has of a model, and what of it the other stages have.
//
// A stage's module has some of the model's parameters, by the model's names and in the model's order. Whoever
// speaks of the whole model (norms, states on disk) reads here what lies elsewhere.
//
// Lifetime: keeps no tensor alive. Threads: constant after construction.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>

#include "zeropage/world.h"

namespace zeropage {

// A parameter or a buffer of the model.
struct TensorOfModel {
  std::vector<std::string> names;  // in the order of the model's named_parameters()
  std::vector<int64_t> sizes;      // whole, where ranks have slices of it
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  // The rank along "pipeline" that has it. A tied weight is there and on `copy_on` too.
  int rank = 0;
  std::optional<int> copy_on;
  // A buffer that other ranks have too, and nobody writes.
  bool is_on_several = false;

  const std::string& name() const { return names.front(); }
};

struct ModelPart {
  comm::World ranks;                // along "pipeline"
  std::optional<comm::World> tied;  // the two that have the tied weights; where this rank has one
  std::vector<TensorOfModel> parameters;
  std::vector<TensorOfModel> buffers;
  // This rank's parameters, as indices into `parameters`.
  std::unordered_map<const at::TensorImpl*, size_t> own = {};
};

// What a torch::nn::Module also is that is a part of a model.
class HasModelPart {
 public:
  virtual ~HasModelPart() = default;
  virtual std::shared_ptr<const ModelPart> model_part() const = 0;

 protected:
  HasModelPart() = default;
  HasModelPart(const HasModelPart&) = default;
  HasModelPart& operator=(const HasModelPart&) = default;
};

// The part that a module is; null for a whole model.
inline std::shared_ptr<const ModelPart> model_part_of(const torch::nn::Module& module) {
  const auto* part = dynamic_cast<const HasModelPart*>(&module);
  return part == nullptr ? nullptr : part->model_part();
}

}  // namespace zeropage
