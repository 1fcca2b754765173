// Modules whose attention runs over a context axis, and what runs in its place.
//
// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <torch/nn/module.h>

#include "operators/operator_interceptor.h"
#include "parallel/context/model_ranks.h"
#include "zeropage/context_parallel.h"

namespace zeropage::parallel::context {

// Runs context_attention() in the place of LibTorch's scaled_dot_product_attention.
class SplitAttention final : public operators::OperatorReplacement {
 public:
  SplitAttention(const comm::World& world, ContextForm form) : world_(world), form_(form) {}

  bool replaces(const c10::OperatorHandle& handle) const override;
  void run(torch::jit::Stack& stack) override;

  const comm::World& world() const { return world_; }
  // How often it ran.
  int64_t count() const { return count_; }
  // Since the last call: whether it ran, or a gradient came back to it, which a backward of a graph that was kept does again. Also
  // true where it ran last without a gradient in sight, as in a model whose head alone is trained.
  bool was_met();

 private:
  const comm::World world_;
  const ContextForm form_;
  std::atomic<int64_t> count_ = 0;
  std::atomic<bool> has_gradient_ = true;
  // What forwards and backwards count in; a graph may outlive the model.
  const std::shared_ptr<std::atomic<int64_t>> meetings_ = std::make_shared<std::atomic<int64_t>>(0);
  int64_t meetings_before_ = 0;
};

// Counts LibTorch's attention, and replaces none.
class CountedAttention final : public operators::OperatorReplacement {
 public:
  bool replaces(const c10::OperatorHandle& handle) const override;
  void run(torch::jit::Stack& stack) override;

  int64_t count() const { return count_; }

 private:
  mutable std::atomic<int64_t> count_ = 0;
};

// What a wrapped model's forwards are, for attention: whose ranks average its gradients, and what runs in attention's place.
//
// Threads: the training thread.
class ModelForwards {
 public:
  // ranks: that average the model's gradients. shares_samples: whether they have parts of the same samples, along a context axis.
  ModelForwards(const torch::nn::Module& module, comm::World ranks, bool shares_samples);
  ~ModelForwards();
  ModelForwards(const ModelForwards&) = delete;
  ModelForwards& operator=(const ModelForwards&) = delete;

  void begin();
  // A forward has returned. Throws where attention was to run over a context axis and none did, and where attention ran over
  // a rank's tokens alone that shares samples with others.
  void check() const;
  // It has ended, also by an exception.
  void end() noexcept;

  const std::shared_ptr<SplitAttention>& attention() const { return attention_; }

 private:
  const torch::nn::Module& module_;
  const std::shared_ptr<SplitAttention>
      attention_;  // null where context_parallel() did not mark the module
  const std::shared_ptr<CountedAttention> unsplit_;  // null where it did, or samples are not shared
  const comm::World ranks_;
  const int model_;  // its number among those of the ranks
  int64_t forwards_ = 0;
  int64_t attended_before_ = 0;  // by attention_, or by unsplit_
  int64_t split_before_ = 0;     // by context_attention()
  std::optional<ModelRanksScope> of_model_;
  std::optional<operators::ReplacementScope> splitting_;
};

// Null where context_parallel() did not mark the module.
std::shared_ptr<SplitAttention> split_attention_of(const torch::nn::Module& module);
// A module within it that is marked, by its name; "" where there is none.
std::string marked_within(const torch::nn::Module& module);

}  // namespace zeropage::parallel::context
