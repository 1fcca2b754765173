// Optimizers that update in one pass over memory instead of by the torch::optim class.
#include "zero/update/fused_update.h"

#include <map>
#include <numeric>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::fused_update_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using memory::operator""_KiB;

constexpr int kSteps = 5;

Oddball make_oddball() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Oddball();
}

Options fused(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 4_KiB;
  options.update_by = UpdateBy::kFused;
  return options;
}

template <typename A>
std::vector<torch::Tensor> train(int ranks, const Options& options,
                                 const typename OptimizerTraits<A>::Options& algorithm) {
  std::vector<torch::Tensor> result;
  run_ranks(ranks, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_oddball(), world, options);
    Optimizer<A> optimizer(model, algorithm);
    for (int step = 0; step < kSteps; ++step) {
      const Samples samples = samples_of(world.rank(), step);
      optimizer.zero_grad();
      loss_of(model(samples.inputs), samples).backward();
      optimizer.step();
    }
    const auto state = full_state(model);
    for (const auto& item : state) {
      if (item.key() != "steps") result.push_back(item.value());
    }
  });
  return result;
}

template <typename A>
void expect_same_bits_at_every_stage(const typename OptimizerTraits<A>::Options& algorithm) {
  at::set_num_threads(1);
  for (const int ranks : {1, 2, 3}) {
    const auto expected = train<A>(ranks, fused(0), algorithm);
    for (const int stage : {1, 2, 3}) {
      EXPECT_TRUE(same_bits(expected, train<A>(ranks, fused(stage), algorithm)))
          << "stage " << stage << ", " << ranks << " ranks";
    }
  }
}

template <typename A>
void expect_close_to_the_class(const typename OptimizerTraits<A>::Options& algorithm) {
  Options by_class = fused(2);
  by_class.update_by = UpdateBy::kClass;
  const auto expected = train<A>(2, by_class, algorithm);
  const auto actual = train<A>(2, fused(2), algorithm);
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t index = 0; index < expected.size(); ++index) {
    EXPECT_TRUE(torch::allclose(expected[index], actual[index], 1e-5, 1e-6)) << index;
  }
}

TEST(FusedUpdateTest, GivesTheSameBitsAtEveryStageWithAdamW) {
  expect_same_bits_at_every_stage<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
}
TEST(FusedUpdateTest, GivesTheSameBitsAtEveryStageWithSgd) {
  expect_same_bits_at_every_stage<torch::optim::SGD>(
      torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
}
TEST(FusedUpdateTest, GivesTheSameBitsAtEveryStageWithLion) {
  expect_same_bits_at_every_stage<Lion>(LionOptions(1e-3));
}
TEST(FusedUpdateTest, IsAsCloseToTheClassAsRoundingAllows) {
  expect_close_to_the_class<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  expect_close_to_the_class<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true));
  expect_close_to_the_class<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9));
  expect_close_to_the_class<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.05));
}

TEST(FusedUpdateTest, LeavesParametersWithoutAGradientAloneAndTheirSteps) {
  run_ranks(2, [](comm::World& world) {
    const auto by = [&](UpdateBy update_by) {
      Options options = fused(1);
      options.update_by = update_by;
      DistributedDataParallel<Oddball> model(make_oddball(), world, options);
      Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(0.1));
      // The scale misses the first step and the first layer the second: their bias corrections
      // differ at the third.
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        auto loss = model->strided.square().sum();
        if (step != 0) loss = loss + model->scale.square();
        if (step != 1) loss = loss + model->first->weight.square().sum();
        loss.backward();
        optimizer.step();
      }
      return full_state(model, world.rank());
    };
    const auto expected = by(UpdateBy::kClass);
    const auto actual = by(UpdateBy::kFused);
    for (const auto& item : expected) {
      EXPECT_TRUE(torch::allclose(item.value(), actual[item.key()], 1e-5, 1e-6)) << item.key();
    }
    EXPECT_TRUE(torch::equal(actual["unused.weight"], make_oddball()->unused->weight));
  });
}

TEST(FusedUpdateTest, GivesEveryGroupItsOwnOptionsAlsoWhenTheyChange) {
  run_ranks(2, [](comm::World& world) {
    torch::nn::Linear linear(7, 7);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : linear->parameters()) parameter.fill_(1.0);
    }
    DistributedDataParallel<torch::nn::Linear> model(linear, world, fused(3));
    using torch::optim::SGDOptions;
    Optimizer<torch::optim::SGD> optimizer(
        model, {{{model->weight}, std::make_unique<SGDOptions>(0.5)}, {{model->bias}}},
        SGDOptions(0.25));
    const auto step = [&] {
      optimizer.zero_grad();
      (model->weight.sum() + model->bias.sum()).backward();
      optimizer.step();
    };
    step();
    EXPECT_TRUE(model->weight.eq(0.5).all().item<bool>());
    EXPECT_TRUE(model->bias.eq(0.75).all().item<bool>());
    auto& options = static_cast<SGDOptions&>(optimizer.param_groups()[0].options());
    options.lr(1.0).momentum(0.5);
    step();
    EXPECT_TRUE(model->weight.eq(-0.5).all().item<bool>()) << model->weight;
    step();
    EXPECT_TRUE(model->weight.eq(-2.0).all().item<bool>()) << model->weight;
  });
}

using torch::optim::AdamWOptions;

// Many small parameters of a page, whose neighbours are in other groups: 75 elements each, and 5 of padding.
class AlternatingGroups {
 public:
  static constexpr size_t kParameters = 9;
  static constexpr size_t kGroups = 2;
  static constexpr int64_t kSlotNumel = 80;
  static constexpr int64_t kNumel = 75;

  static zero::OwnedPart part() {
    const int64_t numel = kParameters * kSlotNumel;
    zero::OwnedPart part{.values = torch::linspace(-1, 1, numel)};
    part.copy_out = part.values.to(torch::kBFloat16);
    return part;
  }
  static torch::Tensor gradient() { return torch::linspace(2, -1, kParameters * kSlotNumel); }

  // Groups that have these parameters alone.
  static std::vector<zero::OwnedGroup> groups(const std::vector<size_t>& parameters) {
    std::vector<zero::OwnedGroup> groups;
    for (size_t number = 0; number < kGroups; ++number) {
      zero::OwnedGroup group{.number = number, .shards = {}, .options = options(number)};
      for (const size_t parameter : parameters) {
        if (parameter % kGroups != number) continue;
        const int64_t begin = static_cast<int64_t>(parameter) * kSlotNumel;
        group.shards.push_back({.parameter = parameter,
                                .range = {begin, begin + kNumel},
                                .padding = kSlotNumel - kNumel,
                                .frozen = parameter == kFrozen});
      }
      if (!group.shards.empty()) groups.push_back(std::move(group));
    }
    return groups;
  }

  // The first misses some steps, the frozen one begins late.
  static bool has_gradient(size_t parameter, int step) {
    if (parameter == 0) return step != 1 && step != 2;
    return parameter != kFrozen || step >= 2;
  }

 private:
  static constexpr size_t kFrozen = 4;

  static std::unique_ptr<AdamWOptions> options(size_t group) {
    auto options = std::make_unique<AdamWOptions>(0.125);
    options->weight_decay(group == 0 ? 0.25 : 0);
    return options;
  }
};

// Values, copies and states of all parameters.
std::vector<torch::Tensor> stepped_in_groups(const std::vector<std::vector<size_t>>& updates) {
  const zero::OwnedPart part = AlternatingGroups::part();
  std::vector<std::unique_ptr<zero::PageUpdate>> made;
  for (const std::vector<size_t>& parameters : updates) {
    made.push_back(detail::fused_form<torch::optim::AdamW>(AdamWOptions())->make(part));
    made.back()->add_groups(AlternatingGroups::groups(parameters));
  }
  for (int step = 0; step < kSteps; ++step) {
    const auto has = [&](size_t parameter) {
      return AlternatingGroups::has_gradient(parameter, step);
    };
    for (const auto& update : made) {
      update->step(AlternatingGroups::gradient(), has, {.scale = 0.5}, {});
    }
  }
  std::map<size_t, std::vector<torch::Tensor>> states;
  for (const auto& update : made) {
    update->visit_states(zero::StateAccess::kRead, [&](zero::OwnedState& state) {
      for (const auto& tensor : state.tensors) states[state.parameter].push_back(tensor.values);
      states[state.parameter].push_back(torch::tensor(state.steps));
    });
  }
  std::vector<torch::Tensor> result = {part.values, part.copy_out.to(torch::kFloat)};
  for (const auto& [parameter, of] : states) result.insert(result.end(), of.begin(), of.end());
  return result;
}

TEST(FusedUpdateTest, ManySmallParametersHaveTheBitsOfUpdatesOfTheirOwn) {
  std::vector<std::vector<size_t>> each, all(1);
  for (size_t parameter = 0; parameter < AlternatingGroups::kParameters; ++parameter) {
    each.push_back({parameter});
    all.front().push_back(parameter);
  }
  const auto expected = stepped_in_groups(each);
  ASSERT_EQ(expected.size(), 2 + 3 * AlternatingGroups::kParameters);
  EXPECT_TRUE(same_bits(expected, stepped_in_groups(all)));
}

TEST(FusedUpdateTest, StatesOfAGroupThatAreMadeTogetherShareMemory) {
  std::vector<size_t> all(AlternatingGroups::kParameters);
  std::iota(all.begin(), all.end(), size_t{0});
  const auto update =
      detail::fused_form<torch::optim::AdamW>(AdamWOptions())->make(AlternatingGroups::part());
  update->add_groups(AlternatingGroups::groups(all));
  update->step(AlternatingGroups::gradient(), [](size_t) { return true; }, {}, {});
  std::set<const c10::StorageImpl*> storages;
  update->visit_states(zero::StateAccess::kRead, [&](zero::OwnedState& state) {
    for (const auto& tensor : state.tensors) {
      storages.insert(tensor.values.storage().unsafeGetStorageImpl());
    }
  });
  // Two states of each group, and of the parameter that was frozen when the others' were made.
  EXPECT_EQ(storages.size(), 2 * (AlternatingGroups::kGroups + 1));
}

// Values and states of both halves of a page after steps of which one may be kept back by its flag.
std::vector<torch::Tensor> stepped_with_flags(StateFormat format, const std::vector<bool>& flags) {
  const zero::OwnedPart part{.values = torch::linspace(-1, 1, 600), .copy_out = {}};
  const torch::Tensor gradient = torch::linspace(2, -1, 600);
  const auto update = detail::fused_form<torch::optim::AdamW>(AdamWOptions())->make(part);
  std::vector<zero::OwnedGroup> groups(1);
  groups[0].shards = {{.parameter = 0, .range = {0, 256}, .state_format = format},
                      {.parameter = 1, .range = {256, 600}, .state_format = format}};
  groups[0].options = std::make_unique<AdamWOptions>(0.125);
  update->add_groups(std::move(groups));
  for (size_t step = 0; step < flags.size(); ++step) {
    // The second parameter misses the first step.
    const auto has = [&](size_t parameter) { return parameter == 0 || step > 0; };
    update->step(gradient, has,
                 {.scale = 1, .found_inf = torch::full({1}, flags[step] ? 1.0F : 0.0F)}, {});
    if (flags[step]) update->uncount_step();
  }
  std::vector<torch::Tensor> result = {part.values};
  update->visit_states(zero::StateAccess::kRead, [&](zero::OwnedState& state) {
    result.push_back(torch::tensor(state.steps));
    for (const auto& tensor : state.tensors) result.push_back(tensor.values);
  });
  return result;
}

TEST(FusedUpdateTest, AStepThatItsFlagKeptBackLeavesNoTraceOnceItIsUncounted) {
  for (const auto format : {StateFormat::kFp32, StateFormat::kBf16, StateFormat::k8Bit}) {
    const auto expected = stepped_with_flags(format, {false, false, false});
    EXPECT_TRUE(same_bits(expected, stepped_with_flags(format, {false, false, true, false})));
    EXPECT_TRUE(same_bits(expected, stepped_with_flags(format, {false, true, true, false, false})));
    EXPECT_FALSE(same_bits(expected, stepped_with_flags(format, {false, false, true})));
  }
}

TEST(FusedUpdateTest, IsRefusedForAClassThatHasNone) {
  run_ranks(1, [](comm::World& world) {
    DistributedDataParallel<Oddball> model(make_oddball(), world, fused(1));
    EXPECT_THAT(error_of([&] { Optimizer<torch::optim::RMSprop> optimizer(model); }),
                HasSubstr("torch::optim::RMSprop has no fused form"));
  });
}

TEST(FusedUpdateTest, IsRefusedForLowPrecisionWithoutMasterWeights) {
  run_ranks(1, [](comm::World& world) {
    Oddball module = make_oddball();
    module->to(torch::kBFloat16);
    Options options = fused(1);
    options.low_precision_update = LowPrecisionUpdate::kNearest;
    DistributedDataParallel<Oddball> model(module, world, options);
    EXPECT_THAT(error_of([&] { Optimizer<torch::optim::AdamW> optimizer(model); }),
                HasSubstr("set options.low_precision_update"));
  });
}

}  // namespace
}  // namespace zeropage::fused_update_test
