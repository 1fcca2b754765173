// What ranks must have alike: what they send to hear of it, over which ranks, and where they look before the step
// is made. tests/habits/agreement.cpp has what scripts do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/tiny_models.h"
#include "tests/pipeline/pipeline_models.h"
#include "zero/agreement/agreement_hashes.h"
#include "zeropage/parallel_layers.h"
#include "zeropage/zeropage.h"

namespace zeropage::rank_agreement_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// A class of a user's, whose options have more than those that they are derived from.
struct WarmOptions : SGDOptions {
  explicit WarmOptions(double lr) : SGDOptions(lr) {}
  std::vector<double> warm = {0.5};
  double heat = 1;

  void serialize(torch::serialize::OutputArchive& archive) const override {
    SGDOptions::serialize(archive);
    archive.write("heat", c10::IValue(heat));
  }
  std::unique_ptr<torch::optim::OptimizerOptions> clone() const override {
    return std::make_unique<WarmOptions>(*this);
  }
};

class Warm : public SGD {
 public:
  Warm(const std::vector<torch::optim::OptimizerParamGroup>& groups, const WarmOptions& options)
      : SGD(groups, options) {
    defaults_ = std::make_unique<WarmOptions>(options);
  }
};

}  // namespace
}  // namespace zeropage::rank_agreement_test

template <>
struct zeropage::OptimizerTraits<zeropage::rank_agreement_test::Warm> {
  using Options = rank_agreement_test::WarmOptions;
  static constexpr UpdateReads kReads = UpdateReads::kElement;
};

namespace zeropage::rank_agreement_test {
namespace {

Options at_stage(int stage) {
  Options options;
  options.stage = stage_of(stage);
  return options;
}

void run_backward(DistributedDataParallel<torch::nn::Linear>& model) {
  model(torch::ones({2, 5})).square().mean().backward();
}

TEST(ToldTest, IsHeardAlikeWhereAllToldTheSame) {
  const auto largest = [](std::initializer_list<zero::AgreementHashes> by_rank) {
    std::array<uint8_t, zero::kToldBytes> all = {};
    for (const zero::AgreementHashes& own_hashes : by_rank) {
      std::array<uint8_t, zero::kToldBytes> bytes = {};
      zero::put(own_hashes, bytes.data());
      for (size_t i = 0; i < zero::kToldBytes; ++i) all[i] = std::max(all[i], bytes[i]);
    }
    return zero::agreement_result(all.data());
  };
  const zero::AgreementHashes own_hashes{
      .steps = 0x1234567890, .settings = ~uint64_t{0}, .values = 0};
  EXPECT_TRUE(largest({own_hashes, own_hashes, own_hashes}).all());
  zero::AgreementHashes other = own_hashes;
  other.settings ^= uint64_t{1} << 63;
  const zero::AgreementResult agreed_on = largest({own_hashes, other, own_hashes});
  EXPECT_TRUE(agreed_on.steps);
  EXPECT_FALSE(agreed_on.settings);
  EXPECT_TRUE(agreed_on.values);
}

class RankAgreementTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, RankAgreementTest, ::testing::Values(0, 1, 2, 3));

// The moment at which options change in one step of a run.
enum class Change { kNever, kBeforeBackward, kBeforeStep };

int64_t messages_of_a_step(int stage, Change change) {
  int64_t messages = 0;
  run_ranks(2, [&](World& world) {
    DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(5, 3), world,
                                                     at_stage(stage));
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.1));
    const auto train = [&](double lr) {
      const auto set = [&] { optimizer.param_groups()[0].options().set_lr(lr); };
      optimizer.zero_grad();
      if (change == Change::kBeforeBackward) set();
      run_backward(model);
      if (change == Change::kBeforeStep) set();
      optimizer.step();
    };
    const auto sent = [&] {
      const comm::WireTraffic traffic = world.communicator().wire_traffic();
      return traffic.all_gather.messages + traffic.reduce_scatter.messages +
             traffic.all_reduce.messages;
    };
    train(0.2);
    const int64_t before = sent();
    train(0.3);
    if (world.rank() == 0) messages = sent() - before;
  });
  return messages;
}

TEST_P(RankAgreementTest, SendsAMessageOnlyWhereOptionsChangeBetweenBackwardAndStep) {
  const int64_t messages = messages_of_a_step(GetParam(), Change::kNever);
  EXPECT_EQ(messages_of_a_step(GetParam(), Change::kBeforeBackward), messages);
  EXPECT_EQ(messages_of_a_step(GetParam(), Change::kBeforeStep), messages + 1);
}

TEST_P(RankAgreementTest, NamesOptionsOfAUsersClass) {
  const auto errors = try_ranks(3, [&](World& world) {
    DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(5, 3), world,
                                                     at_stage(GetParam()));
    Optimizer<Warm> optimizer(model, WarmOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      run_backward(model);
      optimizer.step();
      if (step == 1 && world.rank() == 1) {
        static_cast<WarmOptions&>(optimizer.param_groups()[0].options()).heat = 2;
      }
    }
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(message_of(error), HasSubstr("heat of parameter group 0 of optimizer 0"));
    EXPECT_THAT(message_of(error), HasSubstr("rank 0 has 1.0, rank 1 has 2.0"));
  }
}

TEST_P(RankAgreementTest, ThrowsBeforeAnythingIsUpdated) {
  for (const StepWhen when : {StepWhen::kInStep, StepWhen::kInBackward}) {
    const auto errors = try_ranks(2, [&](World& world) {
      Options options = at_stage(GetParam());
      options.offload = {.optimizer = Tier::kHost, .step = when};
      DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(5, 3), world, options);
      Optimizer<AdamW> optimizer(model, AdamWOptions(0.1));
      optimizer.param_groups()[0].options().set_lr(0.1 * (1 + world.rank()));
      const auto weight = [&] {
        const GatheredParameters guard(model);
        return model->weight.detach().clone();
      };
      const torch::Tensor before = weight();
      EXPECT_THAT(error_of([&] {
                    run_backward(model);
                    optimizer.step();
                  }),
                  HasSubstr("lr of parameter group 0 of optimizer 0"));
      EXPECT_TRUE(torch::equal(before, weight()));
      throw std::runtime_error("came to its end");
    });
    for (const std::exception_ptr& error : errors) EXPECT_EQ(message_of(error), "came to its end");
  }
}

// A group that one rank adds, too.
TEST_P(RankAgreementTest, NamesAParameterGroupThatOneRankAdded) {
  const auto errors = try_ranks(2, [&](World& world) {
    DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(5, 3), world,
                                                     at_stage(GetParam()));
    Optimizer<SGD> optimizer(
        model, ShardedOptimizer::Groups{torch::optim::OptimizerParamGroup({model->weight})},
        SGDOptions(0.1));
    if (world.rank() == 1) {
      optimizer.add_param_group(torch::optim::OptimizerParamGroup({model->bias}));
    }
    run_backward(model);
    optimizer.step();
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(message_of(error),
                HasSubstr("lr of parameter group 1 of optimizer 0 (torch::optim::SGD): rank 0 has "
                          "none, rank 1 has 0.1"));
  }
}

TEST_P(RankAgreementTest, HoldsOverTheTensorAxisToo) {
  for (const bool accumulates : {false, true}) {
    const auto errors = try_ranks(2, [&](World& world) {
      const Mesh mesh(world, {{"data", 1}, {"tensor", 2}});
      torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::Linear(6, 4));
      tensor_parallel(net, mesh["tensor"], {{"0", Cut::column()}, {"1", Cut::row()}});
      DistributedDataParallel<torch::nn::Sequential> model(net, mesh, at_stage(GetParam()));
      Optimizer<SGD> optimizer(model, SGDOptions(0.1));
      if (world.rank() == 1) optimizer.param_groups()[0].options().set_lr(0.2);
      const torch::Tensor loss = model(torch::ones({2, 4})).square().mean();
      if (accumulates) {
        Accumulator accumulator(model);
        accumulator.backward(loss);
        accumulator.step(optimizer);
      } else {
        loss.backward();
        optimizer.step();
      }
    });
    for (const std::exception_ptr& error : errors) {
      EXPECT_THAT(message_of(error), HasSubstr("rank 0 has 0.1, rank 1 has 0.2"));
    }
  }
}

// Only the last stage has a loss that a scheduler could be fed.
TEST_P(RankAgreementTest, HoldsOverTheStagesOfAPipeline) {
  using namespace zeropage::pipeline_models;
  const auto errors = try_ranks(2, [&](World& world) {
    const Mesh mesh(world, {{"pipeline", 2}, {"data", 1}});
    const auto stage = pipeline_stage<Model>([] { return Model(Head::kOwn, torch::kFloat); },
                                             layers_of_model, mesh["pipeline"]);
    Pipeline::Model model(stage, mesh, at_stage(GetParam()));
    Pipeline pipeline(model, {.accumulator = {.micro_steps = 2}});
    Optimizer<SGD> optimizer(model, SGDOptions(0.1));
    if (world.rank() == 1) optimizer.param_groups()[0].options().set_lr(0.2);
    pipeline.run({tokens_of(0), tokens_of(1)},
                 [](const torch::Tensor& output, int64_t micro_batch) {
                   return loss_of(output, micro_batch);
                 });
    pipeline.accumulator().step(optimizer);
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(message_of(error), HasSubstr("rank 0 has 0.1, rank 1 has 0.2"));
  }
}

// No other rank of the mesh has what the two of a stage have alike.
TEST_P(RankAgreementTest, ASaveHearsOfAWriteOnOneRankOfAnyStage) {
  using namespace zeropage::pipeline_models;
  for (const int writer : {1, 3}) {
    const DiskFolder folder;
    const auto errors = try_ranks(4, [&](World& world) {
      const Mesh mesh(world, {{"pipeline", 2}, {"data", 2}});
      const auto stage = pipeline_stage<Model>([] { return Model(Head::kOwn, torch::kFloat); },
                                               layers_of_model, mesh["pipeline"]);
      Pipeline::Model model(stage, mesh, at_stage(GetParam()));
      Optimizer<SGD> optimizer(model, SGDOptions(0.1));
      if (world.rank() == writer) {
        const torch::NoGradGuard no_grad;
        // At stage 3 an operator on parameters is for all ranks of the stage.
        if (GetParam() < 3) model.parameters().front().mul_(0.5);
      }
      save_state(folder.path() + "/state", model, optimizer);
    });
    for (const std::exception_ptr& error : errors) {
      if (GetParam() == 3) {
        EXPECT_EQ(message_of(error), "");
      } else {
        EXPECT_THAT(message_of(error),
                    HasSubstr("ranks must have this alike after 0 steps. values of"));
      }
    }
  }
}

// Two models of one class, as a policy and its reference.
TEST(RankAgreementTest, ModelsThatRanksUseInAnotherOrderAreOutOfStep) {
  const auto use = [](int stage, bool backward) {
    return error_of([=] {
      run_ranks(2, [=](World& world) {
        DistributedDataParallel<torch::nn::Linear> policy(torch::nn::Linear(64, 64), world,
                                                          at_stage(stage));
        DistributedDataParallel<torch::nn::Linear> reference(torch::nn::Linear(64, 64), world,
                                                             at_stage(stage));
        const auto x = torch::ones({2, 64});
        const auto go = [&](DistributedDataParallel<torch::nn::Linear>& model) {
          const auto loss = model(x).sum();
          if (backward) loss.backward();
        };
        go(world.rank() == 0 ? policy : reference);
        go(world.rank() == 0 ? reference : policy);
      });
    });
  };
  EXPECT_THAT(use(3, /*backward=*/false), HasSubstr("of model 2"));
  for (const int stage : {0, 1, 2, 3}) {
    EXPECT_THAT(use(stage, /*backward=*/true), HasSubstr("of model 2")) << stage;
  }
}

}  // namespace
}  // namespace zeropage::rank_agreement_test
