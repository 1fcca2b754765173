#include "zero/update/state_witness.h"

#include <memory>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "memory/check.h"
#include "offload/lion.h"
#include "operators/tensor_mark.h"

namespace zeropage {
namespace {

using torch::optim::OptimizerParamState;

constexpr const char* kWhatToDo =
    "states lie in shards: read them by visit_owned_shards() (zero/owned_shards.h), set them by "
    "load_state(), or make the optimizer anew to begin without";

class RefusesAll final : public memory::TensorMark {
 public:
  explicit RefusesAll(std::string who) : TensorMark(std::move(who), On::kBuffer) {}

  bool replaces(const c10::OperatorHandle& /*handle*/) const override { return true; }
  bool run(const c10::OperatorHandle& handle, const at::Tensor& /*marked*/,
           torch::jit::Stack& /*stack*/) override {
    ZP_THROW(who(), ": ", handle.operator_name().name, " would see no values: ", kWhatToDo);
  }
};

std::unique_ptr<OptimizerParamState> entry_of(const std::string& class_name,
                                              const at::Tensor& refusing) {
  const auto with_moments = [&]<typename State>(std::unique_ptr<State> state) {
    state->exp_avg(refusing);
    state->exp_avg_sq(refusing);
    state->max_exp_avg_sq(refusing);
    return state;
  };
  if (class_name == "torch::optim::AdamW") {
    return with_moments(std::make_unique<torch::optim::AdamWParamState>());
  }
  if (class_name == "torch::optim::Adam") {
    return with_moments(std::make_unique<torch::optim::AdamParamState>());
  }
  if (class_name == "torch::optim::SGD") {
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(refusing);
    return state;
  }
  if (class_name == "torch::optim::Adagrad") {
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    state->sum(refusing);
    return state;
  }
  if (class_name == "torch::optim::RMSprop") {
    auto state = std::make_unique<torch::optim::RMSpropParamState>();
    state->square_avg(refusing);
    state->momentum_buffer(refusing);
    state->grad_avg(refusing);
    return state;
  }
  if (class_name == "zeropage::Lion") {
    auto state = std::make_unique<LionParamState>();
    state->exp_avg(refusing);
    return state;
  }
  return nullptr;
}

}  // namespace

StateWitness::StateWitness(torch::optim::Optimizer& optimizer, std::string class_name)
    : optimizer_(optimizer), class_name_(std::move(class_name)), refusing_(at::empty({0})) {
  memory::set_mark(refusing_,
                   c10::make_intrusive<RefusesAll>("state() of the sharded " + class_name_));
}

void StateWitness::enter() {
  const auto& groups = optimizer_.param_groups();
  for (; groups_ < groups.size(); ++groups_) {
    for (const at::Tensor& parameter : groups[groups_].params()) {
      auto entry = entry_of(class_name_, refusing_);
      if (!entry) return;
      auto& place = optimizer_.state()[parameter.unsafeGetTensorImpl()];
      if (place) continue;
      sum_ += reinterpret_cast<uintptr_t>(entry.get());
      place = std::move(entry);
    }
  }
}

void StateWitness::check(const char* who) const {
  uint64_t sum = 0;
  for (const auto& [parameter, entry] : std::as_const(optimizer_).state()) {
    sum += reinterpret_cast<uintptr_t>(entry.get());
  }
  ZP_CHECK(sum == sum_, who,
           ": something was put into the optimizer's state(), or taken out of it, which changes "
           "nothing: ",
           kWhatToDo);
}

}  // namespace zeropage
