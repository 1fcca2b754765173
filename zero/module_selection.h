// Which modules of a tree are meant, by type or by name.
//
//   options.stays_fp32 = ModuleSelection::of_type<torch::nn::LayerNorm>() |
//                        ModuleSelection::named({"*.router", "head"});
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

namespace zeropage {

class ModuleSelection {
 public:
  static ModuleSelection none() { return {}; }

  // torch::nn::BatchNorm1d, 2d and 3d, and parallel::SyncBatchNorm.
  static ModuleSelection batch_norms();

  // Module holders (torch::nn::LayerNorm) or classes of modules; derived ones too.
  template <typename... M>
  static ModuleSelection of_type() {
    ModuleSelection selection;
    (selection.add([](const std::string&, const torch::nn::Module& module) {
      return dynamic_cast<const Class<M>*>(&module) != nullptr;
    }),
     ...);
    return selection;
  }

  // patterns: of whole names, "blocks.3.norm"; * is any characters, ? is one. The wrapped module
  // itself is "".
  static ModuleSelection named(const std::vector<std::string>& patterns);

  // Your own rule. It must say the same on all ranks.
  static ModuleSelection where(
      std::function<bool(const std::string& name, const torch::nn::Module& module)> rule) {
    ModuleSelection selection;
    selection.add(std::move(rule));
    return selection;
  }

  friend ModuleSelection operator|(ModuleSelection left, const ModuleSelection& right) {
    left.rules_.insert(left.rules_.end(), right.rules_.begin(), right.rules_.end());
    return left;
  }

  bool contains(const std::string& name, const torch::nn::Module& module) const;

 private:
  using Rule = std::function<bool(const std::string&, const torch::nn::Module&)>;

  template <typename M>
  struct ClassOf {
    using type = M;
  };
  template <typename M>
  requires requires { typename M::ContainedType; }
  struct ClassOf<M> {
    using type = typename M::ContainedType;
  };
  template <typename M>
  using Class = typename ClassOf<M>::type;

  void add(Rule rule) { rules_.push_back(std::move(rule)); }

  std::vector<Rule> rules_;
};

}  // namespace zeropage
