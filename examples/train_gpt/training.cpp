#include "examples/train_gpt/training.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sched.h>

#include "examples/train_gpt/model.h"
#include "examples/train_gpt/progress.h"
#include "examples/train_gpt/run_report.h"
#include "examples/train_gpt/text_sample.h"
#include "examples/train_gpt/weights_hash.h"
#include "memory/check.h"
#include "memory/process_memory.h"

namespace train_gpt {
namespace {

// More would take longer than it tells.
constexpr int64_t kMostHeldOutWindows = 64;

int default_threads(const zeropage::comm::World& world) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  return std::max(1, CPU_COUNT(&allowed) / world.local_size());
}

void run_steps(const zeropage::comm::World& world, const Flags& flags, const TextData& data,
               Model& model, torch::optim::Optimizer& optimizer, RunFigures& run) {
  Progress progress(flags.steps, flags.batch * flags.model.sequence * world.size(),
                    /*quiet=*/world.rank() != 0);
  model.train();
  auto paged = model.paging();
  for (int64_t step = 0; step < flags.steps; ++step) {
    const auto first_sample =
        static_cast<uint64_t>((step * world.size() + world.rank()) * flags.batch);
    const Batch batch = data.training_batch(flags.seed, first_sample, flags.batch);
    const auto start = std::chrono::steady_clock::now();
    const auto loss = train_on(batch, model, optimizer);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    run.step_seconds.push_back(seconds.count());
    run.paging.push_back(model.paging() - paged);
    paged = model.paging();
    run.loss.push_back(mean_over_ranks(world, loss.item<double>()));
    ZP_CHECK(std::isfinite(run.loss.back()), "step ", step + 1, ": the loss is ", run.loss.back(),
             "; training cannot go on, lower --lr (now ", flags.lr, ")");
    progress.show(step, run.loss.back(), seconds.count());
  }
}

// Ranks take turns over the windows, and all run forward as often: at stage 3 it is collective.
double held_out_loss(const zeropage::comm::World& world, const TextData& data, Model& model) {
  const torch::NoGradGuard no_grad;
  model.eval();
  const int64_t windows = std::min(kMostHeldOutWindows, data.held_out_windows());
  const auto sum_and_count = torch::zeros({2}, torch::kFloat64);
  for (int64_t first = 0; first < windows; first += world.size()) {
    const int64_t window = first + world.rank();
    const auto loss = loss_of(model, data.held_out_window(std::min(window, windows - 1)));
    if (window >= windows) continue;
    sum_and_count[0] += loss.item<double>();
    sum_and_count[1] += 1;
  }
  world.communicator()
      .all_reduce(sum_and_count, zeropage::comm::ReduceOp::kSum, "the held-out loss")
      .wait();
  return (sum_and_count[0] / sum_and_count[1]).item<double>();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

}  // namespace

void train(zeropage::comm::World& world, const Flags& flags, const TextData& data) {
  torch::set_num_threads(flags.threads > 0 ? flags.threads : default_threads(world));
  zeropage::memory::Ledger& ledger = *zeropage::memory::Ledger::process();
  RankFigures own;
  RunFigures run;
  zeropage::memory::reset_peak_resident_bytes();
  ledger.reset_peak();
  own.memory.rss_base_bytes = zeropage::memory::resident_bytes();

  Model model = make_model(world, flags);
  const auto optimizer = make_optimizer(flags, model);
  for (const auto& parameter : model.parameters()) run.parameters += parameter.numel();
  if (world.rank() == 0) {
    std::cout << run.parameters << " parameters on " << world.size()
              << (world.size() == 1 ? " rank" : " ranks") << " ("
              << world.communicator().transport() << "), stage " << flags.stage << ", "
              << torch::get_num_threads() << " thread(s) a rank, text: " << data.description()
              << std::endl;
  }

  run_steps(world, flags, data, model, *optimizer, run);
  own.memory.now = ledger.now();
  own.memory.at_peak = ledger.at_peak();
  own.memory.rss_peak_bytes = zeropage::memory::peak_resident_bytes();
  own.wire = world.communicator().wire_traffic();
  run.tokens_per_second = static_cast<double>(flags.batch * flags.model.sequence * world.size()) /
                          median(run.step_seconds);
  run.held_out_loss = held_out_loss(world, data, model);
  run.weights_sha256 = weights_sha256(model);
  run.communicator = world.communicator().transport();
  const std::vector<RankFigures> ranks = gather_figures(world, own);
  const std::string text =
      flags.sample > 0 ? sample_text(model, data, flags.sample, flags.seed) : std::string();
  if (world.rank() != 0) return;
  std::printf("held-out loss %.4f (first training loss %.4f)\n\n%s", run.held_out_loss,
              run.loss.front(), table(flags, run, ranks).c_str());
  if (!text.empty()) std::printf("\nsample, after the |:\n%s\n", text.c_str());
  if (!flags.json_path.empty()) write_json(flags, run, ranks);
}

}  // namespace train_gpt
