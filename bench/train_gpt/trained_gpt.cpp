#include "bench/train_gpt/trained_gpt.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <utility>

#include "examples/output_files/output_files.h"
#include "examples/weights_hash/weights_hash.h"
#include "zeropage/check.h"
#include "zeropage/context_parallel.h"
#include "zeropage/pipeline.h"
#include "zeropage/schedule.h"

namespace train_gpt {
namespace {

// The losses of windows, of one rank or of several.
class MeanLoss {
 public:
  void add(const torch::Tensor& loss) {
    sum_and_count_[0] += loss.item<double>();
    sum_and_count_[1] += 1;
  }
  double over(const zeropage::World& world) const {
    world.communicator()
        .all_reduce(sum_and_count_, zeropage::comm::ReduceOp::kSum, "the held-out loss")
        .wait();
    return (sum_and_count_[0] / sum_and_count_[1]).item<double>();
  }

 private:
  torch::Tensor sum_and_count_ = torch::zeros({2}, torch::kFloat64);
};

// The windows of this rank among those that share them: each has as many, and the last ones may be there twice.
struct HeldOutWindows {
  HeldOutWindows(const TextData& text, const Places& places, int64_t count_of_all)
      : data(text),
        device(places.samples.device()),
        ranks(places.sample_places()),
        rank(places.sample_place()),
        windows(count_of_all) {}

  int64_t count() const { return (windows + ranks - 1) / ranks; }
  bool counts(int64_t index) const { return index * ranks + rank < windows; }
  Batch operator[](int64_t index) const {
    return to_device(data.held_out_window(std::min(index * ranks + rank, windows - 1)), device);
  }

  const TextData& data;
  const torch::Device device;
  const int64_t ranks, rank, windows;
};

// This rank's part of samples.
Batch own_tokens(const Places& places, const Batch& batch) {
  const zeropage::World* const context = places.along("context");
  if (context == nullptr) return batch;
  using zeropage::parallel::split_context;
  return {split_context(batch.inputs, 1, *context), split_context(batch.targets, 1, *context)};
}

// How far an evaluation is, once it takes long.
class HeldOutProgress {
 public:
  explicit HeldOutProgress(bool prints) : prints_(prints) {}

  void tell(int64_t done, int64_t windows) {
    constexpr auto kSilence = std::chrono::seconds(10);
    if (!prints_ || Clock::now() - last_line_ < kSilence) return;
    last_line_ = Clock::now();
    std::cout << "held out: " << std::min(done, windows) << "/" << windows << " windows"
              << std::endl;
  }

 private:
  using Clock = std::chrono::steady_clock;
  const bool prints_;
  Clock::time_point last_line_ = Clock::now();
};

}  // namespace

TrainedGpt::TrainedGpt(const Places& places, const Flags& flags) : places_(places), flags_(flags) {
  if (places.along("pipeline") == nullptr) {
    MadeModel made = make_model(places, flags);
    whole_ = std::move(made.model);
    experts_ = std::move(made.experts);
  } else {
    stages_ = std::make_unique<zeropage::Pipeline::Model>(make_stages(places, flags));
  }
}

zeropage::DistributedDataParallelBase& TrainedGpt::model() {
  if (whole_) return *whole_;
  return *stages_;
}

bool TrainedGpt::cuts_experts() const {
  return std::any_of(experts_.begin(), experts_.end(),
                     [](const zeropage::PlacedExperts& layer) { return layer.tokens_travel; });
}

std::unique_ptr<zeropage::ShardedOptimizer> TrainedGpt::make_optimizer() {
  if (whole_) return train_gpt::make_optimizer(flags_, *whole_);
  return train_gpt::make_optimizer(flags_, *stages_);
}

void TrainedGpt::begin(const RunForward& run_forward) {
  run_forward_ = run_forward;
  if (whole_) {
    accumulator_ = std::make_unique<zeropage::Accumulator>(*whole_, flags_.accumulator);
    return;
  }
  pipeline_ = std::make_unique<zeropage::Pipeline>(
      *stages_, zeropage::PipelineOptions{.schedule = flags_.schedule_kind(),
                                          .accumulator = flags_.accumulator,
                                          .run_forward = run_forward});
  if (flags_.simulates()) {
    pipeline_->expect_activations({flags_.batch, flags_.model.sequence, flags_.model.d_model},
                                  flags_.dtype());
  }
}

zeropage::Accumulator& TrainedGpt::accumulator() {
  return whole_ ? *accumulator_ : pipeline_->accumulator();
}

void TrainedGpt::backward(const std::vector<Batch>& batches,
                          const BeginMicroStep& begin_micro_step) {
  if (whole_) {
    for (const Batch& batch : batches) {
      const auto micro_step = begin_micro_step(accumulator_->micro_step());
      const Batch there = own_tokens(places_, to_device(batch, places_.samples.device()));
      accumulator_->backward(run_forward_([&] { return training_loss_of(*whole_, there); }));
    }
    return;
  }
  std::vector<torch::Tensor> inputs, targets;
  for (const Batch& batch : batches) {
    const Batch there = to_device(batch, places_.samples.device());
    inputs.push_back(there.inputs);
    targets.push_back(there.targets);
  }
  pipeline_->run(inputs, [&](const torch::Tensor& logits, int64_t micro_batch) {
    return next_token_loss(logits, targets[static_cast<size_t>(micro_batch)]);
  });
}

torch::Tensor TrainedGpt::loss() const {
  return whole_ ? accumulator_->loss() : pipeline_->loss();
}

double TrainedGpt::held_out_loss(const TextData& data, int64_t count) {
  const torch::NoGradGuard no_grad;
  model().eval();
  const HeldOutWindows windows(data, places_, count);
  MeanLoss mean;
  if (whole_) {
    HeldOutProgress progress(places_.is_first());
    // All run forward as often: at stage 3 it is collective.
    for (int64_t index = 0; index < windows.count(); ++index) {
      const auto loss = loss_of(*whole_, own_tokens(places_, windows[index]));
      if (windows.counts(index)) mean.add(loss);
      progress.tell((index + 1) * windows.ranks, windows.windows);
    }
    return mean.over(places_.samples);
  }
  std::vector<torch::Tensor> inputs;
  for (int64_t index = 0; index < windows.count(); ++index) {
    inputs.push_back(windows[index].inputs);
  }
  // The last stage has the losses, and its first rank tells of them.
  HeldOutProgress progress(places_.samples.rank() == 0 && (places_.along("tensor") == nullptr ||
                                                           places_.along("tensor")->rank() == 0));
  pipeline_->evaluate(inputs, windows.count(), [&](const torch::Tensor& logits, int64_t index) {
    if (windows.counts(index)) mean.add(next_token_loss(logits, windows[index].targets));
    progress.tell((index + 1) * windows.ranks, windows.windows);
  });
  // Those of the last stage have some.
  const zeropage::World& stages = *places_.along("pipeline");
  const auto loss = torch::full({1}, mean.over(places_.samples), torch::kFloat64);
  const auto there = loss.to(stages.device());
  stages.communicator().broadcast(there, stages.size() - 1, "the held-out loss").wait();
  return there.item<double>();
}

std::string TrainedGpt::weights_sha256() {
  if (places_.along("tensor") != nullptr) return "";
  WeightsHash hash;
  const auto add = [&](const std::string&, const torch::Tensor& values) { hash.add(values); };
  if (whole_) {
    zeropage::visit_parameters(*whole_, add);
  } else {
    zeropage::visit_whole_model(*stages_, add);
  }
  return hash.hex();
}

zeropage::comm::WireTraffic TrainedGpt::sent_along_pipeline() const {
  if (whole_) return {};
  zeropage::comm::WireTraffic sent = (*stages_)->ranks().communicator().wire_traffic();
  // In a simulated world that counts all.
  if (flags_.simulates()) return sent;
  const zeropage::comm::Traffic beside = pipeline_->sent();
  sent.pair.bytes += beside.bytes;
  sent.pair.messages += beside.messages;
  if (const auto& ends = (*stages_)->model_part()->tied) {
    const zeropage::comm::WireTraffic of_ends = ends->communicator().wire_traffic();
    sent.pair.bytes += of_ends.pair.bytes;
    sent.pair.messages += of_ends.pair.messages;
    sent.broadcast.bytes += of_ends.broadcast.bytes;
    sent.broadcast.messages += of_ends.broadcast.messages;
  }
  return sent;
}

void TrainedGpt::write_timeline(const std::string& path) const {
  zeropage::parallel::TimedStep step = pipeline_->timed_step();
  if (!places_.is_first()) return;
  step.schedule = flags_.schedule;
  examples::write_output({"--timeline", path}, to_json(step) + '\n');
}

}  // namespace train_gpt
