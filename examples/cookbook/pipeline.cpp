// A Llama as a pipeline, with all that makes that hard: one rotary table that every block reads, a head that is the
// embedding on the first rank, and a mesh of three axes {pipeline, data, tensor}.
//
//   cookbook_pipeline                                    one rank
//   zp run -n 2 -- cookbook_pipeline 2 1 1               two stages
//   zp run -n 4 -- cookbook_pipeline 2 2 1               two stages, each on two ranks with other samples
//   zp run -n 8 -- cookbook_pipeline 2 2 2               and each of those on two ranks with slices of its layers
//
// The model is written as without a pipeline. The losses are those of one rank.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include <torch/torch.h>
#include <zeropage/pipeline.h>
#include <zeropage/zeropage.h>

constexpr int kSteps = 20, kMicroBatches = 4;
constexpr int64_t kBatch = 24;  // over all ranks, of a step

// Llama: RMS norms, rotary positions, attention of 8 heads that share 4 keys, SwiGLU, and a head that is the embedding.
constexpr int64_t kTokens = 64, kWidth = 64, kHeads = 8, kKeyHeads = 4, kHead = 8, kInner = 128;
constexpr int64_t kBlocks = 4, kLength = 32;

struct RmsNormImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::rms_norm(x, {kWidth}, weight, 1e-5);
  }
  torch::Tensor weight = register_parameter("weight", torch::ones({kWidth}));
};
TORCH_MODULE(RmsNorm);

// x: [batch, heads, length, kHead]. table: [2, kLength, kHead / 2], cosines and sines.
torch::Tensor rotated(const torch::Tensor& x, const torch::Tensor& table) {
  const auto halves = x.chunk(2, -1);
  return torch::cat(
      {halves[0] * table[0] - halves[1] * table[1], halves[1] * table[0] + halves[0] * table[1]},
      -1);
}

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& table) {
    const torch::Tensor y = x + attention(first_norm(x), table);
    const torch::Tensor z = second_norm(y);
    return y + down(torch::silu(gate(z)) * up(z));
  }
  torch::Tensor attention(const torch::Tensor& x, const torch::Tensor& table) {
    // -1: a rank of a tensor-parallel group has some of the heads.
    const auto heads = [&](torch::nn::Linear& linear) {
      return linear(x).view({x.size(0), x.size(1), -1, kHead}).transpose(1, 2);
    };
    const auto shared = [](const torch::Tensor& t) {
      return t.repeat_interleave(kHeads / kKeyHeads, 1);
    };
    const torch::Tensor mixed = torch::scaled_dot_product_attention(
        rotated(heads(queries), table), shared(rotated(heads(keys), table)), shared(heads(values)),
        /*attn_mask=*/{}, /*dropout_p=*/0, /*is_causal=*/true);
    return out(mixed.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear linear(const char* name, int64_t inputs, int64_t outputs) {
    return register_module(
        name, torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(false)));
  }
  RmsNorm first_norm = register_module("first_norm", RmsNorm());
  torch::nn::Linear queries = linear("queries", kWidth, kHeads* kHead);
  torch::nn::Linear keys = linear("keys", kWidth, kKeyHeads* kHead);
  torch::nn::Linear values = linear("values", kWidth, kKeyHeads* kHead);
  torch::nn::Linear out = linear("out", kHeads* kHead, kWidth);
  RmsNorm second_norm = register_module("second_norm", RmsNorm());
  torch::nn::Linear gate = linear("gate", kWidth, kInner), up = linear("up", kWidth, kInner);
  torch::nn::Linear down = linear("down", kInner, kWidth);
};
TORCH_MODULE(Block);

struct LlamaImpl : torch::nn::Module {
  LlamaImpl() {
    torch::nn::init::normal_(embedding->weight, 0, 0.02);
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    const torch::Tensor rates = torch::pow(10000.0, -torch::arange(0, kHead, 2) / double{kHead});
    const torch::Tensor angles = torch::outer(torch::arange(kLength), rates);
    table = register_buffer("table", torch::stack({angles.cos(), angles.sin()}));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = embedding(tokens);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x, table);
    return torch::nn::functional::linear(norm(x), embedding->weight);
  }
  torch::nn::Embedding embedding =
      register_module("embedding", torch::nn::Embedding(kTokens, kWidth));
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  RmsNorm norm = register_module("norm", RmsNorm());
  torch::Tensor table;
};
TORCH_MODULE(Llama);

// Sequences that count in steps of 1 to 7. Every rank draws the whole batch and takes its part.
torch::Tensor samples_of(int64_t number, const zeropage::World& world) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(number));
  const torch::Tensor first = torch::randint(kTokens, {kBatch, 1}, generator);
  const torch::Tensor by = torch::randint(1, 8, {kBatch, 1}, generator);
  const torch::Tensor tokens = (first + by * torch::arange(kLength + 1)).remainder(kTokens);
  return tokens.chunk(world.size())[world.rank()];
}

// What the pipeline cuts: each layer takes and returns one tensor, and says whose parameters and buffers it uses.
zeropage::PipelineLayers layers_of(Llama& llama) {
  zeropage::PipelineLayers layers;
  layers.push_back(
      {"embedding", {llama->embedding.ptr()}, [llama](const torch::Tensor& tokens) mutable {
         return llama->embedding->forward(tokens);
       }});
  for (const auto& block : *llama->blocks) {
    layers.push_back({"block", {block}, [llama, block](const torch::Tensor& x) {
                        return block->as<Block>()->forward(x, llama->table);
                      }});
    layers.back().tensors = {llama->table};  // every rank has it
  }
  layers.push_back({"head",
                    {llama->norm.ptr(), llama->embedding.ptr()},  // the embedding: tied
                    [llama](const torch::Tensor& x) mutable {
                      return torch::nn::functional::linear(llama->norm->forward(x),
                                                           llama->embedding->weight);
                    }});
  return layers;
}

// The names that this rank's stage has: blocks are on all, the embedding on the first and the last.
zeropage::TensorParallelPlan plan_of(const zeropage::PipelineStage& stage) {
  using zeropage::Cut;
  constexpr int64_t kQueriesOfAKey = kHeads / kKeyHeads * kHead;
  zeropage::TensorParallelPlan plan = {{"blocks.*.queries", Cut::column().unit(kQueriesOfAKey)},
                                       {"blocks.*.keys", Cut::column().unit(kHead)},
                                       {"blocks.*.values", Cut::column().unit(kHead)},
                                       {"blocks.*.out", Cut::row().unit(kQueriesOfAKey)},
                                       {"blocks.*.gate", Cut::column()},
                                       {"blocks.*.up", Cut::column()},
                                       {"blocks.*.down", Cut::row()}};
  if (stage.named_parameters().contains("embedding.weight"))
    plan.emplace_back("embedding", Cut::vocabulary());
  return plan;
}

void train(int pipeline_ranks, int data_ranks, int tensor_ranks) {
  const zeropage::World world = zeropage::World::from_environment();
  const zeropage::Mesh mesh(
      world, {{"pipeline", pipeline_ranks}, {"data", data_ranks}, {"tensor", tensor_ranks}});
  torch::set_num_threads(1);

  // Equally many blocks a stage: layer 0 is the embedding, and the head goes with the last block.
  zeropage::PipelineStageOptions cut{.first_layers = {0}};
  for (int stage = 1; stage < pipeline_ranks; ++stage)
    cut.first_layers.push_back(1 + stage * kBlocks / pipeline_ranks);
  const auto stage = zeropage::pipeline_stage<Llama>(
      [] {
        torch::manual_seed(1);
        return Llama();
      },
      layers_of, mesh["pipeline"], cut);
  zeropage::tensor_parallel(*stage, mesh["tensor"], plan_of(*stage));

  zeropage::Pipeline::Model model(stage, mesh, zeropage::Options{});
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(3e-3));
  zeropage::Pipeline pipeline(model,
                              {.accumulator = {.micro_steps = kMicroBatches, .clip_norm = 1.0}});

  for (int step = 1; step <= kSteps; ++step) {
    const torch::Tensor tokens = samples_of(step, mesh["data"]);
    const auto inputs = tokens.narrow(1, 0, kLength).chunk(kMicroBatches);   // of the first rank
    const auto targets = tokens.narrow(1, 1, kLength).chunk(kMicroBatches);  // of the last
    pipeline.run(inputs, [&](const torch::Tensor& logits, int64_t micro_batch) {
      return torch::nn::functional::cross_entropy(
          logits.flatten(0, 1), targets[static_cast<size_t>(micro_batch)].flatten());
    });
    const zeropage::StepReport report = pipeline.accumulator().step(optimizer);
    if (step % 5 != 0) continue;
    const double loss = mesh["data"].mean(pipeline.loss().item<double>());  // on all stages
    if (world.rank() == 0) {
      std::printf("step %3d  norm %.4f  loss %.4f\n", step, report.norm, loss);
    }
  }
}

int main(int argc, char** argv) {
  if (argc != 1 && argc != 4) {
    std::fprintf(stderr, "usage: %s [PIPELINE DATA TENSOR]    (ranks along each axis)\n", argv[0]);
    return 2;
  }
  const auto ranks_along = [&](int axis) { return argc == 4 ? std::atoi(argv[axis + 1]) : 1; };
  try {
    train(ranks_along(0), ranks_along(1), ranks_along(2));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
