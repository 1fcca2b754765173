// Training with little memory: bf16 with fp32 master weights, the optimizer on the host, blocks that are computed again,
// small pages, and a limit. What to do when a step does not fit: read what the error advises, and take smaller pieces.
//
//   cookbook_low_memory                                  without a limit
//   cookbook_low_memory 1500KiB                          too little for the batch in one piece
//   zp run -n 2 -- cookbook_low_memory 1700KiB 2         in two pieces; the limit is a rank's
//
// However the batch is cut, the step is that of the whole batch.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>

#include <torch/torch.h>
#include <zeropage/zeropage.h>

using zeropage::operator""_KiB;

constexpr int kSteps = 12;
constexpr int64_t kBatch = 24;  // over all ranks, of a step

// Llama: RMS norms, rotary positions, attention of 8 heads that share 4 keys, SwiGLU, and a head that is the embedding.
constexpr int64_t kTokens = 64, kWidth = 64, kHeads = 8, kKeyHeads = 4, kHead = 8, kInner = 128;
constexpr int64_t kBlocks = 4, kLength = 16;

struct RmsNormImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::rms_norm(x, {kWidth}, weight, 1e-5);
  }
  torch::Tensor weight = register_parameter("weight", torch::ones({kWidth}));
};
TORCH_MODULE(RmsNorm);

// x: [batch, heads, length, kHead]. table: [2, kLength, kHead / 2], cosines and sines in fp32: buffers keep their
// dtype, so what was computed with one goes back to that of the activations.
torch::Tensor rotated(const torch::Tensor& x, const torch::Tensor& table) {
  const auto halves = x.chunk(2, -1);
  return torch::cat({halves[0] * table[0] - halves[1] * table[1],
                     halves[1] * table[0] + halves[0] * table[1]},
                    -1)
      .to(x.scalar_type());
}

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& table) {
    const torch::Tensor y = x + attention(first_norm(x), table);
    const torch::Tensor z = second_norm(y);
    return y + down(torch::silu(gate(z)) * up(z));
  }
  torch::Tensor attention(const torch::Tensor& x, const torch::Tensor& table) {
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
using Region = zeropage::Checkpointed<BlockImpl>;  // keeps its inputs, and runs again in backward

struct LlamaImpl : torch::nn::Module {
  LlamaImpl() {
    torch::nn::init::normal_(embedding->weight, 0, 0.02);
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(std::make_shared<Region>());
    const torch::Tensor rates = torch::pow(10000.0, -torch::arange(0, kHead, 2) / double{kHead});
    const torch::Tensor angles = torch::outer(torch::arange(kLength), rates);
    table = register_buffer("table", torch::stack({angles.cos(), angles.sin()}));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = embedding(tokens);
    for (const auto& block : *blocks) x = block->as<Region>()->forward(x, table);
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

using Model = zeropage::DistributedDataParallel<Llama>;

torch::Tensor loss_on(Model& model, const torch::Tensor& tokens) {
  const torch::Tensor logits = model(tokens.narrow(1, 0, kLength)).to(torch::kFloat);
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                              tokens.narrow(1, 1, kLength).flatten());
}

// Forward and backward of a batch in so many pieces. Returns the mean loss, or nothing if memory did not suffice; then the
// weights are as they were.
std::optional<double> try_batch(Model& model, zeropage::Accumulator& accumulator,
                                const torch::Tensor& tokens, int64_t pieces) {
  double sum = 0;
  try {
    const auto micro_batches = zeropage::micro_batches(tokens, pieces);
    for (int64_t i = 0; i < pieces; ++i) {
      const auto samples = static_cast<double>(micro_batches.samples_in(i));
      const torch::Tensor loss = loss_on(model, micro_batches[i]);
      accumulator.backward(loss, samples);
      sum += loss.item<double>() * samples;
    }
  } catch (const c10::OutOfMemoryError& error) {
    // What was asked for, who held what, and what makes the step fit.
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    // A gradient that ranks have exchanged cannot be taken back, so several ranks begin again from the last state.
    TORCH_CHECK(model.world().size() == 1, "start again with ", 2 * pieces, " pieces");
    return {};
  }
  return model.world().sum(sum) / kBatch;
}

void train(int64_t device_memory_bytes, int64_t pieces) {
  const zeropage::World world = zeropage::World::from_environment();
  torch::set_num_threads(1);
  torch::manual_seed(1);
  zeropage::Options options;
  options.stage = zeropage::Stage::kParameters;
  options.compute_dtype = torch::kBFloat16;
  options.offload.optimizer = zeropage::Tier::kHost;
  options.page_bytes = 64_KiB;  // what is gathered and reduced at once
  options.device_memory_bytes = device_memory_bytes;
  Model model(Llama(), world, options);
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(3e-3));

  auto accumulator = std::make_unique<zeropage::Accumulator>(
      model, zeropage::AccumulatorOptions{.micro_steps = pieces, .clip_norm = 1.0});
  for (int step = 1; step <= kSteps;) {
    const torch::Tensor tokens = samples_of(step, world);
    const std::optional<double> loss = try_batch(model, *accumulator, tokens, pieces);
    if (!loss) {
      // All that saves memory is on already, so what is left of the advice is a smaller micro-batch.
      TORCH_CHECK(pieces < tokens.size(0), "not even a micro-batch of one sample fits");
      pieces = std::min(pieces * 2, tokens.size(0));
      if (world.rank() == 0) std::printf("now in %d pieces\n", static_cast<int>(pieces));
      // The old one drops the gradients of the step that failed, which is made again.
      accumulator.reset();
      accumulator = std::make_unique<zeropage::Accumulator>(
          model, zeropage::AccumulatorOptions{.micro_steps = pieces, .clip_norm = 1.0});
      continue;
    }
    const zeropage::StepReport report = accumulator->step(optimizer);
    if (step % 4 == 0 && world.rank() == 0)
      std::printf("step %3d  norm %.4f  loss %.4f\n", step, report.norm, *loss);
    ++step;
  }
  const int64_t peak = zeropage::Ledger::current()->at_peak().total();
  const double most = world.max(static_cast<double>(peak));
  if (world.rank() == 0)
    std::printf("peak %s\n", zeropage::format_bytes(static_cast<int64_t>(most)).c_str());
}

int main(int argc, char** argv) {
  try {
    train(argc > 1 ? zeropage::parse_bytes(argv[1]) : 0,  // 0: no limit
          argc > 2 ? std::atoi(argv[2]) : 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
