#include "accumulate/weightless_loss.h"

#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "parallel/nodes_of_ranks.h"

namespace zeropage::accumulate {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

enum class Gives : uint8_t {
  kOfThisLoss,   // gradients of this loss alone
  kOfAllLosses,  // those of other ranks' losses among them
};

struct Walk {
  std::vector<std::shared_ptr<Node>> nodes;
  std::unordered_map<const Node*, Gives> gives;
};

class MakeZeros final : public torch::autograd::FunctionPostHook {
 public:
  explicit MakeZeros(std::vector<size_t> outputs) : outputs_(std::move(outputs)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    variable_list all = outputs;
    for (const size_t output : outputs_) {
      if (all[output].defined()) all[output] = at::zeros_like(all[output]);
    }
    return all;
  }

 private:
  const std::vector<size_t> outputs_;
};

// All nodes that the root leads to.
Walk walk_from(const std::shared_ptr<Node>& root) {
  Walk walk;
  const auto meet = [&walk](const std::shared_ptr<Node>& node) {
    if (node && walk.gives.emplace(node.get(), Gives::kOfThisLoss).second)
      walk.nodes.push_back(node);
  };
  meet(root);
  for (size_t index = 0; index < walk.nodes.size(); ++index) {
    const std::shared_ptr<Node> node = walk.nodes[index];
    for (const auto& edge : node->next_edges()) meet(edge.function);
  }
  return walk;
}

// What a node of several ranks gives is of all losses, and so is what is computed of it. Returns whether there is one.
bool mark_others(Walk& walk) {
  std::vector<const Node*> marked;
  const auto mark = [&](const Node* node) {
    if (std::exchange(walk.gives.at(node), Gives::kOfAllLosses) == Gives::kOfThisLoss)
      marked.push_back(node);
  };
  for (const auto& node : walk.nodes) {
    if (parallel::gives_gradients_of_other_losses(*node)) mark(node.get());
  }
  const bool is_any = !marked.empty();
  while (!marked.empty()) {
    const Node* const node = marked.back();
    marked.pop_back();
    for (const auto& edge : node->next_edges()) {
      if (edge.function) mark(edge.function.get());
    }
  }
  return is_any;
}

}  // namespace

WeightlessLoss::WeightlessLoss(const at::Tensor& loss) {
  Walk walk = walk_from(torch::autograd::impl::gradient_edge(loss).function);
  meets_others_ = mark_others(walk);
  for (const auto& node : walk.nodes) {
    if (walk.gives.at(node.get()) == Gives::kOfAllLosses) continue;
    std::vector<size_t> leaving;
    for (size_t output = 0; output < node->next_edges().size(); ++output) {
      const Node* const next = node->next_edge(output).function.get();
      if (next == nullptr) continue;
      const bool is_leaf = next->num_outputs() == 0;
      if (is_leaf || walk.gives.at(next) == Gives::kOfAllLosses) leaving.push_back(output);
    }
    if (leaving.empty()) continue;
    hooks_.push_back({node, node->add_post_hook(std::make_unique<MakeZeros>(std::move(leaving)))});
  }
}

WeightlessLoss::~WeightlessLoss() {
  for (const Hook& hook : hooks_) hook.node->del_post_hook(hook.key);
}

}  // namespace zeropage::accumulate
