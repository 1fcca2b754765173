// Tensor parallelism, by explicit layers and by a plan for a module that does not know of it, equals the whole
// module on one rank.
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/parallel/tensor_modules.h"
#include "zeropage/parallel_layers.h"
#include "zeropage/zeropage.h"

namespace zeropage::tensor_parallel_test {
namespace {

using namespace zeropage::tensor_modules;
using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using memory::operator""_KiB;
using parallel::ColumnParallelLinear;
using parallel::LinearOptions;
using parallel::RowParallelLinear;
using parallel::Slices;

enum class How { kPlainly, kInARegion, kRecomputed };

// The module's own part of a forward, some way.
template <typename Model>
torch::Tensor hidden_of(Model& model, const torch::Tensor& ids, How how,
                        checkpointing::Recompute& recompute) {
  if (how == How::kInARegion) {
    return checkpoint([&](const torch::Tensor& inputs) { return model(inputs); }, ids);
  }
  std::optional<ActivationScope> scope;
  if (how == How::kRecomputed) scope.emplace(recompute);
  return model(ids);
}

checkpointing::Recompute selective() {
  RecomputeOptions options = RecomputeOptions::selective();
  options.least_bytes = 256;
  return checkpointing::Recompute(options);
}

void expect_gradients(const torch::nn::Module& whole, const torch::nn::Module& sliced,
                      const World& world, bool cuts_head) {
  const auto parameters = sliced.named_parameters();
  for (const auto& item : whole.named_parameters()) {
    SCOPED_TRACE(item.key());
    if (!item.value().grad().defined()) continue;
    const torch::Tensor expected = slice_of(item.key(), item.value().grad(), world, cuts_head);
    const torch::Tensor actual = parameters[item.key()].grad();
    ASSERT_TRUE(actual.defined());
    ASSERT_EQ(expected.sizes(), actual.sizes());
    EXPECT_LE((expected - actual).abs().max().item<double>(), 1e-12);
  }
}

class TensorParallelTest : public ::testing::TestWithParam<std::tuple<How, int>> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  How how() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
};

template <typename Sliced>
void expect_trains_as_whole(const World& world, const Plain& whole, double whole_loss, How how) {
  Sliced sliced(world);
  sliced->to(torch::kDouble);
  take_slices(*sliced, whole, world);
  auto recompute = selective();
  const torch::Tensor hidden = hidden_of(sliced, ids_of(1), how, recompute);
  const torch::Tensor loss = parallel::vocabulary_parallel_cross_entropy(
      sliced->head(hidden), targets_of(1), kVocabulary, world);
  loss.backward();
  EXPECT_NEAR(loss.item<double>(), whole_loss, 1e-12);
  expect_gradients(*whole, *sliced, world, true);
}

TEST_P(TensorParallelTest, ByExplicitLayersHasTheGradientsOfTheWholeModule) {
  Plain whole = make_plain();
  const torch::Tensor loss = whole_loss(whole->head(whole(ids_of(1))), targets_of(1));
  loss.backward();
  run_ranks(ranks(), [&](World& world) {
    {
      SCOPED_TRACE("tokens on all ranks");
      expect_trains_as_whole<Explicit>(world, whole, loss.item<double>(), how());
    }
    SCOPED_TRACE("tokens cut over ranks");
    expect_trains_as_whole<Sequence>(world, whole, loss.item<double>(), how());
  });
}

TEST_P(TensorParallelTest, ByAPlanHasTheGradientsOfTheWholeModule) {
  Plain whole = make_plain();
  const torch::Tensor expected = whole_loss(whole->logits(whole(ids_of(1))), targets_of(1));
  expected.backward();
  run_ranks(ranks(), [&](World& world) {
    Plain module = make_plain();
    const torch::Tensor weight = module->qkv->weight;
    tensor_parallel(module, world, plan());
    EXPECT_TRUE(module->qkv->weight.is_same(weight));
    auto recompute = selective();
    const torch::Tensor hidden = hidden_of(module, ids_of(1), how(), recompute);
    const torch::Tensor loss = whole_loss(module->logits(hidden), targets_of(1));
    loss.backward();
    EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-12);
    expect_gradients(*whole, *module, world, false);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::allclose(module->logits(module(ids_of(2))), whole->logits(whole(ids_of(2))),
                                1e-12, 1e-12));
  });
}

// ---- with data parallelism: ranks 0 and 1 are a tensor-parallel group, 2 and 3 another ----

class TensorAndDataParallelTest : public TensorParallelTest {};

TEST_P(TensorAndDataParallelTest, TrainsAtStages1And3) {
  constexpr int kSteps = 3;
  Plain whole = make_plain();
  torch::optim::SGD optimizer(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int data = 0; data < 2; ++data) {
      const int seed = 10 * step + data;
      (whole_loss(whole->logits(whole(ids_of(seed))), targets_of(seed)) / 2).backward();
    }
    optimizer.step();
  }
  for (const int stage : {1, 3}) {
    SCOPED_TRACE(c10::str("stage ", stage));
    const auto store = c10::make_intrusive<c10d::HashStore>();
    run_ranks(4, [&](World& all) {
      const int tensor = all.rank() % 2, data = all.rank() / 2;
      const World tensor_world = axis(store, c10::str("tensor", data), tensor, all);
      const World data_world = axis(store, c10::str("data", tensor), data, all);
      Plain module = make_plain();
      tensor_parallel(module, tensor_world, plan());
      Options options;
      options.stage = stage_of(stage);
      options.page_bytes = 4_KiB;
      options.update_by = UpdateBy::kClass;
      DistributedDataParallel<Plain> model(module, data_world, options);
      Optimizer<torch::optim::SGD> sharded(model, torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < kSteps; ++step) {
        sharded.zero_grad();
        auto recompute = selective();
        const int seed = 10 * step + data;
        const torch::Tensor hidden = hidden_of(model, ids_of(seed), how(), recompute);
        whole_loss(module->logits(hidden), targets_of(seed)).backward();
        sharded.step();
      }
      const GatheredParameters gathered(model);
      const auto parameters = module->named_parameters();
      for (const auto& item : whole->named_parameters()) {
        const torch::Tensor expected =
            slice_of(item.key(), item.value().detach(), tensor_world, false);
        EXPECT_LE((expected - parameters[item.key()].detach()).abs().max().item<double>(), 1e-12)
            << item.key();
      }
    });
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<How, int>>& info) {
  constexpr const char* kWays[] = {"Plainly", "InARegion", "Recomputed"};
  return c10::str(kWays[static_cast<int>(std::get<0>(info.param))], "On", std::get<1>(info.param),
                  "Ranks");
}

INSTANTIATE_TEST_SUITE_P(WaysAndRanks, TensorParallelTest,
                         ::testing::Combine(::testing::Values(How::kPlainly, How::kInARegion,
                                                              How::kRecomputed),
                                            ::testing::Values(1, 2, 3)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Ways, TensorAndDataParallelTest,
                         ::testing::Combine(::testing::Values(How::kPlainly, How::kInARegion,
                                                              How::kRecomputed),
                                            ::testing::Values(2)),
                         name_of);

// ---- what passes between ranks ----

// The bytes of all-reduces in forward and in backward, of the blocks under a plan.
std::pair<int64_t, int64_t> sent_by(How how) {
  std::pair<int64_t, int64_t> sent;
  run_ranks(2, [&](World& world) {
    Plain module = make_plain();
    tensor_parallel(module, world, plan());
    const auto now = [&] { return world.communicator().wire_traffic().all_reduce.bytes; };
    auto recompute = selective();
    const int64_t before = now();
    torch::Tensor hidden;
    if (how == How::kInARegion) {
      CheckpointOptions whole_repetition;
      whole_repetition.early_stop = false;
      hidden = checkpoint(
          whole_repetition, [&](const torch::Tensor& ids) { return module(ids); }, ids_of(1));
    } else {
      hidden = hidden_of(module, ids_of(1), how, recompute);
    }
    const int64_t after = now();
    hidden.square().sum().backward();
    if (world.rank() == 0) sent = {after - before, now() - after};
  });
  return sent;
}

TEST(TensorParallelTrafficTest, IsEachCollectiveOnceAForwardAndOnceARepetition) {
  constexpr int64_t kActivation = 3 * kLength * kWidth * 8;
  // Forward: the embedding, attention and the MLP. Backward: the inputs of the two columns.
  const std::pair<int64_t, int64_t> plainly(3 * kActivation, 2 * kActivation);
  EXPECT_EQ(sent_by(How::kPlainly), plainly);
  EXPECT_EQ(sent_by(How::kRecomputed), plainly);
  EXPECT_EQ(sent_by(How::kInARegion), std::make_pair(3 * kActivation, 5 * kActivation));
}

// ---- the functions ----

TEST(RankFunctionsTest, OfSplitAndGatherAreEachOthersGradient) {
  run_ranks(3, [](World& world) {
    const auto ranks = parallel::ranks_of(world);
    const Slices slices(7, 1, 3, "a test");
    const torch::Tensor x = torch::arange(14.0).view({2, 7}).requires_grad_();
    const torch::Tensor factors = torch::arange(14.0).view({2, 7}) + 1;
    const torch::Tensor own = parallel::split_to_ranks(x, slices, ranks, "a test");
    EXPECT_EQ(own.size(-1), slices.size(world.rank()));
    const torch::Tensor back = parallel::gather_from_ranks(own, slices, ranks, "a test");
    EXPECT_TRUE(torch::equal(back, x));
    (back * factors).sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), factors));
  });
}

TEST(RankFunctionsTest, LayersSplitTheirInputAndGatherTheirOutputWhereToldTo) {
  run_ranks(2, [](World& world) {
    LinearOptions gathering(5, 7);
    gathering.gathers_output = true;
    LinearOptions splitting(7, 3);
    splitting.splits_input = true;
    ColumnParallelLinear first(gathering, world);
    RowParallelLinear second(splitting, world);
    const torch::Tensor x = torch::ones({2, 5});
    const torch::Tensor hidden = first(x);
    EXPECT_EQ(hidden.sizes(), torch::IntArrayRef({2, 7}));
    const torch::Tensor y = second(hidden);
    EXPECT_TRUE(torch::equal(y, world.max(y)));
    y.sum().backward();
    EXPECT_EQ(first->weight.grad().size(0), first->weight.size(0));
  });
}

TEST(TensorParallelFormsTest, OfALinearLayerAllHaveTheValuesOfTheWholeOne) {
  Plain whole = make_plain();
  const torch::Tensor flat = torch::linspace(-1, 1, 2 * kWidth, torch::kDouble).view({2, kWidth});
  const auto values_of = [&](Plain& module) {
    const torch::Tensor rows = module->down(module->up(flat));
    const torch::Tensor cube = module->down(module->up(flat.unsqueeze(0)))[0];
    const torch::Tensor hidden = torch::linear(flat, module->up->weight, module->up->bias);
    return std::vector<torch::Tensor>{
        rows, cube, torch::linear(hidden, module->down->weight, module->down->bias)};
  };
  const auto expected = values_of(whole);
  run_ranks(2, [&](World& world) {
    Plain module = make_plain();
    tensor_parallel(module, world, plan());
    for (const torch::Tensor& actual : values_of(module)) {
      EXPECT_LE((actual - expected[0]).abs().max().item<double>(), 1e-13);
    }
  });
}

TEST(RankFunctionsTest, CutUnevenlyInUnitsAndRefuseWhatCannotBeCut) {
  EXPECT_THAT(Slices(257, 1, 2, "x").sizes(), ::testing::ElementsAre(128, 129));
  EXPECT_THAT(Slices(12, 4, 2, "x").sizes(), ::testing::ElementsAre(4, 8));
  EXPECT_THAT(error_of([] { Slices(12, 5, 2, "x"); }), HasSubstr("x: expected a multiple of 5"));
  EXPECT_THAT(error_of([] { Slices(12, 4, 4, "x"); }), HasSubstr("use fewer ranks"));
}

// ---- what is refused ----

TEST(TensorParallelRefusalTest, OfOperatorsOnAPlannedParameter) {
  run_ranks(2, [](World& world) {
    Plain module = make_plain();
    tensor_parallel(module, world, plan());
    const torch::Tensor x = torch::ones({2, kWidth}, torch::kDouble);
    EXPECT_THAT(error_of([&] { torch::mm(x, module->qkv->weight.t()); }),
                AllOf(HasSubstr("the weight of \"qkv\", which tensor_parallel() cut"),
                      HasSubstr("got aten::mm"), HasSubstr("this rank's slice alone")));
    EXPECT_THAT(error_of([&] { torch::matmul(x, module->qkv->weight.transpose(0, 1)); }),
                HasSubstr("got aten::transpose"));
    EXPECT_THAT(error_of([&] { module->up->weight.square().sum(); }), HasSubstr("aten::square"));
    EXPECT_THAT(error_of([&] {
                  torch::cat({module->norm1->weight, module->up->weight});
                }),
                HasSubstr("got aten::cat"));
    EXPECT_EQ(module->up->weight.detach().clone().sizes(), module->up->weight.sizes());
    EXPECT_THAT(
        error_of([&] { module->down(x); }),
        HasSubstr(c10::str("expected this rank's ", world.rank() == 0 ? 15 : 16, " of 31")));
    EXPECT_THAT(error_of([&] { torch::embedding(module->up->weight, ids_of(1)); }),
                HasSubstr("Cut::vocabulary()"));
    EXPECT_THAT(error_of([&] { torch::linear(module->qkv->weight, module->head->weight); }),
                HasSubstr("as another argument"));
    EXPECT_THAT(
        error_of([&] { torch::addmm(module->up->bias, x, module->up->weight.t(), /*beta=*/2); }),
        HasSubstr("expected torch::addmm without factors, got beta 2"));
    EXPECT_THAT(error_of([&] { module->tokens(torch::full({1}, kVocabulary, torch::kLong)); }),
                HasSubstr("expected ids from 0 to 256"));
    EXPECT_THAT(error_of([&] { module->to(torch::kFloat); }), HasSubstr("got aten::to"));
    const torch::NoGradGuard no_grad;
    module->up->weight.mul_(2);  // as an optimizer does
  });
}

TEST(TensorParallelRefusalTest, OfPartsThatAreNone) {
  const auto error = [](const auto& make) { return error_of([&] { make(); }); };
  EXPECT_THAT(error([] { Cut::column().parts({3}); }), HasSubstr("2 or more parts of a column"));
  EXPECT_THAT(error([] { Cut::column().parts({3, 0}); }), HasSubstr("got [3, 0]"));
  EXPECT_THAT(error([] { Cut::row().parts({3, 1}); }), HasSubstr("got [3, 1] of another cut"));
}

TEST(TensorParallelRefusalTest, OfPlansThatDoNotFit) {
  run_ranks(2, [](World& world) {
    const auto error = [&](const TensorParallelPlan& wrong) {
      Plain module = make_plain();
      return error_of([&] { tensor_parallel(module, world, wrong); });
    };
    EXPECT_THAT(error({{"nobody", Cut::row()}}), HasSubstr("\"nobody\" fits no torch::nn::Linear"));
    EXPECT_THAT(error({{"tokens", Cut::column()}}), HasSubstr("fits no torch::nn::Linear"));
    EXPECT_THAT(error({{"up", Cut::column()}, {"u*", Cut::column()}}), HasSubstr("2 layers"));
    EXPECT_THAT(error({{"up", Cut::column().unit(4)}}), HasSubstr("a multiple of 4"));
    EXPECT_THAT(error({{"up", Cut::column().parts(2)}}), HasSubstr("that 2 parts divide"));
    EXPECT_THAT(error({{"qkv", Cut::column().parts({8, 2, 2}).unit(kHead)}}),
                HasSubstr("expected parts that add up to 36 outputs, got [8, 2, 2] units of 4, "
                          "which are 48"));
    EXPECT_THAT(error({{"qkv", Cut::column().parts({6, 3}).unit(kHead)}}),
                AllOf(HasSubstr("expected units that 2 ranks divide, got 3 of 8 elements"),
                      HasSubstr("Cut::uneven()")));
    EXPECT_THAT(error({{"qkv", Cut::column().parts({7, 2}).unit(kHead).uneven()}}),
                HasSubstr("expected at least one slice of 28 elements for each of 2 ranks"));
    EXPECT_THAT(error({{"up", world.rank() == 0 ? Cut::column() : Cut::row()}}),
                HasSubstr("up: row"));
    Plain module = make_plain();
    tensor_parallel(module, world, plan());
    EXPECT_THAT(error_of([&] { tensor_parallel(module, world, plan()); }),
                HasSubstr("is marked already"));
    Options options;
    options.stage = stage_of(3);
    Plain wrapped = make_plain();
    const DistributedDataParallel<Plain> model(wrapped, world, options);
    EXPECT_THAT(error_of([&] { tensor_parallel(wrapped, world, plan()); }),
                HasSubstr("call tensor_parallel() before wrapping"));
  });
}

TEST(VocabularyParallelTest, ALossOfTargetsThatAreNoClassIsRefused) {
  run_ranks(2, [](World& world) {
    const auto loss = [&](int64_t classes, int64_t target) {
      return error_of([&] {
        parallel::vocabulary_parallel_cross_entropy(
            torch::zeros({1, classes}), torch::full({1}, target, torch::kLong), 6, world);
      });
    };
    EXPECT_EQ(loss(3, 5), "");
    EXPECT_THAT(loss(3, 6), HasSubstr("expected targets from 0 to 5 or -100, got 6"));
    EXPECT_THAT(loss(6, 5), HasSubstr("expected 3 of 6 classes"));
  });
}

}  // namespace
}  // namespace zeropage::tensor_parallel_test
