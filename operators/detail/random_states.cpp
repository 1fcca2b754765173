#include "operators/detail/random_states.h"

#include <algorithm>
#include <array>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>

#include "base/exact.h"
#include "operators/generator_state.h"
#include "zeropage/check.h"

namespace zeropage::operators::detail {
namespace {

// In the first words of an engine; the state's number follows, then the recorder's address.
constexpr uint32_t kMark = 0x7a65726f;
constexpr size_t kWords = 4;

using Words = std::array<uint32_t, kWords>;

Words mark_of(size_t state, const void* recorder) {
  const auto address = reinterpret_cast<uintptr_t>(recorder);
  return {kMark, base::narrow<uint32_t>(state), static_cast<uint32_t>(address),
          static_cast<uint32_t>(address >> 32)};
}

at::CPUGeneratorImpl& engine_of(const at::Generator& generator) {
  ZP_CHECK(generator.device().is_cpu(),
           "deferred construction: expected a generator on cpu, got one on ", generator.device(),
           "; draw the initial values on the host");
  return *generator.get<at::CPUGeneratorImpl>();
}

void put_mark(const at::Generator& generator, size_t state, const void* recorder) {
  at::CPUGeneratorImpl& impl = engine_of(generator);
  const std::lock_guard lock(impl.mutex_);
  at::mt19937 engine = impl.engine();
  at::mt19937_data_pod data = engine.data();
  const Words mark = mark_of(state, recorder);
  std::copy(mark.begin(), mark.end(), data.state_.begin());
  // The state is that after a reload, so a draw from it leaves the mark and moves `next_`.
  data.left_ = at::MERSENNE_STATE_N;
  data.next_ = 0;
  engine.set_data(data);
  impl.set_engine(engine);
}

struct Mark {
  size_t state;
  bool of_this_recorder;
  bool drawn_from;
};

std::optional<Mark> mark_on(const at::Generator& generator, const void* recorder) {
  at::CPUGeneratorImpl& impl = engine_of(generator);
  const std::lock_guard lock(impl.mutex_);
  const at::mt19937_data_pod data = impl.engine().data();
  if (data.state_[0] != kMark) return std::nullopt;
  const size_t state = data.state_[1];
  const Words expected = mark_of(state, recorder);
  return Mark{state, std::equal(expected.begin(), expected.end(), data.state_.begin()),
              data.next_ != 0};
}

}  // namespace

// The generator that it guards is a global of LibTorch.
std::mutex& RandomRecorder::mutex() {
  static std::mutex mutex;
  return mutex;
}

RandomRecorder::~RandomRecorder() {
  for (const RandomStates::Tracked& tracked : states_.generators) {
    const std::optional<Mark> mark = mark_on(tracked.generator, this);
    if (!mark || !mark->of_this_recorder) continue;
    const size_t seeded = states_.states[mark->state].seeded;
    assign_state(tracked.generator, states_.states[seeded].constant);
  }
}

size_t RandomRecorder::state_of(const at::Generator& generator) {
  const std::optional<Mark> mark = mark_on(generator, this);
  if (mark) {
    ZP_CHECK(mark->of_this_recorder,
             "deferred construction: the constructor uses a generator state that was saved while "
             "another module was constructed, when nothing had been drawn; construct that module "
             "plainly");
    ZP_CHECK(!mark->drawn_from,
             "deferred construction: expected that the constructor draws by operators alone, but a "
             "number was drawn from its generator without one, or by another thread; construct the "
             "module plainly, or while no other thread draws");
  }
  const size_t state = mark ? mark->state : states_.states.size();
  if (!mark) {
    states_.states.push_back({copy_of(generator), state});
    put_mark(generator, state, this);
  }
  auto& generators = states_.generators;
  const auto tracked = std::find_if(generators.begin(), generators.end(), [&](const auto& known) {
    return known.generator == generator;
  });
  if (tracked == generators.end()) {
    generators.push_back({generator, state});
  } else {
    tracked->last = state;
  }
  return state;
}

size_t RandomRecorder::after_draw(const at::Generator& generator, size_t before) {
  TORCH_INTERNAL_ASSERT(state_of(generator) == before, "an operator drew on the meta device");
  const size_t after = states_.states.size();
  states_.states.push_back({at::Generator(), states_.states[before].seeded});
  put_mark(generator, after, this);
  return after;
}

void RandomRecorder::finish() {
  for (const RandomStates::Tracked& tracked : states_.generators) {
    state_of(at::Generator(tracked.generator));
  }
}

}  // namespace zeropage::operators::detail
