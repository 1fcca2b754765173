// A model whose ranks share both sequences and experts trains as on one rank.
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::experts_and_context_test {
namespace {

using namespace zeropage::testing;
using parallel::ContextForm;
using parallel::Experts;
using parallel::ExpertsOptions;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr int64_t kWords = 31, kWidth = 16, kLength = 16, kSamplesOfARank = 2;
constexpr int kSteps = 4;

struct TalkerImpl : torch::nn::Module {
  TalkerImpl() {
    tokens = register_module("tokens", torch::nn::Embedding(kWords, kWidth));
    places = register_module("places", torch::nn::Embedding(kLength, kWidth));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    experts = register_module("experts", Experts(ExpertsOptions(kWidth, 12, /*experts=*/4,
                                                                /*active=*/2)));
    head = register_module("head", torch::nn::Linear(kWidth, kWords));
  }
  Tensor forward(const Tensor& ids, const Tensor& positions, const Tensor& targets) {
    Tensor x = tokens(ids) + places(positions);
    const auto parts = qkv(x).chunk(3, -1);
    const auto heads = [&](size_t i) {
      return parts[i].view({x.size(0), x.size(1), 2, -1}).transpose(1, 2);
    };
    x = x + torch::scaled_dot_product_attention(heads(0), heads(1), heads(2), {}, 0, true)
                .transpose(1, 2)
                .flatten(2);
    x = x + experts(norm(x));
    return torch::nn::functional::cross_entropy(head(x).flatten(0, 1), targets.flatten());
  }
  torch::nn::Embedding tokens{nullptr}, places{nullptr};
  torch::nn::Linear qkv{nullptr}, head{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  Experts experts{nullptr};
};
TORCH_MODULE(Talker);

Talker made() {
  Talker talker;
  // Ranks are threads, which share the default generator.
  auto generator = at::detail::createCPUGenerator(3);
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : talker->parameters()) parameter.normal_(0, 0.2, generator);
  talker->to(torch::kDouble);
  return talker;
}

// [samples, length + 1], the same on all ranks
Tensor batch_of(int step, int64_t samples) {
  auto generator = at::detail::createCPUGenerator(100 + step);
  return torch::randint(kWords, {samples, kLength + 1}, generator,
                        torch::TensorOptions().dtype(torch::kLong));
}

std::map<std::string, Tensor> trained_plainly(int64_t samples) {
  Talker talker = made();
  torch::optim::AdamW optimizer(talker->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < kSteps; ++step) {
    const Tensor batch = batch_of(step, samples);
    optimizer.zero_grad();
    talker(batch.slice(1, 0, kLength), torch::arange(kLength), batch.slice(1, 1)).backward();
    torch::nn::utils::clip_grad_norm_(talker->parameters(), 0.5);
    optimizer.step();
  }
  std::map<std::string, Tensor> values;
  for (const auto& item : talker->named_parameters()) values[item.key()] = item.value().detach();
  return values;
}

struct Shape {
  int data, context, expert;
  ContextForm form = ContextForm::kRing;
};

class ExpertsAndContextParityTest : public ::testing::TestWithParam<std::tuple<int, Shape>> {};

TEST_P(ExpertsAndContextParityTest, TrainAsOnOneRank) {
  const auto& [stage, shape] = GetParam();
  const int64_t samples = kSamplesOfARank * shape.data * shape.expert;
  const std::map<std::string, Tensor> expected = trained_plainly(samples);
  run_ranks(
      shape.data * shape.context * shape.expert, [&, stage = stage, shape = shape](World& world) {
        const Mesh mesh(
            world, {{"data", shape.data}, {"context", shape.context}, {"expert", shape.expert}});
        const World& context = mesh["context"];
        Talker talker = made();
        expert_parallel(talker, mesh);
        parallel::context_parallel(talker, context, shape.form);
        Options options;
        options.stage = stage_of(stage);
        options.page_bytes = 4096;
        DistributedDataParallel<Talker> model(talker, mesh, options);
        Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-2));
        // Ranks along "context" have the same samples.
        const int64_t reader = mesh["data"].rank() * shape.expert + mesh["expert"].rank();
        for (int step = 0; step < kSteps; ++step) {
          const Tensor batch =
              batch_of(step, samples).narrow(0, reader * kSamplesOfARank, kSamplesOfARank);
          const auto part = [&](const Tensor& whole) {
            return parallel::split_context(whole.contiguous(), 1, context);
          };
          optimizer.zero_grad();
          model(part(batch.slice(1, 0, kLength)), parallel::context_positions(kLength, context),
                part(batch.slice(1, 1)))
              .backward();
          clip_grad_norm_(model, 0.5);
          optimizer.step();
        }
        const auto state = full_state(model);
        if (world.rank() != 0) return;
        for (const auto& [name, values] : expected) {
          EXPECT_LE((state[name] - values).abs().max().item<double>(), 1e-11) << name;
        }
      });
}

INSTANTIATE_TEST_SUITE_P(
    StagesAndShapes, ExpertsAndContextParityTest,
    ::testing::Combine(::testing::Range(0, 4),
                       ::testing::Values(Shape{1, 2, 2}, Shape{1, 2, 2, ContextForm::kUlysses},
                                         Shape{2, 2, 2}, Shape{2, 1, 2}, Shape{2, 2, 1})),
    [](const auto& info) {
      const Shape& shape = std::get<1>(info.param);
      return c10::str("AtStage", std::get<0>(info.param), "On", shape.data, "x", shape.context, "x",
                      shape.expert, shape.form == ContextForm::kUlysses ? "ByUlysses" : "");
    });

Options small_pages(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4096;
  return options;
}

TEST(ExpertsAndContextTest, AreRefusedInAModuleThatIsWrapped) {
  for (const int stage : {0, 1, 3}) {
    SCOPED_TRACE(stage);
    const auto mark = [&](bool experts) {
      return error_of([&, experts] {
        run_ranks(2, [&](World& world) {
          const Mesh mesh(world, experts ? std::vector<MeshAxis>{{"data", 1}, {"expert", 2}}
                                         : std::vector<MeshAxis>{{"data", 1}, {"context", 2}});
          Talker talker = made();
          DistributedDataParallel<Talker> model(talker, world, small_pages(stage));
          if (experts) {
            expert_parallel(talker, mesh);
          } else {
            parallel::context_parallel(talker->experts, mesh["context"]);
          }
        });
      });
    };
    EXPECT_THAT(mark(true), HasSubstr("layer \"experts\" is in a module that is wrapped"));
    EXPECT_THAT(mark(false), HasSubstr("context_parallel: the module is wrapped already"));
  }
}

TEST(ExpertsAndContextTest, AModuleMayBeMarkedWhenItsWrapperIsGone) {
  run_ranks(2, [&](World& world) {
    const Mesh mesh(world, {{"data", 1}, {"context", 2}});
    Talker talker = made();
    { const DistributedDataParallel<Talker> model(talker, world, small_pages(1)); }
    parallel::context_parallel(talker, mesh["context"]);
  });
}

TEST(ExpertsAndContextTest, AttentionOverARanksTokensAloneIsRefused) {
  for (const int stage : {0, 3}) {
    const std::string error = error_of([&] {
      run_ranks(2, [&](World& world) {
        const Mesh mesh(world, {{"data", 1}, {"context", 2}});
        DistributedDataParallel<Talker> model(made(), mesh, small_pages(stage));
        const Tensor ids =
            parallel::split_context(batch_of(0, 2).narrow(1, 0, kLength), 1, mesh["context"]);
        model(ids, parallel::context_positions(kLength, mesh["context"]), ids);
      });
    });
    EXPECT_THAT(error, HasSubstr("over this rank's tokens alone"));
    EXPECT_THAT(error, HasSubstr("context_parallel(module, mesh[\"context\"])"));
  }
}

// The second loss goes back first on one rank. A wrong gradient would be as silent.
TEST(ExpertsAndContextTest, BackwardsOfAttentionInAnotherOrderAreOutOfStep) {
  for (const ContextForm form : {ContextForm::kRing, ContextForm::kUlysses}) {
    const std::string error = error_of([&] {
      run_ranks(2, [&](World& world) {
        const Mesh mesh(world, {{"data", 1}, {"context", 2}});
        Talker talker = made();
        parallel::context_parallel(talker, mesh["context"], form);
        DistributedDataParallel<Talker> model(talker, mesh, small_pages(0));
        const Tensor ids =
            parallel::split_context(batch_of(0, 2).narrow(1, 0, kLength), 1, mesh["context"]);
        const Tensor positions = parallel::context_positions(kLength, mesh["context"]);
        std::vector<Tensor> losses = {model(ids, positions, ids), model(ids, positions, ids)};
        if (world.rank() == 1) std::swap(losses[0], losses[1]);
        for (const Tensor& loss : losses) loss.backward();
      });
    });
    EXPECT_THAT(error, HasSubstr("forward 1 of model 1"));
  }
}

}  // namespace
}  // namespace zeropage::experts_and_context_test
