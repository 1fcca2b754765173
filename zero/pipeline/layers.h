// A model as a list of layers, which a pipeline cuts into stages.
//
//   PipelineLayers layers = layers_of(sequential);
//   PipelineLayers layers = layers_of(blocks, [](torch::nn::Module& block, const at::Tensor& x) {
//     return block.as<Block>()->forward(x);
//   });
//   layers.insert(layers.begin(), {"embedding", {gpt->token_embedding.ptr()}, [gpt](const at::Tensor& tokens) {...}});
//   layers.front().tensors = {gpt->position_embedding};   // a parameter that the model itself registers
//
// A layer takes what the one before it returns, one tensor. The first one takes the input of a micro-batch.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

namespace zeropage {

struct PipelineLayer {
  std::string name;  // for errors
  // The model's modules whose parameters and buffers it uses, at any depth. A weight that several layers name is
  // tied.
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  std::function<at::Tensor(const at::Tensor&)> forward;
  // Other parameters and buffers that it uses, of a module that also holds those of other layers, such as the model
  // itself.
  std::vector<at::Tensor> tensors = {};
};

using PipelineLayers = std::vector<PipelineLayer>;

// A layer for each module of it, which takes and returns a tensor.
PipelineLayers layers_of(const torch::nn::Sequential& sequential);
// A layer for each element, run by `forward`.
PipelineLayers layers_of(
    const torch::nn::ModuleList& list,
    const std::function<at::Tensor(torch::nn::Module&, const at::Tensor&)>& forward);

}  // namespace zeropage
