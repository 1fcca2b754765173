// Experts that are spread over ranks train as all of them on one rank: losses, norms, weights and states on disk.
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/fused/experts_net.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/state_files.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/tensor_parallel.h"
#include "zeropage/zeropage.h"

namespace zeropage::experts_over_ranks_test {
namespace {

using namespace zeropage::experts_test;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

struct Shape {
  int data = 1;
  int expert = 1;
  int stage = 3;

  int ranks() const { return data * expert; }
};

Options options_of(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  options.update_by = UpdateBy::kClass;
  return options;
}

// This rank's part of what all have.
Tensor part_of(const Tensor& whole, const Tensor& own, const World& experts) {
  return whole.sizes() == own.sizes() ? whole
                                      : whole.narrow(0, experts.rank() * own.size(0), own.size(0));
}

// The script's steps: by a plain loop, or by an Accumulator where a step has several micro-batches.
template <typename Model, typename Optimizer>
void train(const World& world, Model& model, Optimizer& optimizer, const Script& script, How how) {
  Accumulator accumulator(model, {.micro_steps = script.micro_steps});
  checkpointing::Recompute recompute = recompute_of(model, how, script.least_bytes);
  const auto loss_at = [&](int at) {
    const Tensor x = batch_of(world.rank(), at, script.tokens(world.rank(), at));
    const Tensor loss = loss_of(outputs_of(model, x, how, recompute));
    return loss + model->auxiliary_loss();
  };
  for (int step = 0; step < script.steps; ++step) {
    if (script.micro_steps == 1) {
      optimizer.zero_grad();
      loss_at(step).backward();
      optimizer.step();
    } else {
      for (int micro = 0; micro < script.micro_steps; ++micro) {
        accumulator.backward(loss_at(step * script.micro_steps + micro));
      }
      accumulator.step(optimizer);
    }
    model->update_balance(world);
  }
}

void expect_as_plain(const Shape& shape, const Script& script, How how, double tolerance) {
  at::set_num_threads(1);
  const std::vector<Tensor> expected = plainly_trained(shape.ranks(), script);
  run_ranks(shape.ranks(), [&](World& world) {
    const Mesh mesh(world, {{"data", shape.data}, {"expert", shape.expert}});
    Net net = make_net(torch::kDouble, script.capacity_factor);
    expert_parallel(net, mesh);
    DistributedDataParallel<Net> model(net, mesh, options_of(shape.stage));
    Optimizer<SGD> optimizer(model, SGDOptions(0.05).momentum(0.9));
    train(world, model, optimizer, script, how);
    const GatheredParameters gathered(model);
    std::vector<Tensor> actual = model.module()->parameters();
    for (const Tensor& buffer : model.buffers()) actual.push_back(buffer);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      const Tensor want = part_of(expected[i].detach(), actual[i], mesh["expert"]);
      EXPECT_LE((own_slice(actual[i]) - want).abs().max().item<double>(), tolerance)
          << i << " on rank " << world.rank();
    }
  });
}

class ExpertsOverRanksTest : public ::testing::TestWithParam<std::tuple<int, Shape, How>> {};

TEST_P(ExpertsOverRanksTest, TrainAsOnOneRank) {
  auto [stage, shape, how] = GetParam();
  shape.stage = stage;
  const Script script;
  expect_as_plain(shape, script, how, 1e-12);
}

std::string way_of(const ::testing::TestParamInfo<std::tuple<int, Shape, How>>& info) {
  const auto& [stage, shape, how] = info.param;
  return c10::str("AtStage", stage, "On", shape.data, "x", shape.expert, "Ranks",
                  kWays[static_cast<int>(how)]);
}

INSTANTIATE_TEST_SUITE_P(
    StagesShapesAndWays, ExpertsOverRanksTest,
    ::testing::Combine(::testing::Values(0, 1, 2, 3),
                       ::testing::Values(Shape{1, 2}, Shape{2, 2}, Shape{1, 4}, Shape{1, 3}),
                       ::testing::Values(How::kPlainly, How::kInARegion, How::kRecomputed,
                                         How::kRecomputedByBlocks)),
    way_of);

// Some tensors of a rank with many tokens are large, and those of one with few are small: both repeat the same operators.
TEST(ExpertsOverRanksTest, RecomputeTheSameOfFewTokensAndOfMany) {
  for (const How how : {How::kRecomputed, How::kRecomputedByBlocks}) {
    for (const double capacity_factor : {0.0, 0.6}) {
      for (const Shape& shape : {Shape{1, 3}, Shape{2, 2}}) {
        expect_as_plain(shape, uneven_script(capacity_factor), how, 1e-12);
      }
    }
  }
}

TEST(ExpertsOverRanksTest, RefuseABudgetWhereEachRankWouldDropOtherTensors) {
  for (const int stage : {1, 3}) {
    const auto train = [stage](World& world) {
      const Mesh mesh(world, {{"data", 1}, {"expert", 2}});
      Net net = make_net();
      expert_parallel(net, mesh);
      DistributedDataParallel<Net> model(net, mesh, options_of(stage));
      checkpointing::Recompute recompute =
          zeropage::recompute(model, RecomputeOptions::budget(10'000));
      const ActivationScope scope(recompute);
      model(batch_of(world.rank(), 0, 5));
    };
    const std::string error = error_of([&] { run_ranks(2, train); });
    EXPECT_THAT(error, stage == 1 ? HasSubstr("") : HasSubstr("expected no budget where tokens"));
    EXPECT_EQ(error.empty(), stage == 1) << error;
  }
}

// Here the tokens have travelled when the first page is gathered.
TEST(ExpertsOverRanksTest, RefuseABudgetWhereTheHeadAloneIsSharded) {
  for (const int64_t minimum_sharded_bytes : {0, 100'000, 1'000'000}) {
    const auto train = [&](World& world) {
      const Mesh mesh(world, {{"data", 1}, {"expert", 2}});
      torch::nn::Sequential net(parallel::Experts(parallel::ExpertsOptions(kWidth, 12, 12, 2)),
                                torch::nn::Linear(kWidth, 4096));
      expert_parallel(net, mesh);
      Options options = options_of(3);
      options.minimum_sharded_bytes = minimum_sharded_bytes;
      DistributedDataParallel<torch::nn::Sequential> model(net, mesh, options);
      checkpointing::Recompute recompute =
          zeropage::recompute(model, RecomputeOptions::budget(10'000'000));
      const ActivationScope scope(recompute);
      model(torch::randn({3 + world.rank(), kWidth}));
    };
    const std::string error = error_of([&] { run_ranks(2, train); });
    const bool all_is_whole = minimum_sharded_bytes == 1'000'000;
    EXPECT_EQ(error.find("expected no budget where tokens") == std::string::npos, all_is_whole)
        << minimum_sharded_bytes << ": " << error;
    EXPECT_EQ(error.empty(), all_is_whole) << error;
  }
}

TEST(ExpertsOverRanksTest, AccumulateMicroStepsAsOnOneRank) {
  Script script;
  script.micro_steps = 3;
  for (const int stage : {0, 1, 2, 3}) {
    expect_as_plain({.data = 2, .expert = 2, .stage = stage}, script, How::kPlainly, 1e-12);
  }
}

TEST(ExpertsOverRanksTest, RunThreeHundredStepsOfRandomTokensWithoutDrift) {
  Script script;
  script.steps = 300;
  script.tokens = [](int rank, int step) {
    std::mt19937 random(static_cast<unsigned>(1000 * rank + step));
    return random() % 4 == 0 ? int64_t{0} : static_cast<int64_t>(random() % 17);
  };
  expect_as_plain({.data = 2, .expert = 2, .stage = 3}, script, How::kPlainly, 1e-9);
}

// What a DeferredModule computes when it is wrapped, and what a file gives a rank then, is as of a module that had its values.
TEST(ExpertsOverRanksTest, OfADeferredModuleAreThoseOfOneWithValues) {
  const Net plain = make_net(torch::kFloat);
  for (const int stage : {0, 1, 2, 3}) {
    for (const Shape& shape : {Shape{1, 2}, Shape{2, 2}}) {
      run_ranks(shape.ranks(), [&](World& world) {
        const Mesh mesh(world, {{"data", shape.data}, {"expert", shape.expert}});
        std::optional<DeferredModule<Net>> deferred;
        deferred.emplace([] { return make_net(torch::kFloat); });
        const auto placed = expert_parallel(deferred->module(), mesh);
        EXPECT_TRUE(placed.at(0).tokens_travel);
        DistributedDataParallel<Net> model(*std::move(deferred), mesh, options_of(stage));
        EXPECT_EQ(model->first->w_up.size(0), 12 / shape.expert);
        {
          const GatheredParameters gathered(model);
          for (const auto& parameter : plain->named_parameters()) {
            const Tensor own = own_slice(model.named_parameters()[parameter.key()]);
            EXPECT_TRUE(torch::equal(own, part_of(parameter.value().detach(), own, mesh["expert"])))
                << parameter.key() << " at stage " << stage << ", rank " << world.rank();
          }
        }
        Optimizer<SGD> optimizer(model, SGDOptions(0.05));
        const Tensor x = batch_of(world.rank(), 0, 5).to(torch::kFloat);
        Tensor loss = loss_of(model(x));
        loss = loss + model->auxiliary_loss();
        loss.backward();
        optimizer.step();
        model->update_balance(world);
      });
    }
  }
}

enum class ClippedBy { kZeropage, kLibTorch };

// Norms of a run, step by step, and one of weights behind it. Gradients are clipped.
std::vector<double> norms_of(int stage, int expert_ranks, ClippedBy by) {
  constexpr int kRanks = 4;
  std::vector<double> norms;
  run_ranks(kRanks, [&](World& world) {
    const Mesh mesh(world, {{"data", kRanks / expert_ranks}, {"expert", expert_ranks}});
    Net net = make_net();
    expert_parallel(net, mesh);
    DistributedDataParallel<Net> model(net, mesh, options_of(stage));
    Optimizer<SGD> optimizer(model, SGDOptions(0.05));
    std::vector<double> own;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(model(batch_of(world.rank(), step, 6 + world.rank()))).backward();
      own.push_back(by == ClippedBy::kZeropage
                        ? clip_grad_norm_(model, 0.1).before
                        : torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1));
      optimizer.step();
    }
    own.push_back(net->second->w_down.detach().norm().item<double>());
    if (world.rank() == world.size() - 1) norms = own;
  });
  return norms;
}

TEST(ExpertsOverRanksTest, CountEachExpertOnceInNorms) {
  at::set_num_threads(1);
  for (const ClippedBy by : {ClippedBy::kZeropage, ClippedBy::kLibTorch}) {
    for (const int stage : {0, 1, 2, 3}) {
      const std::vector<double> expected = norms_of(stage, 1, ClippedBy::kZeropage);
      for (const int expert_ranks : {2, 4}) {
        const std::vector<double> actual = norms_of(stage, expert_ranks, by);
        ASSERT_EQ(actual.size(), expected.size());
        for (size_t step = 0; step < actual.size(); ++step) {
          // LibTorch adds 1e-6 to the norm by which it divides.
          const double tolerance = by == ClippedBy::kZeropage ? 1e-12 : 1e-5;
          EXPECT_NEAR(actual[step], expected[step], tolerance * expected[step])
              << "stage " << stage << ", " << expert_ranks << " ranks, step " << step;
        }
      }
    }
  }
}

TEST(ExpertsOverRanksTest, TrainWithAnOptimizerAlone) {
  at::set_num_threads(1);
  const Script script;
  const std::vector<Tensor> expected = plainly_trained(4, script);
  for (const int stage : {0, 1}) {
    run_ranks(4, [&](World& world) {
      const Mesh mesh(world, {{"data", 2}, {"expert", 2}});
      Net net = make_net();
      expert_parallel(net, mesh);
      Optimizer<SGD> optimizer(net->parameters(), world, SGDOptions(0.05).momentum(0.9),
                               options_of(stage));
      for (int step = 0; step < script.steps; ++step) {
        optimizer.zero_grad();
        const Tensor x = batch_of(world.rank(), step, script.tokens(world.rank(), step));
        const Tensor loss = loss_of(net(x));
        (loss + net->auxiliary_loss()).backward();
        optimizer.step();
        net->update_balance(world);
      }
      const auto actual = net->parameters();
      for (size_t i = 0; i < actual.size(); ++i) {
        const Tensor want = part_of(expected[i].detach(), actual[i], mesh["expert"]);
        EXPECT_LE((own_slice(actual[i]) - want).abs().max().item<double>(), 1e-12) << i;
      }
    });
  }
}

TEST(ExpertsOverRanksTest, AreWholeForOperatorsOfAScript) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, {{"data", 1}, {"expert", 2}});
    const Net whole = make_net();
    Net net = make_net();
    expert_parallel(net, mesh);
    const Tensor& weight = net->first->w_gate;
    EXPECT_EQ(weight.size(0), 6);
    EXPECT_TRUE(torch::equal(whole_of(weight), whole->first->w_gate));
    EXPECT_EQ(weight.detach().sum().item<double>(), whole->first->w_gate.sum().item<double>());
    EXPECT_THAT(error_of([&] { torch::save(net, "/dev/null"); }), HasSubstr("save_weights()"));
    EXPECT_THAT(error_of([&] { weight.square().sum().backward(); }),
                HasSubstr("a weight of experts, which expert_parallel() cut: expected the "
                          "forward() of its layer"));
  });
}

struct Trained {
  Trained(World& world, const Shape& shape)
      : mesh(world, {{"data", shape.data}, {"expert", shape.expert}}), net(make_net()) {
    expert_parallel(net, mesh);
    model.emplace(net, mesh, options_of(shape.stage));
    optimizer.emplace(*model, AdamWOptions(0.01));
  }
  void train(World& world, int first, int steps) {
    for (int step = first; step < first + steps; ++step) {
      optimizer->zero_grad();
      loss_of((*model)(batch_of(world.rank(), step, 5))).backward();
      optimizer->step();
    }
  }
  Mesh mesh;
  Net net;
  std::optional<DistributedDataParallel<Net>> model;
  std::optional<Optimizer<AdamW>> optimizer;
};

TEST(ExpertsOverRanksTest, ResumeOnAnyMeshWithTheSameFiles) {
  at::set_num_threads(1);
  const DiskFolder folder;
  const auto path = [&folder](const std::string& name) {
    return std::filesystem::path(folder.path()) / name;
  };
  run_ranks(4, [&](World& world) {
    Trained run(world, {.data = 1, .expert = 4, .stage = 3});
    run.train(world, 0, 3);
    save_state(path("over_4"), *run.model, *run.optimizer);
  });
  const std::vector<Shape> shapes = {{4, 1, 3}, {2, 2, 0}, {2, 2, 1}, {1, 2, 2}, {1, 1, 0}};
  for (const Shape& shape : shapes) {
    run_ranks(shape.ranks(), [&](World& world) {
      Trained run(world, shape);
      load_state(path("over_4"), *run.model, *run.optimizer);
      save_state(path("again"), *run.model, *run.optimizer);
    });
    SCOPED_TRACE(c10::str(shape.data, " x ", shape.expert, " at stage ", shape.stage));
    expect_same_files(path("over_4"), path("again"));
    std::filesystem::remove_all(path("again"));
  }
}

TEST(ExpertsOverRanksTest, AreWholeInAWholeState) {
  run_ranks(4, [](World& world) {
    for (const int stage : {1, 3}) {
      Trained run(world, {.data = 2, .expert = 2, .stage = stage});
      const auto state = full_state(*run.model, /*rank=*/1);
      if (world.rank() != 1) {
        EXPECT_TRUE(state.is_empty());
        continue;
      }
      const auto expected = make_net()->named_parameters();
      for (const auto& parameter : expected) {
        EXPECT_TRUE(torch::equal(state[parameter.key()], parameter.value())) << parameter.key();
      }
    }
  });
}

TEST(ExpertsOverRanksTest, HoldTheirPartOfWeightsAndStates) {
  at::set_num_threads(1);
  run_ranks(4, [&](World& world) {
    Trained run(world, {.data = 2, .expert = 2, .stage = 0});
    run.train(world, 0, 1);
    EXPECT_EQ(run.net->first->w_up.size(0), 6);
    EXPECT_EQ(run.net->first->router.size(0), 12);
  });
}

// Tokens that are routed evenly: to each expert as many, in the order of the experts.
TEST(ExpertsOverRanksTest, SendTheBytesOfTheFormulaInASimulatedWorldToo) {
  constexpr int64_t kTokens = 24, kActive = 2;
  constexpr int kRanks = 4, kExpertRanks = 2;
  // To the experts and back, in forward and in backward.
  constexpr int64_t kBytes =
      4 * kTokens * kActive * kWidth * sizeof(float) * (kExpertRanks - 1) / kExpertRanks;
  const std::vector<MeshAxis> axes = {{"data", kRanks / kExpertRanks}, {"expert", kExpertRanks}};
  const World simulated = World::simulated({.topology = comm::Topology::even(kRanks, kRanks)});
  const Mesh described(simulated, axes);
  DeferredModule deferred([] { return Experts(ExpertsOptions(kWidth, 12, 12, kActive)); });
  expert_parallel(deferred.module(), described);
  DistributedDataParallel model(std::move(deferred), described);
  Optimizer<SGD> optimizer(model, SGDOptions(0.1));
  model(torch::empty({kTokens, kWidth},
                     torch::dtype(torch::kFloat).device(torch::kMeta).requires_grad(true)))
      .sum()
      .backward();
  optimizer.step();
  EXPECT_EQ(described["expert"].communicator().wire_traffic().pair.bytes, kBytes);

  run_ranks(kRanks, [&](World& world) {
    const Mesh mesh(world, axes);
    Experts layer(ExpertsOptions(kWidth, 12, 12, kActive));
    {
      const torch::NoGradGuard no_grad;
      layer->router.zero_();
      for (int64_t expert = 0; expert < 12; ++expert) {
        layer->router[expert][expert / 2 % kWidth] =
            expert / 2 < kWidth - 2 ? 1 + 0.1 * (expert % 2) : 0;
      }
    }
    expert_parallel(layer, mesh);
    DistributedDataParallel<Experts> real(layer, mesh);
    // Token t takes experts 2 (t % 6) and the next one.
    Tensor x = torch::zeros({kTokens, kWidth});
    for (int64_t token = 0; token < kTokens; ++token) x[token][token % 6] = 1;
    x.set_requires_grad(true);
    real(x).sum().backward();
    EXPECT_EQ(mesh["expert"].communicator().wire_traffic().pair.bytes, kBytes);
  });
}

// Wrapping brings weights that had values when they were cut.
TEST(ExpertsOverRanksTest, OfAModuleWithValuesAreSentInASimulatedWorldToo) {
  const std::vector<MeshAxis> axes = {{"data", 1}, {"expert", 2}};
  const World simulated = World::simulated({.topology = comm::Topology::even(2, 2)});
  const Mesh described(simulated, axes);
  DeferredModule recorded([] { return Experts(ExpertsOptions(kWidth, 12, 12, 2)); });
  Experts without_memory = recorded.module();
  expert_parallel(without_memory, described);
  const DistributedDataParallel<Experts> model(without_memory, described);
  const int64_t expected = described["expert"].communicator().wire_traffic().broadcast.bytes;
  // Three matrices of all experts.
  EXPECT_GE(expected, 3 * 12 * 12 * kWidth * static_cast<int64_t>(sizeof(float)));
  run_ranks(2, [&](World& world) {
    const Mesh mesh(world, axes);
    Experts layer(ExpertsOptions(kWidth, 12, 12, 2));
    expert_parallel(layer, mesh);
    const DistributedDataParallel<Experts> real(layer, mesh);
    if (world.rank() == 0) {
      EXPECT_EQ(mesh["expert"].communicator().wire_traffic().broadcast.bytes, expected);
    }
  });
}

TEST(ExpertsOverRanksTest, StayWholeWhereWeightsAreFewerBytesThanTokens) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, {{"data", 1}, {"expert", 2}});
    Net few = make_net(), many = make_net();
    // 3 x 12 x 12 x 8 weights; 2 x 8 numbers of a token.
    EXPECT_TRUE(expert_parallel(few, mesh, /*tokens=*/10)[0].tokens_travel);
    const PlacedExperts placed = expert_parallel(many, mesh, /*tokens=*/10'000)[1];
    EXPECT_FALSE(placed.tokens_travel);
    EXPECT_EQ(placed.layer, "second");
    // Stage 1 on two ranks: half of the weights' bytes for gradients, half for parameters.
    constexpr int64_t kWeightBytes = 3 * 12 * 12 * 8 * sizeof(double);
    EXPECT_EQ(placed.traffic.weights, kWeightBytes);
    EXPECT_EQ(placed.traffic.tokens, 4 * 10'000 * 2 * 8 * sizeof(double) / 2);
    EXPECT_EQ(many->second->w_up.size(0), 12);
    DistributedDataParallel<Net> model(many, mesh, options_of(3));
    model(batch_of(world.rank(), 0, 4)).sum().backward();
  });
}

std::string error_of_two_ranks(const std::function<void(World&)>& function) {
  return error_of([&] { run_ranks(2, function); });
}

TEST(ExpertsOverRanksTest, RefuseWhatCouldNotBeRight) {
  const auto mesh_of = [](World& world) { return Mesh(world, {{"data", 1}, {"expert", 2}}); };
  EXPECT_THAT(error_of_two_ranks([&](World& world) {
                const Mesh mesh = mesh_of(world);
                DistributedDataParallel<Net> model(make_net(), mesh, options_of(1));
              }),
              HasSubstr("call expert_parallel(module, mesh)"));
  EXPECT_THAT(error_of_two_ranks([&](World& world) {
                const Mesh mesh = mesh_of(world);
                Experts odd(ExpertsOptions(kWidth, 4, 3, 1));
                expert_parallel(odd, mesh);
              }),
              HasSubstr("3 experts, which 2 ranks along \"expert\" do not divide"));
  EXPECT_THAT(error_of_two_ranks([&](World& world) {
                const Mesh mesh = mesh_of(world);
                Net net = make_net();
                expert_parallel(net, mesh);
                expert_parallel(net, mesh);
              }),
              HasSubstr("placed already"));
  EXPECT_THAT(error_of_two_ranks([&](World& world) {
                const Mesh mesh = mesh_of(world);
                Net net = make_net();
                expert_parallel(net, mesh);
                DistributedDataParallel<Net> model(net, mesh["data"], options_of(1));
              }),
              HasSubstr("wrap it over the mesh that expert_parallel() got"));
  EXPECT_THAT(error_of_two_ranks([&](World& world) {
                const Mesh mesh = mesh_of(world);
                Net net = make_net();
                expert_parallel(net, mesh);
                DistributedDataParallel<Net> model(net, mesh, options_of(3));
                const GatheredParameters guard(model, Modified::on_rank(0));
              }),
              HasSubstr("that rank has some of its experts alone"));
  EXPECT_THAT(error_of_two_ranks([&](World& world) {
                const Mesh mesh = mesh_of(world);
                Net net = make_net();
                net->second->w_down = net->first->w_down;
                expert_parallel(net, mesh);
              }),
              HasSubstr("layers \"first\" and \"second\" share a weight"));
  EXPECT_THAT(error_of_two_ranks([&](World& world) {
                const Mesh mesh = mesh_of(world);
                Net net = make_net();
                expert_parallel(net, mesh, world.rank());
              }),
              HasSubstr("tokens"));
}

TEST(ExpertsOverRanksTest, NoticeARankThatWritesToItsExpertsAlone) {
  std::vector<std::string> errors(4);
  EXPECT_THROW(run_ranks(4,
                         [&](World& world) {
                           Trained run(world, {.data = 2, .expert = 2, .stage = 1});
                           run.train(world, 0, 1);
                           {
                             const at::NoGradGuard no_grad;
                             if (world.rank() == 3) run.net->first->w_up.mul_(2);
                           }
                           try {
                             run.train(world, 1, 2);
                           } catch (const std::exception& error) {
                             errors[static_cast<size_t>(world.rank())] = memory::message_of(error);
                             throw;
                           }
                         }),
               c10::Error);
  // Those that have the same experts.
  EXPECT_THAT(errors[1], HasSubstr("values of slice 1 of parameter \"first.w_up\""));
  EXPECT_THAT(errors[3], HasSubstr("values of slice 1 of parameter \"first.w_up\""));
}

TEST(ExpertsOverRanksTest, AreNamedWhereRanksRunOtherLayers) {
  const std::string error = error_of_two_ranks([&](World& world) {
    const Mesh mesh(world, {{"data", 1}, {"expert", 2}});
    Experts wide(ExpertsOptions(kWidth, 16, 4, 2)), narrow(ExpertsOptions(kWidth, 4, 4, 2));
    expert_parallel(wide, mesh);
    expert_parallel(narrow, mesh);
    const Tensor x = torch::randn({3, kWidth});
    world.rank() == 0 ? wide(x) : narrow(x);
  });
  EXPECT_THAT(error, HasSubstr("experts"));
}

}  // namespace
}  // namespace zeropage::experts_over_ranks_test
