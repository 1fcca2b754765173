#include "accumulate/split_backward.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "base/libtorch_release.h"
#include "memory/self_check.h"
#include "zeropage/check.h"

namespace zeropage::accumulate {
namespace {

using base::NodePointer;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Which nodes of a graph lead to one of them.
class WayTo {
 public:
  WayTo(const NodePointer& root, const Node* end) {
    leads_[end] = true;
    visit(root);
  }

  bool leads(const NodePointer& node) const { return leads_.at(node.get()); }
  // Those that lead there and elsewhere too.
  const std::vector<NodePointer>& forks() const { return forks_; }
  // Those that lead there alone.
  const std::vector<Node*>& others() const { return others_; }

 private:
  // Depth first, without recursion: graphs are as deep as models.
  void visit(const NodePointer& root) {
    std::vector<std::pair<const NodePointer*, size_t>> path;  // with the next edge to follow
    const auto enter = [&](const NodePointer& node) {
      if (leads_.try_emplace(node.get(), false).second) path.emplace_back(&node, 0);
    };
    enter(root);
    while (!path.empty()) {
      auto& [node, next] = path.back();
      if (next < (*node)->num_outputs()) {
        const Edge& edge = (*node)->next_edge(next++);
        if (edge.is_valid()) enter(edge.function);
        continue;
      }
      leave(*node);
      path.pop_back();
    }
  }

  void leave(const NodePointer& node) {
    bool there = false, elsewhere = false;
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid()) (leads(edge.function) ? there : elsewhere) = true;
    }
    leads_[node.get()] = there;
    if (there && elsewhere) forks_.push_back(node);
    if (there && !elsewhere) others_.push_back(node.get());
  }

  std::unordered_map<const Node*, bool> leads_;
  std::vector<NodePointer> forks_;
  std::vector<Node*> others_;
};

// Notes the gradients that come to a node, behind its other hooks.
class Capture final : public torch::autograd::FunctionPreHook {
 public:
  explicit Capture(std::shared_ptr<variable_list> gradients) : gradients_(std::move(gradients)) {}
  variable_list operator()(const variable_list& gradients) override {
    *gradients_ = gradients;
    return gradients;
  }

 private:
  const std::shared_ptr<variable_list> gradients_;
};

// The second half begins at the node, with what its hooks made of the gradients in the first one, and does not go the
// way of the first half again: the engine asks no node for the gradient of an edge that leads nowhere.
void cut_off(Node& node, const WayTo& way) {
  node.pre_hooks().clear();
  node.tensor_pre_hooks().clear();
  node.retains_grad_hooks().clear();
  for (Edge& edge : node.next_edges()) {
    if (edge.is_valid() && way.leads(edge.function)) edge = Edge();
  }
}

// Gives nodes the gradients that they begin with. The engine's own root takes defined ones alone, while a node that has
// none for one of its outputs, or for all, is called in a backward as well: a torch::autograd::Function makes zeros of
// them.
struct GivenGradients final : Node {
  GivenGradients(edge_list roots, variable_list of_roots, const at::Tensor& any)
      : Node(std::move(roots)), gradients(std::move(of_roots)) {
    add_input_metadata(any);
  }
  variable_list apply(variable_list&&) override { return std::move(gradients); }

  variable_list gradients;
};

// x * w, which notes what it is asked for.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& w, int64_t asked) {
    context->save_for_backward({x, w});
    context->saved_data["asked"] = asked;
    return x * w;
  }
  static variable_list backward(torch::autograd::AutogradContext* context,
                                const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    auto& asked = *reinterpret_cast<std::vector<int>*>(context->saved_data["asked"].toInt());
    asked.push_back((context->needs_input_grad(0) ? 1 : 0) +
                    (context->needs_input_grad(1) ? 2 : 0));
    return {gradients[0] * saved[1], gradients[0] * saved[0], at::Tensor()};
  }
};

void probe_halves() {
  const auto leaf = [](float value) { return at::full({2}, value, at::kFloat).requires_grad_(); };
  const at::Tensor x = leaf(2), w = leaf(3), v = leaf(5);
  std::vector<int> asked;
  const auto pointer = reinterpret_cast<int64_t>(&asked);
  int hooks = 0;
  const at::Tensor inner = Product::apply(x, w, pointer);
  inner.register_hook([&](const at::Tensor& gradient) {
    ++hooks;
    return gradient * 7;
  });
  const at::Tensor middle = inner.exp();
  const at::Tensor output = Product::apply(middle, v, pointer);
  SplitBackward backward(output, at::ones_like(output), x);
  memory::expect_of_libtorch("gradients that two nodes are asked for in the first half",
                             std::vector<int>{1, 1}, asked);
  memory::expect_of_libtorch("no parameter's gradient in the first half",
                             !w.grad().defined() && !v.grad().defined() && !x.grad().defined());
  backward.finish();
  memory::expect_of_libtorch("gradients that they are asked for in the second half",
                             std::vector<int>{1, 1, 2, 2}, asked);
  memory::expect_of_libtorch("calls of a hook of a node that takes part in both", 1, hooks);
  const at::Tensor of_inner = v.detach() * middle.detach() * 7;
  memory::expect_of_libtorch("the gradients of both halves are right",
                             backward.input_gradient().equal(of_inner * w.detach()) &&
                                 w.grad().equal(of_inner * x.detach()) &&
                                 v.grad().equal(middle.detach()));
}

void check_halves() {
  static memory::SelfCheck check("a backward in two halves", "schedules other than zero-bubble",
                                 &probe_halves);
  check.require();
}

}  // namespace

SplitBackward::SplitBackward(const at::Tensor& output, const at::Tensor& gradient,
                             const at::Tensor& input) {
  check_halves();
  ZP_CHECK(output.requires_grad() && gradient.defined() && output.sizes() == gradient.sizes(),
           "SplitBackward: expected an output that requires grad and a gradient of its sizes, ",
           output.sizes(), ", got ",
           gradient.defined() ? c10::str(gradient.sizes()) : "an undefined tensor");
  ZP_CHECK(!input.defined() || (input.is_leaf() && input.requires_grad()),
           "SplitBackward: expected an input that is a leaf and requires grad, or none");
  const Edge root = torch::autograd::impl::gradient_edge(output);
  const Edge end = input.defined() ? torch::autograd::impl::gradient_edge(input) : Edge();
  const WayTo way(root.function, end.function.get());
  if (!way.leads(root.function)) {
    roots_ = {root};
    gradients_ = {gradient};
    return;
  }
  std::vector<std::shared_ptr<variable_list>> captured;
  for (const NodePointer& fork : way.forks()) {
    captured.push_back(std::make_shared<variable_list>());
    fork->add_pre_hook(std::make_unique<Capture>(captured.back()));
  }
  input_gradient_ = Engine::get_default_engine().execute({root}, {gradient}, /*keep_graph=*/true,
                                                         /*create_graph=*/false,
                                                         /*accumulate_grad=*/false, {end})[0];
  // A fork may hold them: what it saved of its input knows the node that made it.
  for (Node* const other : way.others()) other->release_variables();
  for (size_t fork = 0; fork < captured.size(); ++fork) {
    cut_off(*way.forks()[fork], way);
    for (size_t index = 0; index < captured[fork]->size(); ++index) {
      roots_.emplace_back(way.forks()[fork], static_cast<uint32_t>(index));
      gradients_.push_back((*captured[fork])[index]);
    }
  }
}

void SplitBackward::finish() {
  ZP_CHECK(!std::exchange(is_finished_, true), "SplitBackward::finish(): was called before");
  const edge_list roots = std::exchange(roots_, {});
  const variable_list gradients = std::exchange(gradients_, {});
  if (roots.empty()) return;
  const auto run = [](const edge_list& from, const variable_list& with) {
    Engine::get_default_engine().execute(from, with, /*keep_graph=*/false,
                                         /*create_graph=*/false, /*accumulate_grad=*/true);
  };
  const auto is_defined = [](const at::Tensor& gradient) { return gradient.defined(); };
  if (std::all_of(gradients.begin(), gradients.end(), is_defined)) return run(roots, gradients);
  // Its device says which of the engine's threads begins.
  const auto defined = std::find_if(gradients.begin(), gradients.end(), is_defined);
  const at::Tensor any = defined != gradients.end() ? *defined : at::zeros({});
  const NodePointer begin = base::make_node<GivenGradients>(roots, gradients, any);
  run({Edge(begin, 0)}, {any});
}

}  // namespace zeropage::accumulate
