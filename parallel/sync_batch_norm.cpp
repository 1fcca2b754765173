#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/batchnorm.h>

#include "operators/tensor_mark.h"
#include "paging/trap.h"
#include "zeropage/check.h"
#include "zeropage/parallel_layers.h"

namespace zeropage {
namespace {

using operators::TensorMark;

struct NormLayer {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  torch::nn::BatchNormOptions options;
  at::Tensor weight;
  at::Tensor running_mean;

  std::string who() const { return "the BatchNorm \"" + name + "\""; }
  bool can_be_marked() const { return weight.defined() || running_mean.defined(); }
};

class BatchNormMark final : public TensorMark {
 public:
  BatchNormMark(const NormLayer& layer, On on, parallel::RanksPointer ranks)
      : TensorMark(layer.who() + " that sync_batch_norm() marked", on),
        module_(layer.module),
        name_(layer.who()),
        ranks_(std::move(ranks)) {}

  bool replaces(const c10::OperatorHandle& handle) const override {
    return ranks_->world.size() > 1 && handle.operator_name().name == "aten::batch_norm";
  }

  bool run(const c10::OperatorHandle& handle, const at::Tensor& /*marked*/,
           torch::jit::Stack& stack) override {
    constexpr size_t kArguments = 9;
    if (!replaces(handle)) return false;
    const auto arguments = torch::jit::last(stack, kArguments);
    // input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled. In eval mode a
    // layer without running statistics is called with `training` as well.
    const auto module = module_.lock();
    if (!arguments[5].toBool() || (module && !module->is_training())) return false;
    const auto tensor = [&](size_t index) {
      return arguments[index].isNone() ? at::Tensor() : arguments[index].toTensor();
    };
    at::Tensor output = parallel::batch_norm_over_ranks(tensor(0), tensor(1), tensor(2), tensor(3),
                                                        tensor(4), arguments[6].toDouble(),
                                                        arguments[7].toDouble(), ranks_, name_);
    torch::jit::drop(stack, kArguments);
    torch::jit::push(stack, std::move(output));
    return true;
  }

 private:
  const std::weak_ptr<torch::nn::Module> module_;
  const std::string name_;
  const parallel::RanksPointer ranks_;
};

template <typename Layer>
void add_layer(const std::string& name, const std::shared_ptr<torch::nn::Module>& module,
               std::vector<NormLayer>& layers) {
  const auto* norm = dynamic_cast<const Layer*>(module.get());
  if (norm == nullptr) return;
  layers.push_back({name, module, norm->options, norm->weight, norm->running_mean});
}

std::vector<NormLayer> norm_layers_of(const torch::nn::Module& module) {
  std::vector<NormLayer> layers;
  for (const auto& item : module.named_modules()) {
    add_layer<torch::nn::BatchNorm1dImpl>(item.key(), item.value(), layers);
    add_layer<torch::nn::BatchNorm2dImpl>(item.key(), item.value(), layers);
    add_layer<torch::nn::BatchNorm3dImpl>(item.key(), item.value(), layers);
  }
  return layers;
}

std::vector<std::string> lines_of(const std::vector<NormLayer>& layers) {
  std::vector<std::string> lines;
  lines.reserve(layers.size());
  for (const NormLayer& layer : layers) {
    lines.push_back(c10::str(layer.name, ": channels ", layer.options.num_features(), ", affine ",
                             layer.weight.defined(), ", running statistics ",
                             layer.running_mean.defined(), ", eps ", layer.options.eps()));
  }
  return lines;
}

}  // namespace

size_t sync_batch_norm(torch::nn::Module& module, const comm::World& world) {
  paging::check_dispatcher();
  const std::vector<NormLayer> layers = norm_layers_of(module);
  world.check_agreement("sync_batch_norm", lines_of(layers));
  ZP_CHECK(!layers.empty(),
           "sync_batch_norm: expected a module with a torch::nn::BatchNorm1d, 2d or 3d, ",
           "found none; leave the call out");
  for (const NormLayer& layer : layers) {
    ZP_CHECK(
        layer.can_be_marked(), "sync_batch_norm: ", layer.who(),
        ": expected a weight or running statistics, which could be marked, but it has neither; ",
        "write a parallel::SyncBatchNorm in its place");
  }
  const auto ranks = parallel::ranks_of(world);
  for (const NormLayer& layer : layers) {
    // All tensors of a layer go into one operator, so one mark is enough.
    const bool on_weight = layer.weight.defined();
    const auto on = on_weight ? TensorMark::On::kParameter : TensorMark::On::kBuffer;
    operators::set_mark(on_weight ? layer.weight : layer.running_mean,
                        c10::make_intrusive<BatchNormMark>(layer, on, ranks));
  }
  return layers.size();
}

}  // namespace zeropage
