// Prints what a rank keeps for backward of transformer blocks that are cut over ranks, by the ledger, and what it
// sends: with the tokens between the layers on all ranks, and cut over them. sequence_parallel --help.
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/ATen.h>
#include <CLI/CLI.hpp>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/normalization.h>

#include "bench/measuring_main.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/parallel_layers.h"
#include "zeropage/world.h"

namespace {

using zeropage::comm::World;
using namespace zeropage::parallel;

constexpr double kMib = 1 << 20;

struct Flags {
  std::vector<int> ranks = {1, 2, 4};
  int64_t d_model = 256;
  int64_t heads = 8;
  int64_t layers = 4;
  int64_t sequence = 256;
  int64_t batch = 4;

  // Size of an activation between the layers, with all tokens.
  int64_t activation_bytes() const { return batch * sequence * d_model * 4; }
};

// A pre-norm block of attention and an MLP, as in examples/train_gpt, of layers that are cut over ranks. Norm: of all
// tokens or of slices.
template <typename Norm>
class Block : public torch::nn::Module {
 public:
  static constexpr bool kCutsSequence = std::is_same_v<Norm, SequenceParallelLayerNorm>;

  Block(const Flags& flags, const World& world) : head_(flags.d_model / flags.heads) {
    const int64_t d = flags.d_model;
    LinearOptions to_heads = options(d, 3 * d);
    to_heads.parts = 3;
    to_heads.unit = head_;
    LinearOptions from_heads = options(d, d);
    from_heads.unit = head_;
    attention_norm_ = register_module("attention_norm", norm(d, world));
    attention_qkv_ = register_module("attention_qkv", ColumnParallelLinear(to_heads, world));
    attention_out_ = register_module("attention_out", RowParallelLinear(from_heads, world));
    mlp_norm_ = register_module("mlp_norm", norm(d, world));
    mlp_up_ = register_module("mlp_up", ColumnParallelLinear(options(d, 4 * d), world));
    mlp_down_ = register_module("mlp_down", RowParallelLinear(options(4 * d, d), world));
  }

  // [batch, tokens, d_model], of this rank's tokens where the sequence is cut
  at::Tensor forward(at::Tensor x) {
    const auto qkv = attention_qkv_(attention_norm_(x)).chunk(3, -1);
    const auto by_head = [&](const at::Tensor& t) {
      return t.view({t.size(0), t.size(1), -1, head_}).transpose(1, 2);
    };
    const at::Tensor mixed =
        at::scaled_dot_product_attention(by_head(qkv[0]), by_head(qkv[1]), by_head(qkv[2]), {},
                                         /*dropout_p=*/0, /*is_causal=*/true);
    x = x + attention_out_(mixed.transpose(1, 2).flatten(2));
    return x + mlp_down_(at::gelu(mlp_up_(mlp_norm_(x))));
  }

 private:
  static LinearOptions options(int64_t inputs, int64_t outputs) {
    LinearOptions of_layer(inputs, outputs);
    if (kCutsSequence) of_layer.sequence_dim = 1;
    return of_layer;
  }
  static Norm norm(int64_t width, const World& world) {
    const torch::nn::LayerNormOptions of_norm({width});
    if constexpr (kCutsSequence) {
      return Norm(of_norm, world);
    } else {
      return Norm(of_norm);
    }
  }

  const int64_t head_;
  Norm attention_norm_{nullptr}, mlp_norm_{nullptr};
  ColumnParallelLinear attention_qkv_{nullptr}, mlp_up_{nullptr};
  RowParallelLinear attention_out_{nullptr}, mlp_down_{nullptr};
};

struct Figures {
  int64_t kept_bytes = 0;  // after forward
  int64_t peak_bytes = 0;  // of activations, in forward and backward
  int64_t sent_bytes = 0;  // in both
};

int64_t sent_by(const World& world) {
  const auto sent = world.communicator().wire_traffic();
  return sent.all_gather.bytes + sent.reduce_scatter.bytes + sent.all_reduce.bytes;
}

template <typename Norm>
Figures measure(const Flags& flags, const World& world) {
  using Blocks = Block<Norm>;
  std::vector<std::shared_ptr<Blocks>> blocks;
  for (int64_t layer = 0; layer < flags.layers; ++layer) {
    blocks.push_back(std::make_shared<Blocks>(flags, world));
  }
  zeropage::memory::Ledger& ledger = *zeropage::memory::Ledger::current();
  const int64_t before = ledger.now().activations();
  const int64_t sent_before = sent_by(world);
  at::Tensor x = at::ones({flags.batch, flags.sequence, flags.d_model}).requires_grad_();
  if (Blocks::kCutsSequence) x = split_sequence(x, 1, world).detach().requires_grad_();
  ledger.reset_peak();
  for (const auto& block : blocks) x = block->forward(x);
  Figures figures;
  figures.kept_bytes = ledger.now().activations() - before;
  x.sum().backward();
  figures.peak_bytes = ledger.activation_peak() - before;
  figures.sent_bytes = sent_by(world) - sent_before;
  return figures;
}

void print_row(const Flags& flags, int ranks, const char* tokens, const Figures& figures) {
  const auto share = static_cast<double>(flags.activation_bytes() * flags.layers);
  std::printf("| %d | %s | %.1f | %.2f | %.1f | %.1f |\n", ranks, tokens,
              static_cast<double>(figures.kept_bytes) / kMib,
              static_cast<double>(figures.kept_bytes) / share,
              static_cast<double>(figures.peak_bytes) / kMib,
              static_cast<double>(figures.sent_bytes) / kMib);
}

void print_table(const Flags& flags) {
  std::printf(
      "%ld blocks of width %ld and %ld heads, %ld samples of %ld tokens, fp32; an activation has "
      "%.1f MiB\n\n",
      flags.layers, flags.d_model, flags.heads, flags.batch, flags.sequence,
      static_cast<double>(flags.activation_bytes()) / kMib);
  std::printf(
      "| ranks | tokens between the layers | kept by forward, MiB | activations a block | "
      "peak of a step, MiB | sent a step, MiB |\n|---|---|---|---|---|---|\n");
  for (const int ranks : flags.ranks) {
    World::threads(ranks, [&](const World& world) {
      const Figures whole = measure<torch::nn::LayerNorm>(flags, world);
      const Figures cut = measure<SequenceParallelLayerNorm>(flags, world);
      if (world.rank() != 0) return;
      print_row(flags, ranks, "on all ranks", whole);
      if (ranks > 1) print_row(flags, ranks, "cut", cut);
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Prints what a rank keeps of transformer blocks that are cut over ranks, and sends.");
  app.option_defaults()->always_capture_default();
  app.add_option("--ranks", flags.ranks, "Numbers of ranks, which are threads")->delimiter(',');
  app.add_option("--d-model", flags.d_model, "Width");
  app.add_option("--heads", flags.heads, "Attention heads, which the ranks divide");
  app.add_option("--layers", flags.layers, "Blocks");
  app.add_option("--sequence", flags.sequence, "Tokens of a sample, which the ranks divide");
  app.add_option("--batch", flags.batch, "Samples");
  return bench::parse_and_measure("sequence_parallel", app, argc, argv,
                                  [&] { print_table(flags); });
}
