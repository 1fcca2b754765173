#include "operators/operator_labels.h"

#include <mutex>
#include <set>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

namespace zeropage::operators {
namespace {

// Names live as long as the process, since labels of blocks outlive their models.
const char* lasting(const std::string& name) {
  static std::mutex mutex;
  static auto* const names = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return names->insert(name).first->c_str();
}

// "blocks.3.up" for "blocks.3.up.weight". A parameter of the wrapped module itself goes by its own name.
std::string module_of(const std::string& parameter) {
  const size_t end = parameter.rfind('.');
  return end == std::string::npos ? parameter : parameter.substr(0, end);
}

struct Modules {
  std::shared_mutex mutex;
  std::unordered_map<const c10::TensorImpl*, const char*> by_parameter;  // guarded by mutex
};
Modules& modules() {
  static auto* const instance = new Modules;
  return *instance;
}

struct Telling {
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  const void* for_whom = nullptr;
};
thread_local Telling telling;
// How deep operators are within operators: the outermost is told.
thread_local int depth = 0;

const char* module_that_owns(const at::RecordFunction& function) {
  Modules& known = modules();
  const std::shared_lock lock(known.mutex);
  for (const c10::IValue& input : function.inputs()) {
    if (!input.isTensor()) continue;
    const at::Tensor& tensor = input.toTensor();
    // A linear layer without bias multiplies by a view of its weight.
    const bool is_view = tensor.defined() && tensor.is_view();
    const auto at =
        known.by_parameter.find((is_view ? tensor._base() : tensor).unsafeGetTensorImpl());
    if (at != known.by_parameter.end()) return at->second;
  }
  return nullptr;
}

// Around the operators of a node, which are told beside the node's name.
bool is_of_engine(const at::RecordFunction& function) {
  return std::string_view(function.name()).starts_with("autograd::engine::");
}

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction& function) {
  if (is_of_engine(function) || depth++ > 0) return nullptr;
  memory::OperatorLabel& label = memory::operator_label();
  label.name = lasting(function.name());
  const bool in_backward = torch::autograd::get_current_node() != nullptr;
  // Nobody tells of the end of a backward.
  if (!in_backward && label.phase == memory::StepPhase::kBackward)
    label.phase = memory::StepPhase::kOther;
  if (in_backward) label.phase = memory::StepPhase::kBackward;
  const char* const module = module_that_owns(function);
  label.is_of_module = module != nullptr;
  if (module != nullptr) label.module = module;
  // What a script does between two steps comes after no module.
  if (module == nullptr && label.phase == memory::StepPhase::kOther) label.module = "";
  return nullptr;
}

void end_operator(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (is_of_engine(function) || depth == 0 || --depth > 0) return;
  memory::operator_label().name = "";
}

}  // namespace

struct OperatorLabels::Shared {
  std::vector<at::Tensor> parameters;
};

OperatorLabels::OperatorLabels(const std::vector<Parameter>& parameters)
    : shared_(std::make_shared<Shared>()) {
  Modules& known = modules();
  const std::unique_lock lock(known.mutex);
  for (const Parameter& parameter : parameters) {
    shared_->parameters.push_back(parameter.tensor);
    known.by_parameter.try_emplace(parameter.tensor.unsafeGetTensorImpl(),
                                   lasting(module_of(parameter.name)));
  }
}

OperatorLabels::~OperatorLabels() {
  {
    Modules& known = modules();
    const std::unique_lock lock(known.mutex);
    for (const at::Tensor& parameter : shared_->parameters) {
      known.by_parameter.erase(parameter.unsafeGetTensorImpl());
    }
  }
  if (telling.for_whom != this) return;
  at::removeCallback(telling.handle);
  telling = {};
  depth = 0;
  memory::operator_label() = {};
}

void OperatorLabels::begin(memory::StepPhase phase) {
  if (telling.for_whom == nullptr) {
    telling.handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback(begin_operator, end_operator)
                                       .needsInputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
    telling.for_whom = this;
  }
  memory::OperatorLabel& label = memory::operator_label();
  label.phase = phase;
  if (phase == memory::StepPhase::kForward) label.module = "";
}

}  // namespace zeropage::operators
