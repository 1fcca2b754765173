// The model as a run trains it, all of it on each rank or as stages of a pipeline: what is computed of batches, and what
// the ranks send each other for it.
//
// Lifetime: the places outlive it. Threads: the training thread. Collective: all that computes.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "bench/train_gpt/model.h"

namespace train_gpt {

class TrainedGpt {
 public:
  // Runs a forward under what the flags keep of activations.
  using RunForward = std::function<torch::Tensor(const std::function<torch::Tensor()>& forward)>;
  // What lives as long as a micro-step.
  using BeginMicroStep = std::function<std::shared_ptr<void>(int64_t micro_step)>;

  TrainedGpt(const Places& places, const Flags& flags);

  zeropage::DistributedDataParallelBase& model();
  std::unique_ptr<zeropage::ShardedOptimizer> make_optimizer();
  // What became of layers of experts; empty where all ranks have all experts.
  const std::vector<zeropage::PlacedExperts>& experts() const { return experts_; }
  // Whether tokens travel to other ranks' experts.
  bool cuts_experts() const;
  // Null: this rank has some of the layers.
  Model* whole() { return whole_.get(); }

  // Before the first step, and after the optimizer was made.
  void begin(const RunForward& run_forward);
  zeropage::Accumulator& accumulator();
  // Forwards and backwards of a step's micro-batches.
  void backward(const std::vector<Batch>& batches, const BeginMicroStep& begin_micro_step);
  // The mean of this place's micro-batches, the same on all of its stages.
  torch::Tensor loss() const;

  // The mean over held-out windows, which the ranks with other samples share; the same on all ranks. windows: how many,
  // the same on all ranks. Where that takes long, one rank prints how far it is.
  double held_out_loss(const TextData& data, int64_t windows);
  // SHA-256 of the whole weights, on the first rank; "" where ranks have slices.
  std::string weights_sha256();

  // What this rank sent to those that have the other layers.
  zeropage::comm::WireTraffic sent_along_pipeline() const;
  // Writes what they did in the last step (zeropage/schedule.h).
  void write_timeline(const std::string& path) const;

 private:
  const Places& places_;
  const Flags& flags_;
  std::unique_ptr<Model> whole_;
  std::vector<zeropage::PlacedExperts> experts_;
  std::unique_ptr<zeropage::Accumulator> accumulator_;  // of it
  std::unique_ptr<zeropage::Pipeline::Model> stages_;
  std::unique_ptr<zeropage::Pipeline> pipeline_;
  RunForward run_forward_;
};

}  // namespace train_gpt
