#include "planning/plan.h"

#include <algorithm>
#include <cmath>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_strided.h>

#include "memory/check.h"
#include "operators/generator_state.h"
#include "planning/trial.h"

namespace zeropage {
namespace {

using detail::StepFigures;
using detail::Trial;
using memory::Tier;

constexpr std::array kPolicies = {CheckpointPolicy::kSelective, CheckpointPolicy::kNone,
                                  CheckpointPolicy::kBlocks};
constexpr std::array kTiers = {Tier::kDevice, Tier::kHost, Tier::kNvme};

// Constructors draw initial values, though nobody gets them.
class UntouchedGenerator {
 public:
  UntouchedGenerator()
      : generator_(at::detail::getDefaultCPUGenerator()), before_(memory::copy_of(generator_)) {}
  ~UntouchedGenerator() { memory::assign_state(generator_, before_); }
  UntouchedGenerator(const UntouchedGenerator&) = delete;
  UntouchedGenerator& operator=(const UntouchedGenerator&) = delete;

 private:
  const at::Generator generator_;
  const at::Generator before_;
};

void check(const WorldDescription& world, const PlanOptions& options) {
  ZP_CHECK(world.ranks >= 1 && world.ranks <= comm::kMostSimulatedRanks,
           "WorldDescription::ranks: expected 1 to ", comm::kMostSimulatedRanks, ", got ",
           world.ranks);
  ZP_CHECK(world.ranks_per_host >= 1, "WorldDescription::ranks_per_host: expected 1 or more, got ",
           world.ranks_per_host);
  const auto check_bytes = [](const char* field, int64_t bytes) {
    ZP_CHECK(bytes >= 0, "WorldDescription::", field, ": expected 0 (not known) or more, got ",
             bytes);
  };
  check_bytes("device_memory_bytes", world.device_memory_bytes);
  check_bytes("host_memory_bytes", world.host_memory_bytes);
  check_bytes("nvme_bytes", world.nvme_bytes);
  ZP_CHECK(options.micro_steps >= 1, "PlanOptions::micro_steps: expected 1 or more, got ",
           options.micro_steps);
}

struct Places {
  Stage stage;
  Tier optimizer = Tier::kDevice;
  Tier parameters = Tier::kDevice;
};

Forecast forecast_of(const WorldDescription& world, const Places& places, CheckpointPolicy policy,
                     const TierBytes& held, const StepFigures& figures) {
  Forecast forecast{.setting = {.stage = places.stage,
                                .optimizer = places.optimizer,
                                .parameters = places.parameters,
                                .checkpointing = policy},
                    .held = held,
                    .at_peak = figures.at_peak,
                    .sent = figures.sent};
  for (const Tier tier : kTiers) {
    const int64_t limit = world.bytes_of_rank(tier);
    if (limit == 0) continue;
    forecast.missing_bytes[static_cast<size_t>(tier)] =
        std::max<int64_t>(0, figures.at_peak[tier].total() - limit);
  }
  return forecast;
}

// The parts of a plan's order, the most important first.
std::tuple<Tier, Tier, double, long, int64_t> cost_of(const Forecast& forecast,
                                                      int64_t least_sent_bytes) {
  const Setting& setting = forecast.setting;
  const double times = static_cast<double>(forecast.sent.total().bytes + 1) /
                       static_cast<double>(least_sent_bytes + 1);
  constexpr double kAlike = 0.02;
  return {std::max(setting.optimizer, setting.parameters), setting.parameters, forecast.flops,
          std::lround(std::log(times) / kAlike), forecast.at_peak[Tier::kDevice].total()};
}

void sort_by_cost(std::vector<Forecast>& forecasts) {
  int64_t least = forecasts.front().sent.total().bytes;
  for (const Forecast& forecast : forecasts) least = std::min(least, forecast.sent.total().bytes);
  std::stable_sort(forecasts.begin(), forecasts.end(),
                   [least](const Forecast& left, const Forecast& right) {
                     return cost_of(left, least) < cost_of(right, least);
                   });
}

std::vector<Places> places_to_try(const Options& training) {
  std::vector<Places> places;
  for (int number = 0; number <= 3; ++number) {
    Options options = training;
    options.stage = stage_of(number);
    for (const Tier optimizer : kTiers) {
      places.push_back({options.stage, optimizer, Tier::kDevice});
      if (shards_parameters(options) && optimizer != Tier::kDevice) {
        places.push_back({options.stage, optimizer, optimizer});
      }
    }
  }
  return places;
}

StepFigures run_in(Trial& trial, CheckpointPolicy policy) {
  try {
    return trial.run(policy);
  } catch (c10::Error& error) {
    error.add_context(
        "plan(): its steps run on the meta device, where tensors have no values; a forward that "
        "reads values (item()) is to leave that out where tensor.is_meta(), and an operator needs "
        "a "
        "form there (operators/meta_operators.h)");
    throw;
  }
}

Options setting_of(const Options& training, const Places& places) {
  Options options = training;
  options.stage = places.stage;
  options.offload.optimizer = places.optimizer;
  options.offload.parameters = places.parameters;
  // No file is made there.
  options.offload.nvme_directory = places.optimizer == Tier::kNvme ? "simulated" : "";
  return options;
}

}  // namespace

bool Forecast::fits() const {
  return std::all_of(missing_bytes.begin(), missing_bytes.end(),
                     [](int64_t bytes) { return bytes == 0; });
}

const Forecast* Plan::choice() const {
  const auto at = std::find_if(forecasts.begin(), forecasts.end(), std::mem_fn(&Forecast::fits));
  return at == forecasts.end() ? nullptr : &*at;
}

const Forecast* Plan::next_best() const {
  const Forecast* const best = choice();
  if (best == nullptr) return nullptr;
  const Forecast* const end = forecasts.data() + forecasts.size();
  const Forecast* const at = std::find_if(best + 1, end, std::mem_fn(&Forecast::fits));
  return at == end ? nullptr : at;
}

const Forecast& Plan::nearest() const {
  ZP_CHECK(!forecasts.empty(), "Plan::nearest(): this plan has no forecast; plan() makes one");
  const auto missing = [](const Forecast& forecast) {
    int64_t bytes = 0;
    for (const int64_t of_tier : forecast.missing_bytes) bytes += of_tier;
    return bytes;
  };
  return *std::min_element(
      forecasts.begin(), forecasts.end(),
      [&](const Forecast& left, const Forecast& right) { return missing(left) < missing(right); });
}

Plan plan_states(int64_t parameters, int64_t states, const WorldDescription& world,
                 const PlanOptions& options) {
  check(world, options);
  ZP_CHECK(parameters >= 1, "plan_states(): expected 1 parameter or more, got ", parameters);
  Plan plan{.parameters = parameters, .world = world, .has_steps = false};
  for (const Places& places : places_to_try(options.training)) {
    const TierBytes held =
        formula_bytes(setting_of(options.training, places), parameters, world.ranks, states);
    plan.forecasts.push_back(
        forecast_of(world, places, CheckpointPolicy::kNone, held, {.at_peak = held}));
  }
  sort_by_cost(plan.forecasts);
  return plan;
}

namespace detail {

at::Tensor without_values(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
}

Plan plan(const MakePlannedModel& make, Blocks blocks, const WorldDescription& world,
          const PlanOptions& options) {
  check(world, options);
  const UntouchedGenerator generator;
  Plan plan{.world = world};
  double forward_flops = 0;
  for (const Places& places : places_to_try(options.training)) {
    Trial trial(make, world, setting_of(options.training, places), options.micro_steps);
    plan.parameters = trial.parameters();
    for (const CheckpointPolicy policy : kPolicies) {
      if (policy == CheckpointPolicy::kBlocks && blocks == Blocks::kNone) continue;
      const StepFigures figures = run_in(trial, policy);
      if (policy == CheckpointPolicy::kSelective) forward_flops = figures.forward_flops;
      plan.forecasts.push_back(forecast_of(world, places, policy, trial.held(), figures));
      // Backward has two products for each of forward.
      plan.forecasts.back().flops = 3 * forward_flops + figures.recomputed_flops;
    }
  }
  sort_by_cost(plan.forecasts);
  return plan;
}

}  // namespace detail
}  // namespace zeropage
