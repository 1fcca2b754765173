// Which ranks of a pipeline have which parameters and buffers of a model, as its layers list them.
//
// Lifetime: of the call that makes a stage. Threads: one. Throws on all ranks alike, as all see the same lists.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include "zeropage/detail/model_part.h"
#include "zeropage/pipeline.h"

namespace zeropage::pipeline {

class TensorOwners {
 public:
  // first_layers: of each stage, and where the last one ends. Throws where a layer lists what is not the model's or a module
  // that holds another rank's, where a stage would have no parameter, and for Experts on several ranks whose balance_bias
  // moves by the tokens that one rank has counted.
  TensorOwners(const torch::nn::Module& whole, const PipelineLayers& layers,
               const std::vector<int64_t>& first_layers, int ranks);

  enum class Kind : uint8_t { kParameter, kBuffer };
  // Each tensor once, with all its names. index: gets the place of each in the list. Throws for one that no layer uses,
  // and for a parameter of other ranks than one, or the first and the last.
  std::vector<TensorOfModel> list(const torch::OrderedDict<std::string, at::Tensor>& named,
                                  Kind kind,
                                  std::unordered_map<const at::TensorImpl*, size_t>& index) const;

 private:
  void check_counts_on_one_rank(const torch::nn::Module& whole) const;
  void place(TensorOfModel& of, const at::Tensor& tensor, Kind kind) const;

  const int ranks_;
  std::unordered_map<const at::TensorImpl*, std::set<int>> ranks_of_;
};

}  // namespace zeropage::pipeline
