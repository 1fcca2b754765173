#include "bench/train_gpt/training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <sched.h>

#include "bench/train_gpt/expert_layers.h"
#include "bench/train_gpt/fitting.h"
#include "bench/train_gpt/kept_activations.h"
#include "bench/train_gpt/profiled_steps.h"
#include "bench/train_gpt/progress.h"
#include "bench/train_gpt/run_report.h"
#include "bench/train_gpt/saved_run.h"
#include "bench/train_gpt/step_timing.h"
#include "bench/train_gpt/text_sample.h"
#include "bench/train_gpt/trained_gpt.h"
#include "bench/train_gpt/utilisation.h"
#include "device/stream.h"
#include "examples/command_line/stop_signal.h"
#include "examples/progress/words.h"
#include "memory/device_memory.h"
#include "offload/device_speed.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/device.h"

namespace train_gpt {
namespace {

// More would take longer than they tell.
constexpr int64_t kMostHeldOutWindows = 64;

// From whose time --seconds makes a number of steps.
constexpr size_t kTimedSteps = 5;

using zeropage::memory::Breakdown;
using zeropage::memory::Ledger;

// The peaks of a part of a run, by themselves and beside those of what was before it.
class PeaksOfSteps {
 public:
  PeaksOfSteps(Ledger& ledger, torch::DeviceType device)
      : ledger_(ledger),
        device_(device),
        device_before_(ledger.at_peak(device)),
        host_before_(ledger.at_peak()) {
    ledger_.reset_peak();
  }
  Breakdown at_peak_since_start() const { return higher(device_before_, ledger_.at_peak(device_)); }
  int64_t host_peak_since_start() const { return higher(host_before_, ledger_.at_peak()).total(); }
  int64_t activation_peak() const { return ledger_.activation_peak(device_); }

 private:
  static Breakdown higher(const Breakdown& before, const Breakdown& since) {
    return since.total() > before.total() ? since : before;
  }

  Ledger& ledger_;
  const torch::DeviceType device_;
  const Breakdown device_before_;
  const Breakdown host_before_;
};

int default_threads(const zeropage::comm::World& world, const Flags& flags) {
  // Some of LibTorch's sums depend on how many threads share them.
  if (flags.options.world_invariant) return 1;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  return std::max(1, CPU_COUNT(&allowed) / world.local_size());
}

// What makes one gradient infinite, while it lives.
class InjectedInfinity {
 public:
  InjectedInfinity(const zeropage::comm::World& world, const Flags& flags,
                   zeropage::DistributedDataParallelBase& model, int64_t step, int64_t micro_step) {
    const auto& at = flags.injection;
    if (!at || at->rank != world.rank() || at->step != step || at->micro_step != micro_step) return;
    parameter_ = model.named_parameters()[c10::str("blocks.", at->layer, ".attention_qkv.weight")];
    hook_ = parameter_.register_hook([](const torch::Tensor& gradient) {
      return torch::full_like(gradient, std::numeric_limits<double>::infinity());
    });
  }
  ~InjectedInfinity() {
    if (parameter_.defined()) parameter_.remove_hook(hook_);
  }
  InjectedInfinity(const InjectedInfinity&) = delete;
  InjectedInfinity& operator=(const InjectedInfinity&) = delete;

 private:
  torch::Tensor parameter_;
  unsigned hook_ = 0;
};

// This rank's of a step that begins with that sample of the run. Samples are counted over steps,
// micro-steps and ranks, so they are the same whatever the split.
std::vector<Batch> micro_batches(const Places& places, const Flags& flags, const TextData& data,
                                 int64_t first_sample) {
  std::vector<Batch> batches;
  for (int64_t micro_step = 0; micro_step < flags.accumulator.micro_steps; ++micro_step) {
    const int64_t index = micro_step * places.sample_places() + places.sample_place();
    batches.push_back(data.training_batch(
        flags.seed, static_cast<uint64_t>(first_sample + index * flags.batch), flags.batch));
  }
  return batches;
}

// Speed of the disk that state is offloaded to; none if it is offloaded to none.
std::optional<zeropage::offload::DeviceSpeed> speed_of_disk(const Flags& flags) {
  const std::string folder = flags.options.offload.nvme_directory;
  if (folder.empty()) return std::nullopt;
  return zeropage::offload::measure(folder);
}

// The folder on the disk that the run will use; "": it uses none.
std::string disk_of_run(const Flags& flags) {
  if (!flags.options.offload.nvme_directory.empty()) return flags.options.offload.nvme_directory;
  if (flags.state.saves()) std::filesystem::create_directories(flags.state.folder);
  return flags.state.folder;
}

// How many steps there are from the first one of this start on, where --seconds ends them: a number that
// all ranks take from the slowest one's first steps. REQUIRES: their seconds.
int64_t steps_in_time(const zeropage::comm::World& world, const Flags& flags,
                      std::vector<double> seconds) {
  // The first one is slower: caches are empty, and what is planned is not known yet.
  seconds.erase(seconds.begin());
  const auto of_a_step = torch::full({1}, median(seconds), torch::kFloat64);
  world.communicator()
      .all_reduce(of_a_step, zeropage::comm::ReduceOp::kMax, "the time of a step")
      .wait();
  return static_cast<int64_t>(std::ceil(flags.seconds / of_a_step.item<double>()));
}

// Returns the signal that ended it after a save, 0 for none.
int run_steps(const Places& places, const Flags& flags, const TextData& data, TrainedGpt& trained,
              zeropage::ShardedOptimizer& optimizer, ProfiledSteps& profiled,
              zeropage::SurvivingRun* surviving, RunFigures& run) {
  const zeropage::World& world = places.samples;
  zeropage::DistributedDataParallelBase& model = trained.model();
  KeptActivations kept(flags.checkpointing, places.all, model);
  trained.begin([&](const std::function<torch::Tensor()>& forward) {
    const KeptActivations::Forward scope(kept);
    return forward();
  });
  zeropage::Accumulator& accumulator = trained.accumulator();
  SavedRun saved(flags, data, model, optimizer, accumulator, surviving);
  if (places.is_first() && !saved.description().empty()) {
    std::cout << saved.description() << std::endl;
  }
  if (places.is_first() && accumulator.micro_steps() > 1 && world.size() > 1) {
    std::cout << "gradients of " << accumulator.micro_steps() << " micro-steps are reduced "
              << accumulator.reduction().to_string() << std::endl;
  }
  run.first_step = saved.steps();
  Progress progress(
      {.steps = flags.steps,
       .first_step = run.first_step,
       .tokens_per_step = flags.samples_per_step(places.sample_places()) * flags.model.sequence,
       .utilisation_per_token_rate = run.utilisation_per_token_rate,
       .quiet = !places.is_first()});
  model.train();
  auto paged = model.paging();
  const auto note = [&](int64_t step, const zeropage::StepReport& report) {
    run.gradient_norm.push_back(report.norm);
    run.clipped_norm.push_back(report.clipped_norm);
    run.loss_scale.push_back(report.loss_scale);
    if (report.stepped()) return;
    progress.tell(step, report.to_string());
    run.skipped_steps.push_back({{"step", step + 1}, {"reason", report.to_string()}});
  };
  struct Enqueued {
    StepInFlight timing;
    zeropage::EnqueuedStep report;
  };
  const auto finish = [&](const Enqueued& step) {
    run.step_seconds.push_back(step.timing.seconds());
    run.loss.push_back(mean_over_ranks(places.samples, step.timing.loss()));
    const auto index = run.first_step + static_cast<int64_t>(run.loss.size()) - 1;
    note(index, step.report.report());
    ZP_CHECK(std::isfinite(run.loss.back()), "step ", index + 1, ": the loss is ", run.loss.back(),
             "; training cannot go on, lower --lr (now ", flags.lr, ")");
    progress.show(index, run.loss.back(), run.step_seconds.back());
  };
  const torch::Device device = world.device();
  std::optional<Enqueued> before;
  int stopped_by = 0;
  int64_t steps = flags.steps;
  for (int64_t step = run.first_step; step < steps && stopped_by == 0; ++step) {
    for (auto& group : optimizer.param_groups()) group.options().set_lr(flags.learning_rate(step));
    const std::vector<Batch> batches = micro_batches(places, flags, data, saved.samples());
    const auto recorded = profiled.step(step);
    StepStart start(device);
    trained.backward(batches, [&](int64_t micro_step) {
      return std::make_shared<InjectedInfinity>(places.all, flags, model, step, micro_step);
    });
    const auto update_start = Clock::now();
    zeropage::EnqueuedStep report = accumulator.enqueue_step(optimizer);
    run.update_seconds.push_back(
        std::chrono::duration<double>(Clock::now() - update_start).count());
    Enqueued enqueued{StepInFlight(std::move(start), trained.loss()), std::move(report)};
    run.paging.push_back(model.paging() - paged);
    paged = model.paging();
    // While a device works at this step, the loss and the report of the one before are shown.
    if (zeropage::device::has_streams(device.type())) {
      if (before) finish(*before);
      before = std::move(enqueued);
    } else {
      finish(enqueued);
    }
    stopped_by = saved.end_step(progress);
    if (flags.seconds > 0 && run.step_seconds.size() == kTimedSteps && steps == flags.steps) {
      const int64_t in_time = run.first_step + steps_in_time(places.all, flags, run.step_seconds);
      steps = std::min(steps, std::max(in_time, step + 1));
      progress.expect(steps);
    }
  }
  if (before) finish(*before);
  saved.finish(progress);
  run.saves = saved.saves();
  if (surviving != nullptr) {
    run.restarts = surviving->restarts();
    run.memory_rung = surviving->memory_rung();
  }
  run.forecast_activation_peak_bytes = kept.forecast_peak_bytes();
  run.offloaded_peak_bytes = kept.offloaded_peak_bytes();
  run.kept_activations = kept.table();
  return stopped_by;
}

// As many windows as a minute has room for, which all ranks take from the slowest one's steps. A forward is a
// third of a micro-step.
int64_t windows_to_hold_out(const zeropage::comm::World& world, const Places& places,
                            const Flags& flags, const TextData& data, const RunFigures& run) {
  constexpr double kSeconds = 60;
  const auto micro_steps = static_cast<double>(flags.accumulator.micro_steps);
  const auto of_a_window =
      torch::full({1}, median(run.step_seconds) / micro_steps / 3, torch::kFloat64);
  world.communicator()
      .all_reduce(of_a_window, zeropage::comm::ReduceOp::kMax, "the time of a window")
      .wait();
  const int64_t sharers = places.sample_places();
  const auto that_fit = static_cast<int64_t>(kSeconds / of_a_window.item<double>()) * sharers;
  return std::min(
      {kMostHeldOutWindows, data.held_out_windows(), std::max<int64_t>(that_fit, sharers)});
}

}  // namespace

void train(zeropage::comm::World& world, const Flags& given, const TextData& data,
           zeropage::SurvivingRun* surviving) {
  Flags flags = given;
  torch::set_num_threads(flags.threads > 0 ? flags.threads : default_threads(world, flags));
  Ledger& ledger = *Ledger::process();
  RankFigures own;
  RunFigures run;
  const torch::Device device = world.device();
  if (flags.deterministic) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    // Nothing here reads what it has not written.
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
  flags.fit.description = fit_to_limits(world, flags);
  if (world.rank() == 0 && !flags.fit.description.empty()) {
    std::cout << "fits: " << flags.fit.description << std::endl;
  }
  if (surviving != nullptr) take_less_memory(flags, surviving->memory_rung());
  if (flags.probe) {
    run.probe = zeropage::probe(world, {.disk_directory = disk_of_run(flags)});
    if (world.rank() == 0) std::cout << run.probe->to_string() << std::flush;
  }
  if (world.rank() == 0) run.disk = speed_of_disk(flags);
  if (!flags.memory_snapshot_path.empty()) zeropage::memory::record_cuda_memory_history();
  zeropage::memory::reset_peak_resident_bytes();
  ledger.reset_peak();
  own.memory.rss_base_bytes = zeropage::memory::resident_bytes();

  const Places places = Places::of(world, flags);
  TrainedGpt trained(places, flags);
  flags.experts_are_cut = trained.cuts_experts();
  zeropage::DistributedDataParallelBase& model = trained.model();
  const auto optimizer = trained.make_optimizer();
  for (const auto& parameter : model.parameters()) own.parameters += parameter.numel();
  run.parameters = parameters_of(flags);
  if (const auto peak = peak_flops(flags, device)) {
    run.utilisation_per_token_rate =
        flops_per_token(flags.model, active_parameters_of(flags)) / (*peak * world.size());
  }
  if (world.rank() == 0) {
    std::cout << run.parameters << " parameters on " << world.size()
              << (world.size() == 1 ? " rank" : " ranks");
    if (flags.tensor > 1) std::cout << ", " << flags.tensor << " of them to a sample";
    if (flags.context > 1) {
      std::cout << ", a sample's tokens over " << flags.context << " by " << flags.context_form;
    }
    if (flags.pipeline > 1) {
      std::cout << ", in a pipeline of " << flags.pipeline << " by " << flags.schedule;
    }
    std::cout << " (" << world.communicator().transport() << ") on "
              << zeropage::memory::device_name(device) << ", stage " << text_of(flags.options.stage)
              << ", " << torch::get_num_threads()
              << " thread(s) a rank, text: " << data.description() << '\n'
              << experts_text(trained.experts(), flags) << std::flush;
  }

  if (run.disk) {
    // What a step takes at least, and what it wears out.
    const int64_t bytes =
        ledger.offloaded(zeropage::memory::Tier::kNvme).total() * world.local_size();
    run.disk_forecast = forecast(*run.disk, bytes, /*compute_seconds=*/0);
    std::cout << to_string(*run.disk, bytes, run.disk_forecast) << std::endl;
  }
  const PeaksOfSteps peaks(ledger, device.type());
  ProfiledSteps profiled(world, flags, {.of_model = run.parameters, .of_rank = own.parameters});
  if (const int signal =
          run_steps(places, flags, data, trained, *optimizer, profiled, surviving, run)) {
    if (world.rank() == 0) {
      std::cout << examples::name_of(signal) << ": ended after a save; --resume "
                << flags.state.folder << " goes on" << std::endl;
    }
    return;
  }
  profiled.write();
  run.recompute = zeropage::checkpointing::recompute_statistics();
  own.memory.now = ledger.now(device.type());
  own.memory.on_host = ledger.offloaded(zeropage::memory::Tier::kHost);
  own.memory.on_nvme = ledger.offloaded(zeropage::memory::Tier::kNvme);
  if (const auto& page_offload = sharded_parameters_of(model).pages->page_offload()) {
    run.offload_description = page_offload->describe();
  }
  own.memory.at_peak = peaks.at_peak_since_start();
  own.memory.activation_peak_bytes = peaks.activation_peak();
  if (device.is_cuda()) {
    own.memory.reserved_bytes = zeropage::memory::cuda_reserved_bytes(device);
    own.memory.host_bytes = peaks.host_peak_since_start();
  }
  own.memory.rss_peak_bytes = zeropage::memory::peak_resident_bytes();
  own.wire = sent_by_axis(trained, places);
  run.tokens_per_second =
      static_cast<double>(flags.samples_per_step(places.sample_places()) * flags.model.sequence) /
      median(run.step_seconds);
  if (run.utilisation_per_token_rate) {
    run.utilisation = *run.utilisation_per_token_rate * run.tokens_per_second;
  }
  run.experts = {.placed = trained.experts(),
                 .load = expert_load(model.untyped_module(), places, flags)};
  if (!flags.timeline_path.empty()) trained.write_timeline(flags.timeline_path);
  run.held_out_windows = windows_to_hold_out(world, places, flags, data, run);
  run.held_out_loss = trained.held_out_loss(data, run.held_out_windows);
  run.weights_sha256 = trained.weights_sha256();
  run.communicator = world.communicator().transport();
  const std::vector<RankFigures> ranks = gather_figures(world, own);
  const std::string text = flags.sample > 0
                               ? sample_text(*trained.whole(), data, flags.sample, flags.seed)
                               : std::string();
  if (world.rank() != 0) return;
  if (!flags.memory_snapshot_path.empty()) {
    zeropage::memory::write_cuda_memory_snapshot(flags.memory_snapshot_path);
  }
  std::printf("held-out loss %s over %lld windows (first training loss %s)\n\n%s",
              examples::fixed(run.held_out_loss, 4).c_str(),
              static_cast<long long>(run.held_out_windows),
              examples::fixed(run.loss.front(), 4).c_str(), table(flags, run, ranks).c_str());
  if (!text.empty()) std::printf("\nsample, after the |:\n%s\n", text.c_str());
  if (!flags.json_path.empty()) write_json(flags, run, ranks);
}

}  // namespace train_gpt
