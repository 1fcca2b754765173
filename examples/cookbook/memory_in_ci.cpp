// A test of a model's memory for your own CI: it trains some steps, compares what each rank held with a formula of the
// model's sizes, and ends with exit code 1 and a table where a rank held more.
//
//   cookbook_memory_in_ci                                one rank
//   zp run -n 4 -- cookbook_memory_in_ci                 what four would hold, each
//   cookbook_memory_in_ci --keep-outputs                 with a mistake, which the test finds
//
// In CMake: add_test(NAME memory COMMAND zp run -n 4 -- cookbook_memory_in_ci)
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <vector>

#include <torch/torch.h>
#include <zeropage/zeropage.h>

constexpr int64_t kBatch = 64, kWidth = 128, kInner = 512, kBlocks = 4;  // a batch: of each rank

struct BlockImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm =
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  torch::nn::Linear up = register_module("up", torch::nn::Linear(kWidth, kInner));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(kInner, kWidth));
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int64_t i = 0; i < kBlocks; ++i) blocks->push_back(Block());
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
};
TORCH_MODULE(Net);

struct Bounds {
  int64_t held = 0;  // between two steps
  int64_t peak = 0;  // within one
};

// In bytes of a rank at stage 3, in fp32 with AdamW. Change it together with the model, and say why.
Bounds bounds_of(int64_t parameters, int64_t ranks, int64_t page_bytes) {
  constexpr int64_t kFloat = sizeof(float);
  // A shard is padded by less than 256 elements a page and 64 bytes a parameter, of which a block has 6.
  const int64_t pages = parameters * kFloat / page_bytes + 2;
  const int64_t padding = (256 * kFloat * pages + 64 * 6 * kBlocks) * 3;
  // Buffers of the ranks' messages, which stay.
  const int64_t messages = ranks > 1 ? 4 * page_bytes : 0;
  // Weights and AdamW's two moments.
  const int64_t held = 3 * kFloat * parameters / ranks + padding + messages;
  // A block keeps the input of each of its layers: of norm and up kWidth a sample, of gelu and down kInner.
  constexpr int64_t kKept = kFloat * kBatch * (2 * kWidth + 2 * kInner);
  // Backward holds gradients of a block's activations beside them, at most as many again.
  const int64_t activations = kKept * kBlocks + kKept;
  // Whole pages: the one in use, the one that is gathered ahead, and a bucket of gradients.
  const int64_t transient = 3 * page_bytes;
  const int64_t gradients = kFloat * parameters / ranks + padding / 3;
  const int64_t batch = 2 * kFloat * kBatch * kWidth;  // inputs and targets
  return {.held = held, .peak = held + gradients + activations + transient + batch};
}

int test_memory(bool keeps_outputs) {
  const zeropage::World world = zeropage::World::from_environment();
  torch::set_num_threads(1);
  zeropage::Options options;
  options.stage = zeropage::Stage::kParameters;
  options.page_bytes = kWidth * kInner * static_cast<int64_t>(sizeof(float));  // of one matrix
  zeropage::DistributedDataParallel<Net> model(zeropage::DeferredModule<Net>([] { return Net(); }),
                                               world, options);
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
  int64_t parameters = 0;
  for (const auto& parameter : model.parameters()) parameters += parameter.numel();

  std::vector<torch::Tensor> kept;
  for (int step = 0; step < 20; ++step) {  // enough for what grows by a tensor a step
    if (step == 1) zeropage::Ledger::current()->reset_peak();  // the first step makes what stays
    const torch::Tensor x = torch::randn({kBatch, kWidth});
    const torch::Tensor output = model(x);
    const torch::Tensor loss = torch::mse_loss(output, torch::tanh(x));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (keeps_outputs) kept.push_back(output);  // for a metric later: the mistake
  }
  optimizer.zero_grad();

  const Bounds bounds = bounds_of(parameters, world.size(), options.page_bytes);
  const zeropage::MemoryReport report = zeropage::memory_report(world);  // of all ranks
  bool passed = true;
  for (const auto& rank : report.ranks)
    passed = passed && rank.held.total() <= bounds.held && rank.at_peak.total() <= bounds.peak;
  if (world.rank() == 0) {
    using zeropage::format_bytes;
    std::cout << report << "bounds: held " << format_bytes(bounds.held) << ", peak "
              << format_bytes(bounds.peak) << (passed ? "; passed" : "; a rank held more")
              << std::endl;
  }
  return passed ? 0 : 1;
}

int main(int argc, char** argv) {
  try {
    return test_memory(argc > 1 && std::strcmp(argv[1], "--keep-outputs") == 0);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", zeropage::message_of(error).c_str());
    return 1;
  }
}
