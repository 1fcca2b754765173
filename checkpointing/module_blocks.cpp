#include <typeinfo>
#include <unordered_set>
#include <utility>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include "zeropage/check.h"
#include "zeropage/recompute.h"

namespace zeropage::checkpointing {
namespace {

using torch::nn::Module;

struct List {
  std::string name;
  const Module* module;
  int64_t numel = 0;  // a tied parameter once
};

bool is_list(const Module& module) {
  return dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr;
}

// Two or more of one type, each with modules in it: a layer alone is no block.
bool holds_blocks(const Module& module) {
  const auto children = module.children();
  if (!is_list(module) || children.size() < 2) return false;
  for (const auto& child : children) {
    const Module& first = *children.front();
    const Module& other = *child;
    if (typeid(other) != typeid(first) || other.children().empty()) return false;
  }
  return true;
}

int64_t numel_of(const Module& module) {
  std::unordered_set<const c10::TensorImpl*> known;
  int64_t numel = 0;
  for (const at::Tensor& parameter : module.parameters()) {
    if (known.insert(parameter.unsafeGetTensorImpl()).second) numel += parameter.numel();
  }
  return numel;
}

// The outermost ones: those within a block are its own.
void add_lists(const Module& module, const std::string& name, std::vector<List>& lists) {
  if (holds_blocks(module)) {
    lists.push_back({name, &module, numel_of(module)});
    return;
  }
  for (const auto& child : module.named_children()) {
    add_lists(*child.value(), name.empty() ? child.key() : name + "." + child.key(), lists);
  }
}

std::string quoted(const std::string& name) {
  return name.empty() ? "the module itself" : "\"" + name + "\"";
}

// What to write where the blocks are to be named.
constexpr const char* kLine =
    "; name those whose blocks are to be computed again, in the order in which forward runs them: "
    "find_blocks(module, {\"NAME\"}), or PlanOptions::blocks and FitOptions::blocks = {\"NAME\"}";

std::vector<List> chosen(const std::vector<List>& all, int64_t numel) {
  std::string names;
  for (const List& list : all) {
    if (2 * list.numel > numel) return {list};
    names += c10::str(names.empty() ? "" : ", ", quoted(list.name), " (",
                      100 * list.numel / std::max<int64_t>(1, numel), " % of the parameters)");
  }
  ZP_CHECK(!all.empty(),
           "blocks: expected a ModuleList or Sequential of two or more modules of one type with "
           "modules of "
           "their own, and this module has none; recompute operators instead "
           "(RecomputeOptions::selective() or budget(bytes)), or make regions "
           "(zeropage/checkpoint.h)");
  ZP_THROW("blocks: expected one list with more than half of the parameters, got ", names, kLine);
}

std::vector<List> named(const Module& module, const std::vector<std::string>& names,
                        const std::vector<List>& all) {
  std::vector<List> lists;
  std::string known;
  for (const List& list : all) known += c10::str(known.empty() ? "" : ", ", quoted(list.name));
  for (const std::string& name : names) {
    const Module* found = nullptr;
    for (const auto& item : module.named_modules("", /*include_self=*/false)) {
      if (item.key() == name) found = item.value().get();
    }
    ZP_CHECK(found != nullptr && is_list(*found),
             "blocks: expected the name of a ModuleList or Sequential, got \"", name,
             "\"; this module has ", known.empty() ? "none of equal modules" : known);
    lists.push_back({name, found});
  }
  return lists;
}

}  // namespace

ModuleBlocks find_blocks(const Module& module, const std::vector<std::string>& lists) {
  std::vector<List> all;
  add_lists(module, "", all);
  ModuleBlocks blocks;
  for (const List& list :
       lists.empty() ? chosen(all, numel_of(module)) : named(module, lists, all)) {
    blocks.lists.push_back(list.name);
    for (const auto& block : list.module->children()) {
      blocks.parameters.push_back(block->parameters());
    }
  }
  return blocks;
}

std::string ModuleBlocks::to_string() const {
  std::string text = c10::str("the ", parameters.size(), " of ");
  for (size_t index = 0; index < lists.size(); ++index) {
    text += (index == 0 ? "" : ", ") + quoted(lists[index]);
  }
  return text;
}

}  // namespace zeropage::checkpointing
