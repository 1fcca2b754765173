#include "operators/detail/tape_player.h"

#include <algorithm>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>

#include "operators/detail/operator_call.h"
#include "operators/generator_state.h"
#include "zeropage/check.h"

namespace zeropage::operators::detail {
namespace {

c10::Storage allocate(int64_t bytes) {
  return at::empty({bytes}, at::kByte).storage();
}

// While it lives, the default generator has another state.
class BorrowedDefaultGenerator {
 public:
  explicit BorrowedDefaultGenerator(const at::Generator& state)
      : state_(state), lock_(RandomRecorder::mutex()), before_(copy_of(generator())) {
    assign_state(generator(), state_);
  }
  ~BorrowedDefaultGenerator() {
    assign_state(state_, generator());
    assign_state(generator(), before_);
  }
  BorrowedDefaultGenerator(const BorrowedDefaultGenerator&) = delete;
  BorrowedDefaultGenerator& operator=(const BorrowedDefaultGenerator&) = delete;

 private:
  static const at::Generator& generator() { return at::detail::getDefaultCPUGenerator(); }

  const at::Generator& state_;
  const std::lock_guard<std::mutex> lock_;
  const at::Generator before_;
};

bool sees_the_same(const at::Tensor& tensor, const TensorView& view) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.strides() == view.strides &&
         tensor.storage_offset() == view.offset && tensor.is_conj() == view.conjugated &&
         tensor.is_neg() == view.negated &&
         tensor.storage().nbytes() == static_cast<size_t>(view.storage_bytes);
}

}  // namespace

TapePlayer::TapePlayer(const Tape& tape)
    : tape_(tape), storages_(tape.storages.size()), states_(tape.random.states.size()) {}

void TapePlayer::run(const ReplayStep& step) {
  const RecordedOperator& recorded = tape_.operators[step.operator_index];
  for (const size_t storage : recorded.reads) {
    TORCH_INTERNAL_ASSERT(storages_[storage] || tape_.storages[storage].captured.defined());
  }
  {
    torch::jit::Stack stack;
    for (const Argument& argument : recorded.arguments) {
      stack.push_back(
          argument.with([&](const auto& view) { return view ? tensor_for(*view) : at::Tensor(); }));
    }
    try {
      if (recorded.draw) {
        draw(recorded, step, stack);
      } else {
        recorded.handle.callBoxed(&stack);
      }
    } catch (c10::Error& error) {
      error.add_context("replaying a construction: " + name_of(recorded.handle));
      throw;
    }
    bind_results(recorded, stack);
  }
  for (const size_t storage : step.release) storages_[storage] = c10::Storage();
}

c10::Storage TapePlayer::take(size_t storage) {
  const at::Tensor& captured = tape_.storages[storage].captured;
  if (!captured.defined()) return std::exchange(storages_[storage], c10::Storage());
  const auto bytes = static_cast<int64_t>(captured.storage().nbytes());
  at::Tensor whole = at::empty({0}, at::kByte);
  whole.set_(captured.storage(), 0, {bytes}, {1});
  return whole.clone().storage();
}

const at::Generator& TapePlayer::state(size_t number) const {
  const at::Generator& constant = tape_.random.states[number].constant;
  return constant.defined() ? constant : states_[number];
}

c10::Storage& TapePlayer::storage_for(const TensorView& view) {
  c10::Storage& storage = storages_[view.storage];
  if (!storage) {
    const at::Tensor& captured = tape_.storages[view.storage].captured;
    storage = captured.defined() ? captured.storage() : allocate(view.storage_bytes);
  }
  return storage;
}

at::Tensor TapePlayer::tensor_for(const TensorView& view) {
  return tensor_of(view, storage_for(view));
}

void TapePlayer::draw(const RecordedOperator& recorded, const ReplayStep& step,
                      torch::jit::Stack& stack) {
  const Draw& draw = *recorded.draw;
  const bool is_constant = tape_.random.states[draw.before].constant.defined();
  at::Generator generator = step.last_use_of_state && !is_constant
                                ? std::exchange(states_[draw.before], at::Generator())
                                : copy_of(state(draw.before));
  if (draw.argument) {
    stack[*draw.argument] = generator;
    recorded.handle.callBoxed(&stack);
  } else {
    const BorrowedDefaultGenerator borrowed(generator);
    recorded.handle.callBoxed(&stack);
  }
  states_[draw.after] = std::move(generator);
}

void TapePlayer::bind_results(const RecordedOperator& recorded, const torch::jit::Stack& stack) {
  for (size_t index = 0; index < recorded.results.size(); ++index) {
    const auto& views = recorded.results[index];
    const std::vector<at::Tensor> results = tensors_in(stack[index]);
    TORCH_INTERNAL_ASSERT(results.size() == views.size());
    for (size_t position = 0; position < views.size(); ++position) {
      if (views[position]) bind(recorded, *views[position], results[position]);
    }
  }
}

void TapePlayer::bind(const RecordedOperator& recorded, const TensorView& view,
                      const at::Tensor& result) {
  ZP_CHECK(result.defined() && result.sizes() == view.sizes && result.scalar_type() == view.dtype,
           "replaying a construction: ", name_of(recorded.handle), ": expected ", view.dtype, " ",
           at::IntArrayRef(view.sizes), " as on the meta device, got ",
           result.defined() ? describe(result) : "no tensor",
           "; set the default dtype of the construction, or construct the module plainly");
  c10::Storage& storage = storages_[view.storage];
  if (!storage && sees_the_same(result, view) && !in_use(result.storage(), recorded)) {
    storage = result.storage();
  }
  const at::Tensor bound = tensor_for(view);
  if (!bound.is_alias_of(result)) bound.copy_(result);
}

bool TapePlayer::in_use(const c10::Storage& storage, const RecordedOperator& recorded) const {
  const auto is_it = [&](size_t number) {
    return storages_[number] && storages_[number].is_alias_of(storage);
  };
  for (const auto* numbers : {&recorded.reads, &recorded.overwrites, &recorded.makes}) {
    if (std::any_of(numbers->begin(), numbers->end(), is_it)) return true;
  }
  return false;
}

}  // namespace zeropage::operators::detail
