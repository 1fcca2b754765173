#include "parallel/context/split_attention.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>

#include "zeropage/check.h"

namespace zeropage::parallel {
namespace context {
namespace {

constexpr const char* kOperator = "aten::scaled_dot_product_attention";

struct Mark {
  std::weak_ptr<const torch::nn::Module> module;
  std::shared_ptr<SplitAttention> attention;
};

// By the module, whose address another one may have once it is gone.
class Marks {
 public:
  static Marks& all() {
    static Marks marks;
    return marks;
  }
  std::shared_ptr<SplitAttention> find(const torch::nn::Module& module) {
    const std::lock_guard lock(mutex_);
    const auto at = marks_.find(&module);
    return at == marks_.end() || at->second.module.expired() ? nullptr : at->second.attention;
  }
  void add(const std::shared_ptr<const torch::nn::Module>& module,
           std::shared_ptr<SplitAttention> attention) {
    const std::lock_guard lock(mutex_);
    std::erase_if(marks_, [](const auto& mark) { return mark.second.module.expired(); });
    marks_[module.get()] = {module, std::move(attention)};
  }
  // A module and all within it are in a wrapper, as long as that lives.
  void note_wrapped(const torch::nn::Module& module) {
    const std::lock_guard lock(mutex_);
    for (const auto& within : module.modules()) ++wrapped_[within.get()];
  }
  void forget_wrapped(const torch::nn::Module& module) noexcept {
    const std::lock_guard lock(mutex_);
    for (const auto& within : module.modules()) {
      const auto at = wrapped_.find(within.get());
      if (at != wrapped_.end() && --at->second == 0) wrapped_.erase(at);
    }
  }
  bool is_wrapped(const torch::nn::Module& module) {
    const std::lock_guard lock(mutex_);
    return wrapped_.contains(&module);
  }

 private:
  std::mutex mutex_;
  std::map<const torch::nn::Module*, Mark> marks_;
  std::map<const torch::nn::Module*, int> wrapped_;  // in how many wrappers
};

}  // namespace

bool SplitAttention::replaces(const c10::OperatorHandle& handle) const {
  return handle.schema().name() == kOperator;
}

void SplitAttention::run(torch::jit::Stack& stack) {
  constexpr size_t kArguments = 8;
  const auto argument = [&](size_t index) -> const c10::IValue& {
    return torch::jit::peek(stack, index, kArguments);
  };
  const at::Tensor query = argument(0).toTensor();
  const at::Tensor key = argument(1).toTensor();
  ZP_CHECK(
      argument(3).isNone(), kOperator,
      " in a module that context_parallel() marked: expected no mask but is_causal, got one of ",
      argument(3).isNone() ? at::IntArrayRef() : argument(3).toTensor().sizes(),
      ", which has this rank's tokens alone; packed documents are an option of "
      "context_attention()");
  ZP_CHECK(argument(4).toDouble() == 0, kOperator,
           " in a module that context_parallel() marked: expected no dropout of weights, got ",
           argument(4).toDouble(), "; set it to 0, and drop outputs instead");
  ZP_CHECK(
      query.dim() != 4 || key.dim() != 4 || query.size(2) == key.size(2), kOperator,
      " in a module that context_parallel() marked: expected keys of the queries' own tokens, got "
      "queries ",
      query.sizes(), " and keys ", key.sizes(),
      "; attention to another sequence, or to a cache, is not split over ranks: run it on a module "
      "that is not marked");
  ZP_CHECK(argument(7).toBool() || query.dim() != 4 || query.size(1) == key.size(1), kOperator,
           ": expected as many key heads as query heads without enable_gqa, got ", key.size(1),
           " and ", query.size(1));
  ++count_;
  at::Tensor attended = context_attention(query, key, argument(2).toTensor(), world_,
                                          {.is_causal = argument(5).toBool(),
                                           .scale = argument(6).toOptional<double>(),
                                           .form = form_,
                                           .documents = {}});
  ++*meetings_;
  if (attended.requires_grad()) {
    attended.register_hook([meetings = meetings_](const at::Tensor&) { ++*meetings; });
  }
  // A region's forward has none, and it runs again in backward.
  if (c10::GradMode::is_enabled()) has_gradient_ = attended.requires_grad();
  torch::jit::drop(stack, kArguments);
  stack.emplace_back(std::move(attended));
}

bool SplitAttention::was_met() {
  const int64_t now = *meetings_;
  return std::exchange(meetings_before_, now) != now || !has_gradient_;
}

bool CountedAttention::replaces(const c10::OperatorHandle& handle) const {
  if (handle.schema().name() == kOperator) ++count_;
  return false;
}

void CountedAttention::run(torch::jit::Stack& /*stack*/) {
  TORCH_INTERNAL_ASSERT(false, "it replaces nothing");
}

ModelForwards::ModelForwards(const torch::nn::Module& module, comm::World ranks,
                             bool shares_samples)
    : module_(module),
      attention_(split_attention_of(module)),
      unsplit_(attention_ == nullptr && shares_samples ? std::make_shared<CountedAttention>()
                                                       : nullptr),
      ranks_(std::move(ranks)),
      model_(ranks_.modules()) {
  Marks::all().note_wrapped(module_);
}

ModelForwards::~ModelForwards() {
  Marks::all().forget_wrapped(module_);
}

void ModelForwards::begin() {
  of_model_.emplace(ranks_, c10::str(", forward ", ++forwards_, " of model ", model_));
  split_before_ = attention_calls();
  if (attention_ != nullptr) {
    attended_before_ = attention_->count();
    splitting_.emplace(attention_);
  } else if (unsplit_ != nullptr) {
    attended_before_ = unsplit_->count();
    splitting_.emplace(unsplit_);
  }
}

void ModelForwards::check() const {
  ZP_CHECK(unsplit_ == nullptr || unsplit_->count() == attended_before_ ||
               attention_calls() > split_before_,
           "forward() ran scaled_dot_product_attention over this rank's tokens alone, but ranks "
           "along \"context\" have other tokens of the same samples; call context_parallel(module, "
           "mesh[\"context\"]) before the module is wrapped, or parallel::context_attention() in "
           "its place");
  ZP_CHECK(
      attention_ == nullptr || attention_->count() > attended_before_,
      "forward() of a module that context_parallel() marked ran no "
      "scaled_dot_product_attention: what it computes sees this rank's tokens alone; call that "
      "operator, or parallel::context_attention() without the mark");
}

void ModelForwards::end() noexcept {
  splitting_.reset();
  of_model_.reset();
}

std::shared_ptr<SplitAttention> split_attention_of(const torch::nn::Module& module) {
  return Marks::all().find(module);
}

std::string marked_within(const torch::nn::Module& module) {
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    if (split_attention_of(*child.value()) != nullptr) return child.key();
  }
  return "";
}

}  // namespace context

void context_parallel(torch::nn::Module& module, const comm::World& world, ContextForm form) {
  ZP_CHECK(
      !context::Marks::all().is_wrapped(module),
      "context_parallel: the module is wrapped already, and the mark would do nothing; call it "
      "before DistributedDataParallel is constructed");
  const auto check_multiplies_elsewhere = [](const std::string& name, const torch::nn::Module& of) {
    ZP_CHECK(
        dynamic_cast<const torch::nn::MultiheadAttentionImpl*>(&of) == nullptr,
        "context_parallel: module \"", name,
        "\" is a torch::nn::MultiheadAttention, which multiplies queries and keys itself and would "
        "see this rank's tokens alone; use scaled_dot_product_attention between linear layers");
  };
  check_multiplies_elsewhere("", module);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    check_multiplies_elsewhere(child.key(), *child.value());
    ZP_CHECK(context::split_attention_of(*child.value()) == nullptr, "context_parallel: module \"",
             child.key(), "\" is marked already; mark the module that is wrapped, and no other");
  }
  context::Marks::all().add(module.shared_from_this(),
                            std::make_shared<context::SplitAttention>(world, form));
}

ContextScope::ContextScope(const torch::nn::Module& module) {
  auto attention = context::split_attention_of(module);
  ZP_CHECK(attention != nullptr,
           "ContextScope: the module is not marked; call context_parallel(module, "
           "mesh[\"context\"])");
  scope_ = std::make_unique<operators::ReplacementScope>(std::move(attention));
}

ContextScope::~ContextScope() = default;

}  // namespace zeropage::parallel
