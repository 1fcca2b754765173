#include "zero/update/state_witness.h"

#include <algorithm>
#include <array>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "operators/tensor_mark.h"
#include "zero/parameter_scan.h"
#include "zero/update/entry_row.h"
#include "zeropage/check.h"
#include "zeropage/lion.h"

namespace zeropage::zero {
namespace {

using torch::optim::OptimizerParamState;

constexpr const char* kWhatToDo =
    "states lie in shards: read them by visit_owned_shards() (zeropage/owned_shards.h), set them "
    "by "
    "load_state(), or make the optimizer anew to begin without";

class RefusesAll final : public operators::TensorMark {
 public:
  explicit RefusesAll(std::string who) : TensorMark(std::move(who), On::kBuffer) {}

  bool replaces(const c10::OperatorHandle& /*handle*/) const override { return true; }
  bool run(const c10::OperatorHandle& handle, const at::Tensor& /*marked*/,
           torch::jit::Stack& /*stack*/) override {
    ZP_THROW(who(), ": ", handle.operator_name().name, " would see no values: ", kWhatToDo);
  }
};

// What reads as no count of steps.
constexpr int64_t kNoSteps = -1;

// An entry in a row of them. Whoever has it deletes it as any other.
template <typename State>
class EntryInRow final : public State {
 public:
  static void* operator new(size_t /*bytes*/, EntryRow& row) { return row.take(); }
  static void operator delete(void* entry, EntryRow& /*row*/) { EntryRow::give_back(entry); }
  static void operator delete(void* entry) { EntryRow::give_back(entry); }
};

// The entries of one class. visit: calls its argument with each tensor of an entry; steps: whether it counts them.
template <typename State>
struct Entries {
  template <typename Visit>
  static void visit(State& state, const Visit& visit) {
    if constexpr (requires { state.exp_avg(); }) visit(state.exp_avg());
    if constexpr (requires { state.exp_avg_sq(); }) visit(state.exp_avg_sq());
    if constexpr (requires { state.max_exp_avg_sq(); }) visit(state.max_exp_avg_sq());
    if constexpr (requires { state.momentum_buffer(); }) visit(state.momentum_buffer());
    if constexpr (requires { state.sum(); }) visit(state.sum());
    if constexpr (requires { state.square_avg(); }) visit(state.square_avg());
    if constexpr (requires { state.grad_avg(); }) visit(state.grad_avg());
  }
  static std::unique_ptr<OptimizerParamState> make(const at::Tensor& refusing, EntryRow& row) {
    std::unique_ptr<State> state(new (row) EntryInRow<State>());
    visit(*state, [&](at::Tensor& tensor) { tensor = refusing; });
    if constexpr (requires { state->step(); }) state->step(kNoSteps);
    return state;
  }
  static bool is_untouched(OptimizerParamState& entry, const at::Tensor& refusing) {
    if (typeid(entry) != typeid(EntryInRow<State>)) return false;
    auto& state = static_cast<State&>(entry);
    bool is_same = true;
    visit(state, [&](at::Tensor& tensor) { is_same = is_same && tensor.is_same(refusing); });
    if constexpr (requires { state.step(); }) is_same = is_same && state.step() == kNoSteps;
    return is_same;
  }
};

struct Class {
  const char* name;
  size_t entry_bytes;
  std::unique_ptr<OptimizerParamState> (*make)(const at::Tensor& refusing, EntryRow& row);
  bool (*is_untouched)(OptimizerParamState& entry, const at::Tensor& refusing);
};

template <typename State>
constexpr Class class_of(const char* name) {
  return {name, sizeof(EntryInRow<State>), &Entries<State>::make, &Entries<State>::is_untouched};
}

constexpr std::array kClasses = {
    class_of<torch::optim::AdamWParamState>("torch::optim::AdamW"),
    class_of<torch::optim::AdamParamState>("torch::optim::Adam"),
    class_of<torch::optim::SGDParamState>("torch::optim::SGD"),
    class_of<torch::optim::AdagradParamState>("torch::optim::Adagrad"),
    class_of<torch::optim::RMSpropParamState>("torch::optim::RMSprop"),
    class_of<LionParamState>("zeropage::Lion"),
};

// Null for a class that is not among them.
const Class* find_class(const std::string& name) {
  const auto found = std::find_if(kClasses.begin(), kClasses.end(),
                                  [&](const Class& known) { return known.name == name; });
  return found == kClasses.end() ? nullptr : &*found;
}

}  // namespace

StateWitness::StateWitness(torch::optim::Optimizer& optimizer, std::string class_name)
    : optimizer_(optimizer), class_name_(std::move(class_name)), refusing_(at::empty({0})) {
  operators::set_mark(refusing_,
                      c10::make_intrusive<RefusesAll>("state() of the sharded " + class_name_));
}

void StateWitness::enter() {
  const Class* const known = find_class(class_name_);
  if (known == nullptr) return;
  const auto& groups = optimizer_.param_groups();
  for (; groups_ < groups.size(); ++groups_) {
    const std::vector<at::Tensor>& parameters = groups[groups_].params();
    const EntryRow::Handle row = EntryRow::make(parameters.size(), known->entry_bytes);
    for (const at::Tensor& parameter : parameters) {
      auto& place = optimizer_.state()[parameter.unsafeGetTensorImpl()];
      if (place) continue;
      place = known->make(refusing_, *row);
      sum_ += reinterpret_cast<uintptr_t>(place.get());
    }
  }
}

bool StateWitness::is_as_noted() const {
  size_t at = 0;
  for (const auto& [parameter, entry] : optimizer_.state()) {
    if (at == entries_.size() || entries_[at] != entry.get()) return false;
    ++at;
  }
  return at == entries_.size();
}

void StateWitness::note_entries() {
  noted_sum_ = 0;
  entries_.clear();
  by_address_.clear();
  for (const auto& [parameter, entry] : optimizer_.state()) {
    noted_sum_ += reinterpret_cast<uintptr_t>(entry.get());
    entries_.push_back(entry.get());
    if (entry) by_address_.push_back(entry.get());
  }
  std::sort(by_address_.begin(), by_address_.end());
}

void StateWitness::check(const char* who) {
  if (!is_as_noted()) note_entries();
  const Class* const known = find_class(class_name_);
  const auto is_touched = [&](size_t i) {
    look_ahead(i, by_address_.size(), [&](size_t other) { return by_address_[other]; });
    return known != nullptr && !known->is_untouched(*by_address_[i], refusing_);
  };
  ZP_CHECK(
      noted_sum_ == sum_ && first_in_parallel(by_address_.size(), is_touched) == by_address_.size(),
      who,
      ": something was put into the optimizer's state(), changed in it or taken out of it, which "
      "changes nothing: ",
      kWhatToDo);
}

}  // namespace zeropage::zero
