// Tensor parallelism for a Llama with grouped-query attention, as it is: a plan names its layers, and each rank of a group
// holds and computes a slice of each. Groups share the batch, as in data parallelism.
//
//   cookbook_tensor_parallel                             one rank, the whole model
//   zp run -n 2 -- cookbook_tensor_parallel 2            one group of two ranks
//   zp run -n 4 -- cookbook_tensor_parallel 2            two groups: {data 2, tensor 2}
//
// The losses are those of one rank.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include <torch/torch.h>
#include <zeropage/zeropage.h>

constexpr int kSteps = 20;
constexpr int64_t kBatch = 24;  // over all ranks

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

using zeropage::Cut;

// A unit is what stays together on a rank. Queries that share a key go where their key goes, so a unit of the queries, and
// of what is made of them, is all heads of one key.
const zeropage::TensorParallelPlan kPlan = {
    {"embedding", Cut::vocabulary()},  // and the head, which uses its weight
    {"blocks.*.queries", Cut::column().unit(kHeads / kKeyHeads * kHead)},
    {"blocks.*.keys", Cut::column().unit(kHead)},
    {"blocks.*.values", Cut::column().unit(kHead)},
    {"blocks.*.out", Cut::row().unit(kHeads / kKeyHeads * kHead)},
    {"blocks.*.gate", Cut::column()},
    {"blocks.*.up", Cut::column()},
    {"blocks.*.down", Cut::row()}};

void train(int tensor_ranks) {
  const zeropage::World world = zeropage::World::from_environment();
  const zeropage::Mesh mesh(world,
                            {{"data", world.size() / tensor_ranks}, {"tensor", tensor_ranks}});
  torch::set_num_threads(1);
  torch::manual_seed(1);
  Llama llama;  // first values before the cut
  zeropage::tensor_parallel(llama, mesh["tensor"], kPlan);

  zeropage::Options options;
  options.stage = zeropage::Stage::kParameters;  // slices are sharded over "data"
  zeropage::DistributedDataParallel<Llama> model(llama, mesh, options);
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(3e-3));
  // A model with dropout is seeded here, by mesh["data"].rank(): ranks of "tensor" draw alike.

  for (int step = 1; step <= kSteps; ++step) {
    const torch::Tensor tokens = samples_of(step, mesh["data"]);  // alike on ranks of "tensor"
    const torch::Tensor logits = model(tokens.narrow(1, 0, kLength));
    const torch::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), tokens.narrow(1, 1, kLength).flatten());
    optimizer.zero_grad();
    loss.backward();
    const double norm =
        zeropage::clip_grad_norm_(model, 1.0).before;  // of the whole model, on all ranks
    optimizer.step();
    if (step % 5 != 0) continue;
    const double mean = mesh["data"].mean(loss.item<double>());
    if (world.rank() == 0) std::printf("step %3d  norm %.4f  loss %.4f\n", step, norm, mean);
  }
}

int main(int argc, char** argv) {
  try {
    train(argc > 1 ? std::atoi(argv[1]) : 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
