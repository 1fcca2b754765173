#include "operators/construction_tape.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "base/exact.h"
#include "operators/detail/operator_recorder.h"
#include "operators/detail/tape_player.h"
#include "operators/generator_state.h"
#include "zeropage/check.h"

namespace zeropage::operators {
namespace {

using operators::detail::RandomStates;
using operators::detail::RecordedStorage;
using operators::detail::ReplayStep;
using operators::detail::Tape;

// The storages of the targets, each with the dtype of the first target on it.
std::vector<std::pair<size_t, at::ScalarType>> storages_of(const Tape& tape,
                                                           const std::vector<at::Tensor>& targets) {
  std::vector<std::pair<size_t, at::ScalarType>> storages;
  std::vector<bool> seen(tape.storages.size(), false);
  for (size_t index = 0; index < targets.size(); ++index) {
    const at::Tensor& target = targets[index];
    const auto storage = tape.find(target);
    ZP_CHECK(storage.has_value(), "replaying a construction: target ", index,
             ": expected a tensor that the recorded constructor made, got ",
             target.defined() ? operators::detail::describe(target) : "an undefined tensor",
             "; leave out what has values already, and record what has none");
    if (!seen[*storage]) storages.emplace_back(*storage, target.scalar_type());
    seen[*storage] = true;
  }
  return storages;
}

void refuse_kept_storages(const Tape& tape, const std::vector<size_t>& targets) {
  std::vector<bool> is_target(tape.storages.size(), false);
  for (const size_t storage : targets) is_target[storage] = true;
  for (size_t storage = 0; storage < tape.storages.size(); ++storage) {
    const RecordedStorage& recorded = tape.storages[storage];
    ZP_CHECK(is_target[storage] || recorded.meta.use_count() == 1,
             "replaying a construction: the module, or the autograd graph of its tensors, keeps a "
             "tensor ",
             at::IntArrayRef(recorded.sizes), " made by ", recorded.made_by,
             " that is not among the targets and would stay without values; register it as a "
             "buffer, do not keep it, or compute initial values under torch::NoGradGuard");
  }
}

void refuse_changed_captures(const Tape& tape, const std::vector<size_t>& targets,
                             const std::vector<ReplayStep>& steps) {
  std::vector<size_t> read = targets;
  for (const ReplayStep& step : steps) {
    const auto& reads = tape.operators[step.operator_index].reads;
    read.insert(read.end(), reads.begin(), reads.end());
  }
  for (const size_t storage : read) {
    const RecordedStorage& recorded = tape.storages[storage];
    if (!recorded.captured_version) continue;
    ZP_CHECK(recorded.captured._version() == *recorded.captured_version,
             "replaying a construction: expected the tensor ", at::IntArrayRef(recorded.sizes),
             " that the constructor read as it was then, but it was changed since; replay before "
             "it changes, or give the constructor a copy");
  }
}

at::Tensor whole(const c10::Storage& storage, at::ScalarType dtype) {
  at::Tensor values = at::empty({0}, dtype);
  const auto bytes = base::narrow<int64_t>(storage.nbytes());
  values.set_(storage, 0, {base::div_exact(bytes, base::narrow<int64_t>(values.element_size()))},
              {1});
  return values;
}

// The generators that nobody used since the recording: a replay carries them on.
std::vector<RandomStates::Tracked> untouched(const RandomStates& random) {
  const std::lock_guard lock(operators::detail::RandomRecorder::mutex());
  std::vector<RandomStates::Tracked> generators;
  for (const RandomStates::Tracked& tracked : random.generators) {
    if (same_state(copy_of(tracked.generator), random.left_at(tracked))) {
      generators.push_back(tracked);
    }
  }
  return generators;
}

void carry_on(const RandomStates& random, const std::vector<RandomStates::Tracked>& generators,
              const operators::detail::TapePlayer& player) {
  const std::lock_guard lock(operators::detail::RandomRecorder::mutex());
  for (const RandomStates::Tracked& tracked : generators) {
    if (!same_state(copy_of(tracked.generator), random.left_at(tracked))) continue;
    assign_state(tracked.generator, player.state(tracked.last));
  }
}

}  // namespace

ConstructionTape::ConstructionTape(const std::function<void()>& construct)
    : tape_(std::make_unique<Tape>()) {
  ZP_CHECK(!operators::detail::OperatorRecorder::records(),
           "deferred construction: expected a thread that records nothing, but this one records a "
           "construction already; construct the inner module as part of the outer one");
  const std::lock_guard lock(operators::detail::RandomRecorder::mutex());
  operators::detail::OperatorRecorder recorder(*tape_);
  try {
    const InterceptorScope recording(&recorder);
    construct();
  } catch (const c10::Error& error) {
    const std::string reason = memory::message_of(error);
    ZP_CHECK(reason.find("data is not allocated yet") == std::string::npos,
             "deferred construction: the constructor reads or writes the memory of a tensor, which "
             "has none before the construction is replayed; construct the module plainly, or fill "
             "the tensor by operators (torch::from_blob gives one with memory)");
    throw;
  }
  recorder.finish();
}

ConstructionTape::~ConstructionTape() = default;
ConstructionTape::ConstructionTape(ConstructionTape&& other) noexcept = default;
ConstructionTape& ConstructionTape::operator=(ConstructionTape&& other) noexcept = default;

bool ConstructionTape::is_recording() {
  return operators::detail::OperatorRecorder::records();
}

bool ConstructionTape::holds(const at::Tensor& tensor) const {
  return tape_->find(tensor).has_value();
}

void ConstructionTape::replay(const std::vector<at::Tensor>& targets, const Sink& sink) const {
  ZP_CHECK(!operators::detail::OperatorRecorder::records(),
           "replaying a construction: expected a thread that records nothing; replay after the "
           "outer construction");
  const at::NoGradGuard no_grad;
  const Tape& tape = *tape_;
  std::vector<size_t> storages, states;
  std::vector<at::ScalarType> dtypes(tape.storages.size());
  for (const auto& [storage, dtype] : storages_of(tape, targets)) {
    storages.push_back(storage);
    dtypes[storage] = dtype;
  }
  refuse_kept_storages(tape, storages);
  const auto generators = untouched(tape.random);
  for (const RandomStates::Tracked& tracked : generators) states.push_back(tracked.last);
  const std::vector<ReplayStep> steps = operators::detail::plan_replay(tape, storages, states);
  refuse_changed_captures(tape, storages, steps);

  operators::detail::TapePlayer player(tape);
  const auto hand_over = [&](size_t storage) {
    sink(*tape.storages[storage].meta.unsafeGetStorageImpl(),
         whole(player.take(storage), dtypes[storage]));
  };
  for (const size_t storage : storages) {
    if (tape.storages[storage].captured.defined()) hand_over(storage);
  }
  for (const ReplayStep& step : steps) {
    player.run(step);
    for (const size_t storage : step.hand_over) hand_over(storage);
  }
  carry_on(tape.random, generators, player);
}

}  // namespace zeropage::operators
