// A small transformer, whole and as slices, for tests of tensor parallelism.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/torch.h>

#include "zeropage/parallel_layers.h"
#include "zeropage/zeropage.h"

namespace zeropage::tensor_modules {

constexpr int64_t kWidth = 12;
constexpr int64_t kHead = 4;
constexpr int64_t kHidden = 31;
constexpr int64_t kVocabulary = 257;
constexpr int64_t kLength = 6;

inline torch::nn::LayerNorm norm() {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
}

// Attention over three heads, which two ranks share as one and two, and an MLP. [batch, length, kWidth], whose
// length may be that of a slice.
template <typename Module>
torch::Tensor blocks_of(Module& module, torch::Tensor x) {
  const auto by_head = [&](const torch::Tensor& t) {
    return t.view({t.size(0), t.size(1), -1, kHead}).transpose(1, 2);
  };
  const auto qkv = module.qkv(module.norm1(x)).chunk(3, -1);
  const auto mixed =
      at::scaled_dot_product_attention(by_head(qkv[0]), by_head(qkv[1]), by_head(qkv[2]), {}, 0.0,
                                       /*is_causal=*/true);
  x = x + module.out(mixed.transpose(1, 2).flatten(2));
  return x + module.down(torch::gelu(module.up(module.norm2(x))));
}

// ids [batch, length] -> [batch, length, kWidth]; then its head.
struct PlainImpl : torch::nn::Module {
  PlainImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(kVocabulary, kWidth));
    norm1 = register_module("norm1", norm());
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    norm2 = register_module("norm2", norm());
    up = register_module("up", torch::nn::Linear(kWidth, kHidden));
    down = register_module("down", torch::nn::Linear(kHidden, kWidth));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kVocabulary).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& ids) { return blocks_of(*this, tokens(ids)); }
  // With a head of its own, and with one that is tied to the embedding.
  torch::Tensor logits(const torch::Tensor& hidden) {
    return head(hidden) + torch::nn::functional::linear(hidden, tokens->weight);
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr}, head{nullptr};
};
TORCH_MODULE(Plain);

// Norm: torch::nn::LayerNorm, or, where the tokens between the layers are cut, that of slices.
template <typename Norm>
struct SlicedImpl : torch::nn::Module {
  static constexpr bool kCutsSequence = std::is_same_v<Norm, parallel::SequenceParallelLayerNorm>;

  explicit SlicedImpl(const World& world) {
    const auto options = [](int64_t inputs, int64_t outputs) {
      parallel::LinearOptions of_layer(inputs, outputs);
      if (kCutsSequence) of_layer.sequence_dim = 1;
      of_layer.uneven = true;
      return of_layer;
    };
    parallel::LinearOptions attention = options(kWidth, 3 * kWidth);
    attention.parts = 3;
    attention.unit = kHead;
    parallel::LinearOptions mixed = options(kWidth, kWidth);
    mixed.unit = kHead;
    parallel::LinearOptions to_classes = options(kWidth, kVocabulary);
    to_classes.bias = false;
    const auto of_ids = kCutsSequence ? std::optional<int64_t>(1) : std::nullopt;
    tokens = register_module(
        "tokens", parallel::VocabularyParallelEmbedding(kVocabulary, kWidth, world, of_ids));
    norm1 = register_module("norm1", make_norm(world));
    qkv = register_module("qkv", parallel::ColumnParallelLinear(attention, world));
    out = register_module("out", parallel::RowParallelLinear(mixed, world));
    norm2 = register_module("norm2", make_norm(world));
    up = register_module("up", parallel::ColumnParallelLinear(options(kWidth, kHidden), world));
    down = register_module("down", parallel::RowParallelLinear(options(kHidden, kWidth), world));
    head = register_module("head", parallel::ColumnParallelLinear(to_classes, world));
  }
  static Norm make_norm(const World& world) {
    const torch::nn::LayerNormOptions of_norm({kWidth});
    if constexpr (kCutsSequence) {
      return Norm(of_norm, world);
    } else {
      return Norm(of_norm);
    }
  }
  torch::Tensor forward(const torch::Tensor& ids) { return blocks_of(*this, tokens(ids)); }
  parallel::VocabularyParallelEmbedding tokens{nullptr};
  Norm norm1{nullptr}, norm2{nullptr};
  parallel::ColumnParallelLinear qkv{nullptr}, up{nullptr}, head{nullptr};
  parallel::RowParallelLinear out{nullptr}, down{nullptr};
};
using ExplicitImpl = SlicedImpl<torch::nn::LayerNorm>;
TORCH_MODULE(Explicit);
using SequenceImpl = SlicedImpl<parallel::SequenceParallelLayerNorm>;
TORCH_MODULE(Sequence);

inline const TensorParallelPlan& plan() {
  static const TensorParallelPlan whole = {{"q*", Cut::column().parts(3).unit(kHead).uneven()},
                                           {"out", Cut::row().unit(kHead).uneven()},
                                           {"up", Cut::column().uneven()},
                                           {"down", Cut::row().uneven()},
                                           {"tokens", Cut::vocabulary()}};
  return whole;
}

// What a rank has of a parameter.
inline torch::Tensor slice_of(const std::string& name, const torch::Tensor& whole,
                              const World& world, bool cuts_head) {
  struct Of {
    int64_t dim, parts, unit;
  };
  static const std::map<std::string, Of> kCuts = {
      {"tokens.weight", {0, 1, 1}},  {"qkv.weight", {0, 3, kHead}}, {"qkv.bias", {0, 3, kHead}},
      {"out.weight", {1, 1, kHead}}, {"up.weight", {0, 1, 1}},      {"up.bias", {0, 1, 1}},
      {"down.weight", {1, 1, 1}},    {"head.weight", {0, 1, 1}}};
  const auto cut = kCuts.find(name);
  if (cut == kCuts.end() || (name == "head.weight" && !cuts_head)) return whole;
  const auto [dim, parts, unit] = cut->second;
  const parallel::Slices slices(whole.size(dim) / parts, unit, world.size(), name);
  return parallel::SlicedDimension(slices, dim, parts).take(whole, world.rank());
}

inline Plain make_plain() {
  static std::mutex generator;
  const std::lock_guard lock(generator);
  torch::manual_seed(5);
  Plain plain;
  plain->to(torch::kDouble);
  return plain;
}

// Gives a module of slices the whole one's values.
inline void take_slices(torch::nn::Module& sliced, const Plain& whole, const World& world) {
  const torch::NoGradGuard no_grad;
  const auto values = whole->named_parameters();
  for (auto& item : sliced.named_parameters()) {
    item.value().copy_(slice_of(item.key(), values[item.key()], world, true));
  }
}

inline torch::Tensor ids_of(int seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  return torch::randint(0, kVocabulary, {3, kLength}, generator, torch::kLong);
}

inline torch::Tensor targets_of(int seed) {
  torch::Tensor targets = ids_of(seed + 100);
  targets.view({-1})[2] = -100;
  return targets;
}

inline torch::Tensor whole_loss(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.view({-1, kVocabulary}), targets.view({-1}));
}

// One axis of a grid of ranks. name: the same for those that meet.
inline World axis(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
                  const World& of) {
  return World({.rank = rank,
                .world_size = 2,
                .local_rank = of.rank(),
                .local_world_size = 2,
                .launcher = "threads"},
               c10::make_intrusive<c10d::PrefixStore>(name, store));
}

}  // namespace zeropage::tensor_modules
