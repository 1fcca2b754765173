#include "bench/train_gpt/text_sample.h"

#include <algorithm>
#include <cctype>

#include <ATen/CPUGeneratorImpl.h>

namespace train_gpt {
namespace {

constexpr double kTemperature = 0.8;
constexpr int64_t kPromptBytes = 64;

void append_readable(std::string& text, int64_t token) {
  const bool printable = token < 128 && (std::isprint(static_cast<int>(token)) || token == '\n');
  text += printable ? static_cast<char>(token) : (token == kEndOfText ? '\n' : '?');
}

}  // namespace

std::string sample_text(zeropage::DistributedDataParallel<Gpt>& model, const TextData& data,
                        int64_t count, uint64_t seed) {
  const torch::NoGradGuard no_grad;
  model.eval();
  auto generator = at::detail::createCPUGenerator(seed);
  const torch::Device device = model.world().device();
  const torch::Tensor window = data.held_out_window(0).inputs;
  const int64_t sequence = window.size(1);
  torch::Tensor context = window.narrow(1, 0, std::min(kPromptBytes, sequence));
  std::string text;
  for (int64_t i = 0; i < context.size(1); ++i)
    append_readable(text, context[0][i].item<int64_t>());
  text += "|";
  for (int64_t drawn = 0; drawn < count; ++drawn) {
    const auto logits =
        model(context.to(device)).select(1, -1).to(torch::kCPU, torch::kFloat32) / kTemperature;
    const auto next = torch::multinomial(torch::softmax(logits, -1), 1, false, generator);
    append_readable(text, next.item<int64_t>());
    context = torch::cat({context, next}, 1);
    if (context.size(1) > sequence) context = context.narrow(1, 1, sequence);
  }
  return text;
}

}  // namespace train_gpt
