#include "tests/proofs/counted_step.h"

#include <optional>

#include "examples/byte_gpt/gpt.h"
#include "tests/harness/device_ranks.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/zeropage.h"

namespace zeropage::testing {
namespace {

using memory::operator""_MiB;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using train_gpt::Gpt;

constexpr int64_t kHeads = 4;
constexpr int64_t kSequence = 16;
constexpr int64_t kPageWidth = 1024;
constexpr int kStepsBefore = 2;

Options options_of(const CountedStepOptions& how) {
  Options options;
  options.update_by = UpdateBy::kClass;  // the host has the fused update, that device has not
  options.stage = stage_of(how.stage);
  options.page_bytes = 64_MiB * how.width * how.width / (kPageWidth * kPageWidth);
  return options;
}

Gpt make_gpt(const CountedStepOptions& how, c10::Device device) {
  // Modules draw from the one generator of the process, and ranks are threads of it.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  train_gpt::GptConfig config;
  config.d_model = how.width;
  config.layers = how.layers;
  config.heads = kHeads;
  config.sequence = kSequence;
  Gpt gpt(config, /*seed=*/1);
  gpt->to(device);
  return gpt;
}

// What is counted between two moments at which all ranks meet.
class Counting {
 public:
  explicit Counting(comm::World& world) : world_(world) {
    meet("counting begins");
    if (world.rank() == 0) reset_fake_counters();
    meet("counting has begun");
  }

  PhaseEvents end_phase(const std::string& name) {
    meet(name);
    const FakeCounters now = fake_counters();
    meet(name);
    const auto mean = [&](int64_t now, int64_t before) {
      return static_cast<double>(now - before) / world_.size();
    };
    const PhaseEvents phase{.name = name,
                            .launches = mean(now.launches, before_.launches),
                            .host_waits = mean(now.host_syncs, before_.host_syncs),
                            .bytes_to_host = mean(now.bytes_to_host, before_.bytes_to_host)};
    before_ = now;
    return phase;
  }

 private:
  void meet(const std::string& why) { world_.communicator().barrier(why).wait(); }

  comm::World& world_;
  FakeCounters before_;
};

StepEvents count_on(comm::World& world, const CountedStepOptions& how) {
  const c10::Device device = world.device();
  DistributedDataParallel<Gpt> model(make_gpt(how, device), world, options_of(how));
  // One operator a parameter; a class with states would hide what the step itself launches.
  Optimizer<SGD> optimizer(model, SGDOptions(1e-3));
  std::optional<Accumulator> accumulator;
  if (how.micro_steps > 0) {
    accumulator.emplace(model, AccumulatorOptions{.micro_steps = how.micro_steps});
  }
  const torch::Tensor tokens = torch::arange(kSequence).view({1, -1}).to(device);
  const auto run_backward = [&] {
    const torch::Tensor loss = train_gpt::next_token_loss(model(tokens), tokens);
    accumulator ? accumulator->backward(loss) : loss.backward();
  };
  const auto run_backwards = [&] {
    if (!accumulator) optimizer.zero_grad();
    for (int64_t micro = 0; micro < std::max<int64_t>(how.micro_steps, 1); ++micro) run_backward();
  };
  const auto make_step = [&] {
    if (accumulator) {
      accumulator->step(optimizer);
    } else {
      optimizer.step();
    }
  };
  for (int step = 0; step < kStepsBefore; ++step) {
    run_backwards();
    make_step();
  }
  StepEvents events;
  for (const torch::Tensor& parameter : model.parameters()) {
    events.parameters += parameter.numel();
    ++events.tensors;
  }
  events.pages = static_cast<int64_t>(sharded_parameters_of(model).pages->layouts().size());
  Counting counting(world);
  run_backwards();
  events.phases.push_back(counting.end_phase("forward and backward"));
  make_step();
  events.phases.push_back(counting.end_phase("step"));
  for (const auto& [name, count] : fake_launches()) {
    events.launches[name] = static_cast<double>(count) / world.size();
  }
  return events;
}

}  // namespace

PhaseEvents StepEvents::total() const {
  PhaseEvents total{.name = "in all"};
  for (const PhaseEvents& phase : phases) {
    total.launches += phase.launches;
    total.host_waits += phase.host_waits;
    total.bytes_to_host += phase.bytes_to_host;
  }
  return total;
}

StepEvents count_step(const CountedStepOptions& options) {
  StepEvents events;
  on_devices(Carrier::kDevice, options.ranks, [&](comm::World& world) {
    StepEvents own = count_on(world, options);
    if (world.rank() == 0) events = std::move(own);
  });
  return events;
}

}  // namespace zeropage::testing
