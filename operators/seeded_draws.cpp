#include "operators/seeded_draws.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>

#include "base/rank_threads.h"
#include "operators/generator_state.h"
#include "operators/operator_interceptor.h"
#include "operators/operator_schema.h"
#include "zeropage/check.h"

namespace zeropage::operators {
namespace {

thread_local DrawSeeds* current_seeds = nullptr;

const at::Generator& default_generator() {
  return at::detail::getDefaultCPUGenerator();
}

uint64_t drawn_seed() {
  at::Generator generator = default_generator();
  const std::lock_guard lock(generator.mutex());
  return generator.get<at::CPUGeneratorImpl>()->random64();
}

bool is_on_host(at::ArrayRef<c10::IValue> arguments) {
  return std::all_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
    if (argument.isDevice()) return argument.toDevice().is_cpu();
    const auto tensors = tensors_in(argument);
    return std::all_of(tensors.begin(), tensors.end(),
                       [](const at::Tensor& t) { return !t.defined() || t.is_cpu(); });
  });
}

// Gives operators that would draw from the default generator another one.
class SeededDraws final : public OperatorInterceptor {
 public:
  explicit SeededDraws(uint64_t seed) : generator_(at::detail::createCPUGenerator(seed)) {}

  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) override {
    give(handle, stack);
    run_operator_from_outside(handle, keys, stack);
  }

  void give(const c10::OperatorHandle& handle, torch::jit::Stack& stack) {
    const auto index = generator_argument(handle);
    if (!index) return;
    const size_t count = handle.schema().arguments().size();
    const auto arguments = torch::jit::last(stack, count);
    if (!draws_by_default(handle, arguments) || !is_on_host(arguments)) return;
    torch::jit::peek(stack, *index, count) = generator_;
    has_given_ = true;
  }
  bool has_given() const { return has_given_; }

 private:
  const at::Generator generator_;
  bool has_given_ = false;
};

// LibTorch's operators on the host draw by operators that take a generator. Another library's need not.
class DefaultGeneratorWatch {
 public:
  DefaultGeneratorWatch(const c10::OperatorHandle& handle, const SeededDraws& draws)
      : handle_(handle), draws_(draws) {
    if (!handle.operator_name().name.starts_with("aten::")) before_ = copy_of(default_generator());
  }
  void check() const {
    ZP_CHECK(!before_.defined() || draws_.has_given() ||
                 same_state(copy_of(default_generator()), before_),
             handle_.operator_name().name,
             ": it draws from the default generator, which ranks that are threads of one process "
             "share, so its "
             "numbers cannot be repeated for backward; start the ranks as processes "
             "(World::launch, zp run), or draw "
             "by an operator of LibTorch, such as torch::rand");
  }

 private:
  const c10::OperatorHandle handle_;
  const SeededDraws& draws_;
  at::Generator before_;
};

template <typename Run>
void run_under(uint64_t seed, const c10::OperatorHandle& handle, torch::jit::Stack& stack,
               const Run& run) {
  SeededDraws draws(seed);
  draws.give(handle, stack);
  const DefaultGeneratorWatch watch(handle, draws);
  {
    const InterceptorScope scope(&draws);
    run();
  }
  watch.check();
}

}  // namespace

DrawSeeds* DrawSeeds::current() {
  return current_seeds;
}

DrawSeedsScope::DrawSeedsScope(DrawSeeds& seeds) : before_(std::exchange(current_seeds, &seeds)) {}

DrawSeedsScope::~DrawSeedsScope() {
  current_seeds = before_;
}

bool draws_have_seeds() {
  return current_seeds != nullptr || base::ranks_are_threads();
}

uint64_t next_seed(const c10::OperatorHandle& handle) {
  return current_seeds != nullptr ? current_seeds->next(handle) : drawn_seed();
}

uint64_t RecordedSeeds::next(const c10::OperatorHandle& handle) {
  const uint64_t seed = around_ != nullptr ? around_->next(handle) : drawn_seed();
  record_.draws.push_back({handle, seed});
  return seed;
}

uint64_t RepeatedSeeds::next(const c10::OperatorHandle& handle) {
  constexpr const char* kAdvice = "; a repetition must run the same operators on the same values";
  ZP_CHECK(index_ < record_.draws.size(), who_, ": the repetition draws random numbers by ",
           handle.operator_name().name, " after the first run's last draw", kAdvice);
  const SeedRecord::Draw& draw = record_.draws[index_++];
  ZP_CHECK(draw.handle == handle, who_, ": the repetition draws random numbers by ",
           handle.operator_name().name, ", but the first run by ", draw.handle.operator_name().name,
           kAdvice);
  return draw.seed;
}

bool draws_by_default(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments) {
  if (!draws(handle)) return false;
  const auto index = generator_argument(handle);
  if (!index || !arguments[*index].isGenerator()) return true;
  return arguments[*index].toGenerator() == default_generator();
}

void run_seeded(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                torch::jit::Stack& stack, uint64_t seed) {
  run_under(seed, handle, stack, [&] { run_operator_from_outside(handle, keys, stack); });
}

void call_seeded(const c10::OperatorHandle& handle, torch::jit::Stack& stack, uint64_t seed) {
  run_under(seed, handle, stack, [&] { handle.callBoxed(&stack); });
}

void run_with_current_seeds(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                            torch::jit::Stack& stack) {
  const size_t count = handle.schema().arguments().size();
  if (current_seeds != nullptr && draws_by_default(handle, torch::jit::last(stack, count))) {
    run_seeded(handle, keys, stack, next_seed(handle));
  } else {
    run_operator(handle, keys, stack);
  }
}

}  // namespace zeropage::operators
