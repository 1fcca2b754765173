#include "memory_profile/cases.h"

#include <memory>
#include <optional>
#include <utility>

#include <zeropage/recompute.h>
#include <zeropage/zeropage.h>

#include "byte_gpt/gpt.h"
#include "image_models/model_registry.h"

namespace memory_profile {
namespace {

using zeropage::comm::World;

enum class Activations : uint8_t { kKept, kRecomputed };

constexpr int kStepsBefore = 2;  // make the optimizer's states, and learn the order of pages

// A module with what it is trained on, under one type for all of them.
struct TrainedImpl : torch::nn::Module {
  // The loss of a batch that the module draws itself.
  virtual torch::Tensor forward(int64_t seed) = 0;
};
TORCH_MODULE(Trained);

struct GptCaseImpl : TrainedImpl {
  GptCaseImpl() {
    gpt = register_module(
        "gpt",
        train_gpt::Gpt(train_gpt::GptConfig{.d_model = 128, .layers = 6, .sequence = 128}, 1));
  }
  torch::Tensor forward(int64_t seed) override {
    torch::manual_seed(static_cast<uint64_t>(seed));
    const auto tokens = torch::randint(train_gpt::kVocabulary, {4, 129}, torch::kLong);
    return train_gpt::next_token_loss(gpt(tokens.narrow(1, 0, 128).contiguous()),
                                      tokens.narrow(1, 1, 128).contiguous());
  }
  train_gpt::Gpt gpt{nullptr};
};

struct ResNetCaseImpl : TrainedImpl {
  ResNetCaseImpl() {
    net = register_module("net",
                          image_models::ModelRegistry::standard().make(
                              "resnet18_small", {.classes = 10, .image_side = 32, .width = 32}));
  }
  torch::Tensor forward(int64_t seed) override {
    torch::manual_seed(static_cast<uint64_t>(seed));
    return torch::cross_entropy_loss(net->forward(torch::randn({8, 3, 32, 32})),
                                     torch::randint(10, {8}, torch::kLong));
  }
  std::shared_ptr<image_models::ImageModel> net;
};

struct LstmCaseImpl : TrainedImpl {
  LstmCaseImpl() {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(64, 256).num_layers(2)));
    head = register_module("head", torch::nn::Linear(256, 64));
  }
  torch::Tensor forward(int64_t seed) override {
    torch::manual_seed(static_cast<uint64_t>(seed));
    const auto x = torch::randn({33, 8, 64});  // [time, batch, features]
    const auto output = std::get<0>(lstm(x.narrow(0, 0, 32)));
    return torch::mse_loss(head(output), x.narrow(0, 1, 32));
  }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear head{nullptr};
};

std::shared_ptr<TrainedImpl> make_model(const std::string& name) {
  if (name == "gpt") return std::make_shared<GptCaseImpl>();
  if (name == "resnet18") return std::make_shared<ResNetCaseImpl>();
  return std::make_shared<LstmCaseImpl>();
}

struct Setting {
  std::string model;
  int stage;
  Activations activations;

  std::string name() const {
    return model + ", stage " + std::to_string(stage) +
           (activations == Activations::kKept ? "" : ", recomputed");
  }
};

void run_case(const Setting& setting, const World& world, zeropage::profile::Profiler& profiler,
              int64_t number) {
  torch::manual_seed(7);
  zeropage::Options options;
  options.stage = zeropage::stage_of(setting.stage);
  options.page_bytes = 1 << 20;
  zeropage::DistributedDataParallel<Trained> model(Trained(make_model(setting.model)), world,
                                                   options);
  zeropage::Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
  std::optional<zeropage::checkpointing::Recompute> recompute;  // nothing: all are kept
  if (setting.activations == Activations::kRecomputed) {
    recompute = zeropage::recompute(model, zeropage::checkpointing::RecomputeOptions::selective());
  }
  for (int step = 0; step <= kStepsBefore; ++step) {
    const auto train = [&] {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        std::optional<zeropage::checkpointing::ActivationScope> scope;
        if (recompute) scope.emplace(*recompute);
        loss = model(int64_t{100} * step + world.rank());
      }
      loss.backward();
      optimizer.step();
    };
    if (step < kStepsBefore) {
      train();
      continue;
    }
    const auto scope = profiler.step(number, setting.name());
    train();
  }
}

}  // namespace

std::vector<std::string> model_names() {
  return {"gpt", "resnet18", "lstm"};
}

std::vector<Case> cases_of(const std::vector<std::string>& models) {
  std::vector<Case> cases;
  for (const std::string& model : models) {
    for (int stage = 0; stage < 4; ++stage) {
      for (const Activations activations : {Activations::kKept, Activations::kRecomputed}) {
        const Setting setting{model, stage, activations};
        cases.push_back(
            {setting.name(),
             [setting](const World& world, zeropage::profile::Profiler& profiler, int64_t number) {
               run_case(setting, world, profiler, number);
             }});
      }
    }
  }
  return cases;
}

}  // namespace memory_profile
