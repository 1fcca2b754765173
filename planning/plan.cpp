#include "zeropage/plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <mutex>
#include <tuple>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_strided.h>

#include "operators/generator_state.h"
#include "planning/fewer_samples.h"
#include "planning/step_time.h"
#include "planning/trial.h"
#include "zero/plan/byte_plan.h"
#include "zeropage/check.h"

namespace zeropage {
namespace {

using memory::Kind;
using memory::Tier;
using planning::StepFigures;
using planning::Trial;

// The first sees the FLOPs of forward.
constexpr std::array kPolicies = {CheckpointPolicy::kSelective, CheckpointPolicy::kNone,
                                  CheckpointPolicy::kBlocks};
constexpr std::array kTiers = {Tier::kDevice, Tier::kHost, Tier::kNvme};

// Constructors draw initial values, though nobody gets them.
class UntouchedGenerator {
 public:
  UntouchedGenerator()
      : generator_(at::detail::getDefaultCPUGenerator()), before_(operators::copy_of(generator_)) {}
  ~UntouchedGenerator() { operators::assign_state(generator_, before_); }
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
  ZP_CHECK(world.context >= 1 && world.ranks % world.context == 0,
           "WorldDescription::context: expected a divisor of the ", world.ranks, " ranks, got ",
           world.context);
  ZP_CHECK(world.expert >= 1 && world.ranks / world.context % world.expert == 0,
           "WorldDescription::expert: expected a divisor of the ", world.ranks / world.context,
           " ranks that have other samples, got ", world.expert);
  ZP_CHECK(world.ranks_per_host >= 1, "WorldDescription::ranks_per_host: expected 1 or more, got ",
           world.ranks_per_host);
  const auto check_bytes = [](const char* field, int64_t bytes) {
    ZP_CHECK(bytes >= 0, "WorldDescription::", field, ": expected 0 (not known) or more, got ",
             bytes);
  };
  check_bytes("device_memory_bytes", world.device_memory_bytes);
  check_bytes("host_memory_bytes", world.host_memory_bytes);
  check_bytes("nvme_bytes", world.nvme_bytes);
  for (const int stage : options.stages) {
    ZP_CHECK(stage >= 0 && stage <= 3, "PlanOptions::stages: expected stages from 0 to 3, got ",
             stage);
  }
  ZP_CHECK(!options.tiers.empty(), "PlanOptions::tiers: expected one tier or more, got none");
  ZP_CHECK(options.micro_steps >= 1, "PlanOptions::micro_steps: expected 1 or more, got ",
           options.micro_steps);
  ZP_CHECK(!options.paging.empty(), "PlanOptions::paging: expected one or more, got none");
}

struct Places {
  Stage stage;
  Tier optimizer = Tier::kDevice;
  Tier parameters = Tier::kDevice;
};

// One of PlanOptions::paging.
struct Paging {
  size_t index = 0;
  PagingSetting setting;
};

PlannedSetting setting_of(const Places& places, CheckpointPolicy policy, const Paging& paging) {
  return {.stage = places.stage,
          .optimizer = places.optimizer,
          .parameters = places.parameters,
          .checkpointing = policy,
          .paging_index = paging.index,
          .paging = paging.setting};
}

// What is tried at once, wherever it is that things go to.
struct Arrangement {
  Stage stage;
  bool optimizer_leaves = false;
  bool parameters_leave = false;

  Places to(Tier tier) const {
    return {.stage = stage,
            .optimizer = optimizer_leaves ? tier : Tier::kDevice,
            .parameters = parameters_leave ? tier : Tier::kDevice};
  }
  // Whether an optimizer on that tier is of this arrangement.
  bool has(Tier tier) const { return (tier != Tier::kDevice) == optimizer_leaves; }
};

Forecast forecast_of(const WorldDescription& world, const PlannedSetting& setting,
                     const memory::TierBytes& held, const StepFigures& figures) {
  Forecast forecast{.setting = setting,
                    .held = held,
                    .at_peak = figures.at_peak,
                    .reserved_bytes = figures.reserved_bytes,
                    .sent = figures.sent};
  for (const Tier tier : kTiers) {
    const int64_t limit = world.bytes_of_rank(tier);
    if (limit == 0) continue;
    forecast.missing_bytes[static_cast<size_t>(tier)] =
        std::max<int64_t>(0, forecast.used_bytes(world, tier) - limit);
  }
  if (figures.reserved_bytes > 0) {
    // The allocator may give back what it has cached, so what is reserved can be the limit itself and not enough.
    forecast.missing_bytes[static_cast<size_t>(Tier::kDevice)] = figures.missing_reserved_bytes;
  }
  return forecast;
}

// Less than 2 % are no difference.
long class_of_traffic(int64_t bytes, int64_t least_bytes) {
  constexpr double kAlike = 0.02;
  const double times = static_cast<double>(bytes + 1) / static_cast<double>(least_bytes + 1);
  return std::lround(std::log(times) / kAlike);
}

// Less than 5 % are no difference.
long class_of_seconds(double seconds, double least_seconds) {
  constexpr double kAlike = 0.05;
  return seconds > 0 ? std::lround(std::log(seconds / least_seconds) / kAlike) : 0;
}

// traffic: more for what sends more.
template <typename Traffic>
void sort_by_cost(std::vector<Forecast>& forecasts, const Traffic& traffic) {
  double fastest = forecasts.front().seconds;
  for (const Forecast& forecast : forecasts) fastest = std::min(fastest, forecast.seconds);
  const auto cost_of = [&](const Forecast& forecast) {
    const PlannedSetting& setting = forecast.setting;
    return std::tuple(class_of_seconds(forecast.seconds, fastest),
                      std::max(setting.optimizer, setting.parameters), setting.parameters,
                      forecast.flops, traffic(forecast), setting.checkpointing,
                      setting.paging_index, forecast.at_peak[Tier::kDevice].total());
  };
  std::stable_sort(
      forecasts.begin(), forecasts.end(),
      [&](const Forecast& left, const Forecast& right) { return cost_of(left) < cost_of(right); });
}

void sort_by_cost(std::vector<Forecast>& forecasts) {
  int64_t least = forecasts.front().sent.total().bytes;
  for (const Forecast& forecast : forecasts) least = std::min(least, forecast.sent.total().bytes);
  sort_by_cost(forecasts, [least](const Forecast& forecast) {
    return class_of_traffic(forecast.sent.total().bytes, least);
  });
}

template <typename T>
bool has(const std::vector<T>& values, const T& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

bool has_tier(const PlanOptions& options, Tier tier) {
  return has(options.tiers, tier);
}

// At stage 3 parameters may leave with the optimizer. Groups of ranks share what a stage shards.
std::vector<Arrangement> arrangements_to_try(const PlanOptions& options) {
  std::vector<Arrangement> arrangements;
  const bool leaves = has_tier(options, Tier::kHost) || has_tier(options, Tier::kNvme);
  const int first_stage = options.training.shard_within == Options::kAllRanks ? 0 : 1;
  for (int number = first_stage; number <= 3; ++number) {
    if (!has(options.stages, number)) continue;
    Options training = options.training;
    training.stage = stage_of(number);
    if (has_tier(options, Tier::kDevice)) arrangements.push_back({.stage = training.stage});
    if (!leaves) continue;
    arrangements.push_back({.stage = training.stage, .optimizer_leaves = true});
    if (!zero::shards_parameters(training)) continue;
    arrangements.push_back(
        {.stage = training.stage, .optimizer_leaves = true, .parameters_leave = true});
  }
  return arrangements;
}

StepFigures run_in(Trial& trial, CheckpointPolicy policy) {
  try {
    return trial.run(policy);
  } catch (c10::Error& error) {
    error.add_context(
        "plan(): its steps run on the meta device, where tensors have no values; a forward that "
        "reads values (item()) is to leave that out where tensor.is_meta(), and each operator "
        "needs a form for that device");
    throw;
  }
}

// Options of a trial, which is no run: it has no file and no limit.
Options trial_options(const Options& training, const Places& places, const PagingSetting& paging) {
  Options options = options_of(training, {.stage = places.stage,
                                          .optimizer = places.optimizer,
                                          .parameters = places.parameters,
                                          .paging = paging});
  options.offload.nvme_directory = places.optimizer == Tier::kNvme ? "simulated" : "";
  options.device_memory_bytes = Options::kNoLimit;
  options.host_memory_bytes = Options::kNoLimit;
  return options;
}

// What goes to NVMe would go to the host alike, where it needs no buffers.
StepFigures on_host(const StepFigures& on_nvme, int64_t buffer_bytes) {
  StepFigures figures = on_nvme;
  memory::Breakdown& host = figures.at_peak[Tier::kHost];
  memory::Breakdown& nvme = figures.at_peak[Tier::kNvme];
  for (size_t kind = 0; kind < memory::kKindCount; ++kind) {
    host.bytes[kind] += std::exchange(nvme.bytes[kind], 0);
  }
  host[Kind::kStaging] -= buffer_bytes;
  return figures;
}

// Runs the policies of one arrangement, and tells of each tier.
class Attempt {
 public:
  Attempt(const detail::MakePlannedModel& make, const Arrangement& arrangement,
          const Paging& paging, const WorldDescription& world, const PlanOptions& options)
      : arrangement_(arrangement),
        paging_(paging),
        world_(world),
        options_(options),
        trial_(make, world,
               trial_options(
                   options.training,
                   arrangement.to(has_tier(options, Tier::kNvme) ? Tier::kNvme : Tier::kHost),
                   paging.setting),
               {.micro_steps = options.micro_steps,
                .reduce = options.reduce,
                .gradient_budget_bytes = options.gradient_budget_bytes}) {}

  int64_t parameters() const { return trial_.parameters(); }

  // Whether there are blocks to recompute; the plan is told which, or why there are none.
  bool finds_blocks(Plan& plan) {
    if (!plan.without_blocks.empty()) return false;
    try {
      const auto& blocks = trial_.find_blocks(options_.blocks);
      plan.blocks = blocks.to_string();
      plan.lists_of_blocks = blocks.lists;
      return true;
    } catch (const c10::Error& error) {
      // Who asks for nothing else is to hear it.
      if (!options_.blocks.empty() || options_.policies.size() == 1) throw;
      plan.without_blocks = memory::message_of(error);
      return false;
    }
  }

  void add(CheckpointPolicy policy, std::vector<Forecast>& forecasts) {
    const bool is_asked_for = has(options_.policies, policy);
    const bool counts_flops = policy == CheckpointPolicy::kSelective;
    const bool counts_bytes = policy == CheckpointPolicy::kNone && options_.speeds.known();
    if (!is_asked_for && !counts_flops && !counts_bytes) return;
    const StepFigures figures = run_in(trial_, policy);
    if (counts_flops) forward_flops_ = figures.forward_flops;
    if (policy == CheckpointPolicy::kNone) forward_bytes_ = figures.forward_bytes;
    if (!is_asked_for) return;
    for (const Tier tier : options_.tiers) {
      if (!arrangement_.has(tier)) continue;
      const bool is_moved = tier == Tier::kHost && has_tier(options_, Tier::kNvme);
      const Places places = arrangement_.to(tier);
      forecasts.push_back(
          forecast_of(world_, setting_of(places, policy, paging_),
                      trial_.held(trial_options(options_.training, places, paging_.setting)),
                      is_moved ? on_host(figures, trial_.buffer_bytes()) : figures));
      forecasts.back().reduction = trial_.reduction();
      // Backward has two products for each of forward.
      forecasts.back().flops = 3 * forward_flops_ + figures.recomputed_flops;
      recomputed_flops_.push_back(figures.recomputed_flops);
    }
  }

  // REQUIRES: all policies were added, to the end of `forecasts`.
  void predict_seconds(std::vector<Forecast>& forecasts) const {
    if (!options_.speeds.known()) return;
    const size_t first = forecasts.size() - recomputed_flops_.size();
    const auto micro_steps = static_cast<double>(options_.micro_steps);
    for (size_t index = first; index < forecasts.size(); ++index) {
      Forecast& forecast = forecasts[index];
      const memory::Breakdown& on_disk = forecast.held[Tier::kNvme];
      const bool repeats = forecast.setting.checkpointing != CheckpointPolicy::kNone;
      const comm::Traffic sent = forecast.sent.total();
      // Values and states are read and written once, parameters read by forward and backward too.
      const planning::StepWork work{
          .forward_flops = forward_flops_,
          .recomputed_flops = recomputed_flops_[index - first],
          .forward_bytes = forward_bytes_,
          .recomputed_bytes = repeats ? forward_bytes_ : 0,
          .updated_elements = static_cast<double>(trial_.updated_numel()),
          .sent_bytes = static_cast<double>(sent.bytes),
          .messages = static_cast<double>(sent.messages),
          .disk_read_bytes = static_cast<double>(on_disk.total()) +
                             2 * micro_steps * static_cast<double>(on_disk[Kind::kParameter]),
          .disk_written_bytes = static_cast<double>(on_disk.total())};
      forecast.seconds =
          planning::step_seconds(work, options_.speeds,
                                 {.ranks_of_host = std::min(world_.ranks, world_.ranks_per_host),
                                  .threads_of_rank = options_.threads});
    }
  }

 private:
  const Arrangement arrangement_;
  const Paging paging_;
  const WorldDescription& world_;
  const PlanOptions& options_;
  Trial trial_;
  double forward_flops_ = 0;
  double forward_bytes_ = 0;
  std::vector<double> recomputed_flops_;  // of the forecasts that were added
};

// What of it the arrangement has.
PagingSetting effective(PagingSetting paging, const Arrangement& arrangement) {
  Options options;
  options.stage = arrangement.stage;
  if (!zero::shards_parameters(options)) paging.prefetch_bytes = Options::kTwoLargestPages;
  if (!arrangement.optimizer_leaves) paging.step = StepWhen::kInStep;
  return paging;
}

bool is_tried_before(const PlanOptions& options, size_t index, const Arrangement& arrangement) {
  const PagingSetting now = effective(options.paging[index], arrangement);
  const auto end = options.paging.begin() + static_cast<std::ptrdiff_t>(index);
  return std::any_of(options.paging.begin(), end, [&](const PagingSetting& earlier) {
    return effective(earlier, arrangement) == now;
  });
}

// Whether no other paging can be cheaper.
bool is_settled(const Plan& plan) {
  return std::any_of(plan.forecasts.begin(), plan.forecasts.end(), [](const Forecast& forecast) {
    return forecast.fits() && forecast.setting.optimizer == Tier::kDevice &&
           forecast.setting.checkpointing == CheckpointPolicy::kNone;
  });
}

}  // namespace

int64_t Forecast::used_bytes(const WorldDescription& described, Tier tier) const {
  if (tier == Tier::kDevice && reserved_bytes > 0) return reserved_bytes;
  const bool holds_device = tier == Tier::kHost && described.device_is_host;
  return at_peak[tier].total() + (holds_device ? at_peak[Tier::kDevice].total() : 0);
}

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
  ZP_CHECK(world.expert == 1, "WorldDescription::expert: ", world.expert,
           ": of a mere number of parameters no experts are known; use plan()");
  Plan plan{.parameters = parameters,
            .micro_steps = options.micro_steps,
            .world = world,
            .has_steps = false};
  for (const Arrangement& arrangement : arrangements_to_try(options)) {
    for (const Tier tier : options.tiers) {
      if (!arrangement.has(tier)) continue;
      const Places places = arrangement.to(tier);
      const Options training = trial_options(options.training, places, PagingSetting());
      const memory::TierBytes held = zero::formula_bytes(training, parameters, world.ranks, states);
      memory::TierBytes with_gradients = held;
      with_gradients[Tier::kDevice][memory::Kind::kGradient] +=
          zero::formula_gradient_bytes(training, parameters, world.ranks);
      plan.forecasts.push_back(forecast_of(world, setting_of(places, CheckpointPolicy::kNone, {}),
                                           held, {.at_peak = with_gradients}));
    }
  }
  // Parameters that are sharded are gathered twice in a step.
  sort_by_cost(plan.forecasts, [&](const Forecast& forecast) {
    Options training = options.training;
    training.stage = forecast.setting.stage;
    return zero::shards_parameters(training) ? 1 : 0;
  });
  return plan;
}

namespace detail {

at::Tensor mean_of(const at::Tensor& output, bool warns) {
  static std::once_flag told;
  if (warns && output.numel() > 1) {
    std::call_once(told, [] {
      std::cerr << "zeropage: plan(): forward takes integers and no loss was given, so the loss is "
                   "planned as the mean of forward's output; one over many classes keeps more "
                   "(19 % of the peak with 8,192): give sample_target and criterion behind "
                   "sample_input\n";
    });
  }
  return output.mean(at::kFloat);
}

at::Tensor without_values(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const std::vector<int64_t> sizes = planning::FewerSamples::sizes_of(tensor);
  // An operator more would be one of the forward's.
  if (tensor.is_meta() && !tensor.requires_grad() && tensor.sizes() == at::IntArrayRef(sizes)) {
    return tensor;
  }
  return at::empty_strided(sizes, tensor.strides(), tensor.options().device(c10::kMeta));
}

Plan plan(const MakePlannedModel& make, Blocks blocks, const WorldDescription& world,
          const PlanOptions& options) {
  check(world, options);
  const UntouchedGenerator generator;
  Plan plan{.micro_steps = options.micro_steps, .world = world};
  for (size_t index = 0; index < options.paging.size() && !is_settled(plan); ++index) {
    for (const Arrangement& arrangement : arrangements_to_try(options)) {
      if (is_tried_before(options, index, arrangement)) continue;
      Attempt attempt(make, arrangement, {index, options.paging[index]}, world, options);
      plan.parameters = attempt.parameters();
      for (const CheckpointPolicy policy : kPolicies) {
        if (policy == CheckpointPolicy::kBlocks && has(options.policies, policy) &&
            blocks == Blocks::kAreFound && !attempt.finds_blocks(plan)) {
          continue;
        }
        attempt.add(policy, plan.forecasts);
      }
      attempt.predict_seconds(plan.forecasts);
    }
  }
  ZP_CHECK(!plan.forecasts.empty(),
           "plan(): nothing to try: PlanOptions::stages, tiers and policies leave no setting");
  sort_by_cost(plan.forecasts);
  return plan;
}

}  // namespace detail
}  // namespace zeropage
