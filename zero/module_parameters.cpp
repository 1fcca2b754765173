#include "zero/module_parameters.h"

#include <unordered_map>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

namespace zeropage {
namespace {

class Walk {
 public:
  void visit(const torch::nn::Module& module, const std::string& prefix) {
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      add(prefix + parameter.key(), parameter.value());
    }
    const bool children_are_units = dynamic_cast<const torch::nn::ModuleListImpl*>(&module) ||
                                    dynamic_cast<const torch::nn::SequentialImpl*>(&module);
    for (const auto& child : module.named_children()) {
      if (children_are_units) ++unit_;
      visit(*child.value(), prefix + child.key() + ".");
      if (children_are_units) ++unit_;
    }
  }

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto [at, is_new] = known_.try_emplace(tensor.unsafeGetTensorImpl(), found_.size());
    if (is_new) {
      found_.push_back({{name}, tensor, unit_});
    } else {
      found_[at->second].names.push_back(name);
    }
  }

  std::vector<NamedParameter> take() { return std::move(found_); }

 private:
  std::vector<NamedParameter> found_;
  std::unordered_map<const at::TensorImpl*, size_t> known_;
  int unit_ = 0;
};

}  // namespace

std::string describe(const NamedParameter& parameter) {
  std::string names;
  for (const std::string& name : parameter.names) names += (names.empty() ? "" : " = ") + name;
  return c10::str("parameter \"", names, "\": ", parameter.tensor.scalar_type(), " ",
                  parameter.tensor.sizes(), parameter.tensor.requires_grad() ? "" : " frozen");
}

std::vector<NamedParameter> parameters_of(const torch::nn::Module& module) {
  Walk walk;
  walk.visit(module, "");
  return walk.take();
}

std::vector<NamedParameter> parameters_of(const std::vector<at::Tensor>& tensors) {
  Walk walk;
  for (size_t index = 0; index < tensors.size(); ++index) {
    walk.add("parameter " + std::to_string(index), tensors[index]);
  }
  return walk.take();
}

}  // namespace zeropage
