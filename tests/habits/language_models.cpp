// Scripts that train language models of the fused operators.
#include <map>
#include <string>

#include "tests/habits/scripts.h"
#include "zeropage/fused.h"
#include "zeropage/saving.h"

namespace zeropage::habits_of_language_models {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "Language models of fused operators";
constexpr int64_t kVocabulary = 40, kWidth = 16, kHeads = 2;
const RightOptions kInEachDtype{.over = Over::kNotAutocast};

// A linear layer, and a change of low rank to it.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl(int64_t inputs, int64_t outputs) {
    const auto linear = [](int64_t in, int64_t out) {
      return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
    };
    base = register_module("base", linear(inputs, outputs));
    low = register_module("low", linear(inputs, 2));
    high = register_module("high", linear(2, outputs));
  }
  torch::Tensor forward(const torch::Tensor& x) { return base(x) + high(low(x)); }
  torch::nn::Linear base{nullptr}, low{nullptr}, high{nullptr};
};
TORCH_MODULE(Adapted);

// Llama's layer, and GPT-2's MLP behind it; the head is the embedding. forward: the mean loss.
struct SmallLmImpl : torch::nn::Module {
  SmallLmImpl() {
    embedding = register_parameter("embedding", torch::randn({kVocabulary, kWidth}) * 0.3);
    for (const char* name : {"first_norm", "second_norm", "third_norm", "last_norm"}) {
      register_parameter(name, torch::ones({kWidth}));
    }
    register_parameter("third_norm_bias", torch::zeros({kWidth}));
    attention = register_module("attention", Adapted(kWidth, 3 * kWidth));
    mixed = register_module("mixed", Adapted(kWidth, kWidth));
    gate = register_module("gate", Adapted(kWidth, 24));
    up = register_module("up", Adapted(kWidth, 24));
    down = register_module("down", Adapted(24, kWidth));
    wide = register_module("wide", Adapted(kWidth, 24));
    wide_bias = register_parameter("wide_bias", torch::zeros({24}));
    narrow = register_module("narrow", Adapted(24, kWidth));
  }

  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& targets) {
    const torch::Tensor x = torch::embedding(embedding, tokens);
    const auto first =
        fused::add_rms_norm(attend(fused::rms_norm(x, norm("first_norm"))), x, norm("second_norm"));
    const auto second =
        fused::add_layer_norm(down(fused::swiglu(gate(first.normed), up(first.normed))), first.sum,
                              norm("third_norm"), norm("third_norm_bias"));
    const torch::Tensor last =
        second.sum + narrow(fused::bias_gelu(wide(second.normed), wide_bias, fused::Gelu::kTanh));
    return fused::linear_cross_entropy(fused::rms_norm(last, norm("last_norm")), embedding, targets,
                                       {.tile_bytes = 512});
  }

  torch::Tensor norm(const char* name) { return named_parameters(/*recurse=*/false)[name]; }

  torch::Tensor attend(const torch::Tensor& x) {
    const auto angles = torch::outer(torch::arange(x.size(1), torch::kFloat),
                                     torch::pow(100.0, -torch::arange(4, torch::kFloat) / 4));
    const auto heads = attention(x).chunk(3, -1);
    const auto by_head = [&](const torch::Tensor& t) {
      return t.unflatten(-1, {kHeads, -1}).transpose(1, 2);
    };
    const auto turned = [&](const torch::Tensor& t) {
      return fused::rotary(by_head(t), angles.cos(), angles.sin());
    };
    const torch::Tensor seen = torch::scaled_dot_product_attention(
        turned(heads[0]), turned(heads[1]), by_head(heads[2]), {}, 0.0, /*is_causal=*/true);
    return mixed(seen.transpose(1, 2).flatten(2));
  }

  torch::Tensor embedding, wide_bias;
  Adapted attention{nullptr}, mixed{nullptr}, gate{nullptr}, up{nullptr}, down{nullptr},
      wide{nullptr}, narrow{nullptr};
};
TORCH_MODULE(SmallLm);

// A loss of a rank's rows, some of whose targets count for nothing.
template <typename Run, typename Model>
torch::Tensor loss_of_rows(Run& run, Model& model, int step, int64_t length = 6) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 * step + run.rank()));
  const torch::Tensor rows = torch::randint(kVocabulary, {2, length + 1}, generator);
  torch::Tensor targets = rows.slice(1, 1).clone();
  targets.select(1, 0).fill_(-100);
  return run.forward([&] { return model(rows.slice(1, 0, -1), targets); });
}

template <typename Run, typename Model>
Values trained(Run& run, Model& model, const std::function<int64_t(int step)>& length) {
  // Not Adam: where a gradient is noise, so is its update.
  auto optimizer = run.template optimizer<SGD>(model, SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    run.backward(loss_of_rows(run, model, step, length(step)));
    optimizer->step();
  }
  return run.values(model);
}

int64_t six(int /*step*/) {
  return 6;
}

const int kTrains = is_right(
    kGroup,
    "has fused norms, rotary positions, SwiGLU, GELU and a loss without logits, with a tied head",
    [](auto& run) {
      auto model = run.wrap(make<SmallLm>());
      return trained(run, model, six);
    },
    kInEachDtype);

const int kAutocast = is_refused(kGroup, "runs fused operators under autocast",
                                 "expected the weight as the input, BFloat16",
                                 "leave autocast out, and set `options.compute_dtype`",
                                 [](auto& run) {
                                   auto model = run.wrap(make<SmallLm>());
                                   loss_of_rows(run, model, 0);
                                 },
                                 {.mode = Mode::kAutocast});

const int kRagged = is_right(
    kGroup, "has rows of another length, and so of other tiles, on each rank",
    [](auto& run) {
      auto model = run.wrap(make<SmallLm>());
      return trained(run, model, [&](int step) { return 3 + 9 * run.rank() + step; });
    },
    kInEachDtype);

// ---- a frozen base ----

bool is_adapter(const std::string& name) {
  return name.find(".low.") != std::string::npos || name.find(".high.") != std::string::npos;
}

SmallLm with_frozen_base() {
  SmallLm model = make<SmallLm>();
  for (auto& parameter : model->named_parameters()) {
    parameter.value().set_requires_grad(is_adapter(parameter.key()));
  }
  return model;
}

const int kAdapters = is_right(
    kGroup, "trains adapters of low rank beside a frozen base",
    [](auto& run) {
      auto model = run.wrap(with_frozen_base());
      return trained(run, model, six);
    },
    kInEachDtype);

// ---- weights that come later ----

// Numbers of no file.
class MadeUp final : public WeightsSource {
 public:
  explicit MadeUp(const SmallLm& model) {
    for (const auto& parameter : model->named_parameters()) {
      tensors_.push_back({.name = parameter.key(), .sizes = parameter.value().sizes().vec()});
    }
  }

  std::string name() const override { return "made up"; }
  const std::vector<Entry>& tensors() const override { return tensors_; }
  void read(const Entry& entry, int64_t first, const at::Tensor& to) override {
    const auto of_name = static_cast<double>(entry.name.size());
    const bool is_norm = entry.name.ends_with("norm");
    to.copy_(torch::sin(torch::arange(first, first + to.numel(), torch::kFloat) + of_name) * 0.2 +
             (is_norm ? 1.0 : 0.0));
  }

 private:
  std::vector<Entry> tensors_;
};

template <typename Run>
Values loads_and_trains(Run& run, SmallLm module) {
  MadeUp source(module);
  if constexpr (Run::kOurs) {
    auto model = run.wrap(module);
    load_weights(source, model);
    return trained(run, model, six);
  } else {
    load_weights(source, *module);
    auto model = run.wrap(module);
    return trained(run, model, six);
  }
}

const int kLoads = is_right(
    kGroup, "wraps the model, takes weights by load_weights(), and trains",
    [](auto& run) { return loads_and_trains(run, make<SmallLm>()); }, kInEachDtype);

const int kLoadsFrozen = is_right(
    kGroup, "takes weights into a frozen base by load_weights(), and trains adapters",
    [](auto& run) { return loads_and_trains(run, with_frozen_base()); }, kInEachDtype);

}  // namespace
}  // namespace zeropage::habits_of_language_models
