// What a script changes between backward and step is noticed, at the first, a middle and the last one of many parameters, and
// changes no other parameter.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/tiny_models.h"
#include "zero/parameter_scan.h"
#include "zeropage/zeropage.h"

namespace zeropage::step_edits_test {
namespace {

using namespace zeropage::testing;

// Two threads share them.
constexpr int64_t kTensors = zero::kParametersOfThread + 100;
// Every number in these tests is a multiple of a power of two, so that each way to compute it has the same bits.
constexpr double kRate = 0.5;

double factor_of(int64_t i) {
  return static_cast<double>(i % 3 + 1);
}

torch::Tensor weights() {
  return torch::tensor({1.0F, 2.0F, 3.0F, 4.0F}).view({2, 2});
}

torch::Tensor gradient_of(int64_t i) {
  return weights() * factor_of(i);
}

struct ManyMatricesImpl : torch::nn::Module {
  ManyMatricesImpl() {
    for (int64_t i = 0; i < kTensors; ++i) {
      register_parameter("weight" + std::to_string(i), torch::full({2, 2}, 1.0));
    }
  }
  torch::Tensor forward() const {
    std::vector<torch::Tensor> sums;
    const std::vector<torch::Tensor> all = parameters();
    for (size_t i = 0; i < all.size(); ++i) {
      sums.push_back((all[i] * gradient_of(static_cast<int64_t>(i))).sum());
    }
    return torch::stack(sums).sum();
  }
};
TORCH_MODULE(ManyMatrices);

const std::vector<int64_t>& edited() {
  static const std::vector<int64_t> edited = {0, kTensors / 2, kTensors - 1};
  return edited;
}

int64_t neighbour(int64_t i) {
  return i + 1 < kTensors ? i + 1 : i - 1;
}

class StepEditsTest : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  StepEditsTest() { at::set_num_threads(2); }
  ~StepEditsTest() override { at::set_num_threads(threads_); }

  static Options options() {
    Options options;
    options.stage = stage_of(std::get<0>(GetParam()));
    return options;
  }
  static int ranks() { return std::get<1>(GetParam()); }
  // p.grad() has no memory then.
  static bool shards_gradients() { return ranks() > 1 && std::get<0>(GetParam()) > 0; }

  using Edit = std::function<void(const std::vector<torch::Tensor>& all, int64_t i)>;
  using Expected = std::function<torch::Tensor(int64_t i)>;

  // One step of SGD. before: what the script does with each edited parameter before backward; between: behind it.
  static void expect_after_step(const Edit& before, const Edit& between, const Expected& expected) {
    run_ranks(ranks(), [&](comm::World& world) {
      DistributedDataParallel<ManyMatrices> model(ManyMatrices(), world, options());
      Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(kRate));
      const std::vector<torch::Tensor> all = model.module()->parameters();
      for (const int64_t i : edited()) {
        if (before) before(all, i);
      }
      model().backward();
      for (const int64_t i : edited()) {
        const torch::NoGradGuard no_grad;
        if (between) between(all, i);
      }
      optimizer.step();
      const torch::NoGradGuard no_grad;
      const GatheredParameters guard(model);
      for (int64_t i = 0; i < kTensors; ++i) {
        const bool is_edited = std::find(edited().begin(), edited().end(), i) != edited().end();
        const torch::Tensor wanted = is_edited ? expected(i) : 1 - kRate * gradient_of(i);
        EXPECT_TRUE(torch::equal(all[static_cast<size_t>(i)].detach(), wanted))
            << "weight" << i << ": expected\n"
            << wanted << "\ngot\n"
            << all[static_cast<size_t>(i)].detach();
      }
    });
  }

  const int threads_ = at::get_num_threads();
};

torch::Tensor& grad(const std::vector<torch::Tensor>& all, int64_t i) {
  return all[static_cast<size_t>(i)].mutable_grad();
}

// Whose parameters have memory of their own: at stage 3 one that is not gathered has none to be written to or replaced.
class StepEditsOfMemoryTest : public StepEditsTest {};

TEST_P(StepEditsTest, ValuesWrittenInPlace) {
  expect_after_step(
      nullptr, [](const auto& all, int64_t i) { all[static_cast<size_t>(i)].add_(2); },
      [](int64_t i) { return 3 - kRate * gradient_of(i); });
}

TEST_P(StepEditsOfMemoryTest, ValuesWrittenThroughData) {
  expect_after_step(
      nullptr, [](const auto& all, int64_t i) { all[static_cast<size_t>(i)].data().fill_(4); },
      [](int64_t i) { return 4 - kRate * gradient_of(i); });
}

TEST_P(StepEditsTest, AGradientThatIsReplaced) {
  expect_after_step(
      nullptr,
      [](const auto& all, int64_t i) {
        grad(all, i) = torch::full({2, 2}, -3.0);
      },
      [](int64_t) {
        return torch::full({2, 2}, 1 + kRate * 3);
      });
}

TEST_P(StepEditsTest, AGradientThatIsReplacedByItsProduct) {
  expect_after_step(
      nullptr, [](const auto& all, int64_t i) { grad(all, i) = grad(all, i) * 4; },
      [](int64_t i) { return 1 - kRate * 4 * gradient_of(i); });
}

TEST_P(StepEditsTest, AGradientThatIsMultipliedInPlace) {
  expect_after_step(
      nullptr, [](const auto& all, int64_t i) { grad(all, i).mul_(4); },
      [](int64_t i) { return 1 - kRate * 4 * gradient_of(i); });
}

// At stage 0 it lies in the same memory, elsewhere.
TEST_P(StepEditsTest, AGradientThatIsAnotherParameters) {
  expect_after_step(
      nullptr, [](const auto& all, int64_t i) { grad(all, i) = grad(all, neighbour(i)); },
      [](int64_t i) { return 1 - kRate * gradient_of(neighbour(i)); });
}

TEST_P(StepEditsTest, AGradientThatIsUndefined) {
  expect_after_step(
      nullptr, [](const auto& all, int64_t i) { grad(all, i).reset(); },
      [](int64_t) {
        return torch::full({2, 2}, 1.0);
      });
}

TEST_P(StepEditsTest, AGradientThatGetsOtherData) {
  expect_after_step(
      nullptr,
      [](const auto& all, int64_t i) {
        const auto set_data = [&] { grad(all, i).set_data(torch::full({2, 2}, 8.0)); };
        if (!shards_gradients()) return set_data();
        EXPECT_NE(error_of(set_data).find("its memory belongs to its page"), std::string::npos);
        grad(all, i) = torch::full({2, 2}, 8.0);
      },
      [](int64_t) {
        return torch::full({2, 2}, 1 - kRate * 8);
      });
}

TEST_P(StepEditsTest, AParameterThatIsFrozenBeforeBackward) {
  expect_after_step(
      [](const auto& all, int64_t i) { all[static_cast<size_t>(i)].requires_grad_(false); },
      nullptr,
      [](int64_t) {
        return torch::full({2, 2}, 1.0);
      });
}

// LibTorch's optimizers, too, step what has a gradient.
TEST_P(StepEditsTest, AParameterThatIsFrozenBehindBackward) {
  expect_after_step(
      nullptr,
      [](const auto& all, int64_t i) { all[static_cast<size_t>(i)].requires_grad_(false); },
      [](int64_t i) { return 1 - kRate * gradient_of(i); });
}

TEST_P(StepEditsTest, VersionsRiseByOneWhereAParameterIsStepped) {
  run_ranks(ranks(), [&](comm::World& world) {
    DistributedDataParallel<ManyMatrices> model(ManyMatrices(), world, options());
    Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(kRate));
    const std::vector<torch::Tensor> all = model.module()->parameters();
    for (const bool are_edited : {false, true}) {
      model().backward();
      for (const int64_t i : edited()) {
        if (are_edited) grad(all, i).reset();
      }
      std::vector<int64_t> before;
      for (const torch::Tensor& parameter : all) before.push_back(parameter._version());
      optimizer.step();
      for (int64_t i = 0; i < kTensors; ++i) {
        const auto at = static_cast<size_t>(i);
        const bool is_edited = std::find(edited().begin(), edited().end(), i) != edited().end();
        EXPECT_EQ(all[at]._version() - before[at], are_edited && is_edited ? 0 : 1) << i;
      }
      optimizer.zero_grad();
    }
  });
}

TEST_P(StepEditsOfMemoryTest, OtherMemoryOfAParameterIsRefusedByItsName) {
  run_ranks(ranks(), [&](comm::World& world) {
    DistributedDataParallel<ManyMatrices> model(ManyMatrices(), world, options());
    Optimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(kRate));
    const std::vector<torch::Tensor> all = model.module()->parameters();
    model().backward();
    for (const int64_t i : edited()) {
      const torch::Tensor& parameter = all[static_cast<size_t>(i)];
      const torch::Tensor in_page = parameter.detach();
      parameter.set_data(in_page.clone());
      const std::string error = error_of([&] { optimizer.step(); });
      EXPECT_NE(error.find("\"weight" + std::to_string(i) + "\" no longer lives in its page"),
                std::string::npos)
          << error;
      parameter.set_data(in_page);
    }
    optimizer.step();
  });
}

class StateEditsTest : public StepEditsTest {
 protected:
  using State = torch::optim::AdamWParamState;
  using Map = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  // edit: of the entry with that key.
  static void expect_refused(const std::function<void(Map& map, void* key)>& edit) {
    for (const int64_t i : edited()) {
      run_ranks(ranks(), [&](comm::World& world) {
        DistributedDataParallel<ManyMatrices> model(ManyMatrices(), world, options());
        Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(kRate));
        torch::optim::Optimizer& base = optimizer;
        const auto step = [&] {
          optimizer.zero_grad();
          model().backward();
          optimizer.step();
        };
        step();
        step();
        edit(base.state(),
             model.module()->parameters()[static_cast<size_t>(i)].unsafeGetTensorImpl());
        const std::string error = error_of(step);
        EXPECT_NE(error.find("was put into the optimizer's state(), changed in it or taken out"),
                  std::string::npos)
            << i << ": " << error;
      });
    }
  }
};

TEST_P(StateEditsTest, ACountOfStepsThatIsSet) {
  expect_refused([](Map& map, void* key) { static_cast<State&>(*map.at(key)).step(7); });
}

TEST_P(StateEditsTest, AMomentThatIsReplaced) {
  expect_refused([](Map& map, void* key) {
    static_cast<State&>(*map.at(key)).exp_avg_sq(torch::zeros({2, 2}));
  });
}

TEST_P(StateEditsTest, AnEntryThatIsTakenAway) {
  expect_refused([](Map& map, void* key) { map.erase(key); });
}

TEST_P(StateEditsTest, AnEntryThatIsReplacedByItsCopy) {
  expect_refused([](Map& map, void* key) { map.at(key) = map.at(key)->clone(); });
}

TEST_P(StateEditsTest, AnEntryThatIsEmptied) {
  expect_refused([](Map& map, void* key) { map.at(key).reset(); });
}

TEST_P(StateEditsTest, AnEntryThatIsAdded) {
  expect_refused([](Map& map, void*) { map[&map] = std::make_unique<State>(); });
}

// Entries lie in a row, and each may go by itself, on any rank's thread.
TEST_P(StateEditsTest, AnEntryMayOutliveItsOptimizer) {
  run_ranks(ranks(), [&](comm::World& world) {
    std::unique_ptr<torch::optim::OptimizerParamState> kept;
    {
      DistributedDataParallel<ManyMatrices> model(ManyMatrices(), world, options());
      Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(kRate));
      torch::optim::Optimizer& base = optimizer;
      model().backward();
      optimizer.step();
      kept = std::move(base.state().begin()->second);
      ASSERT_NE(kept, nullptr);
    }
    EXPECT_EQ(static_cast<State&>(*kept).step(), -1);
    EXPECT_EQ(static_cast<State&>(*kept->clone()).step(), -1);
  });
}

INSTANTIATE_TEST_SUITE_P(StageAndRanks, StepEditsTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(1, 2)));
INSTANTIATE_TEST_SUITE_P(StageAndRanks, StepEditsOfMemoryTest,
                         ::testing::Combine(::testing::Values(0, 1, 2), ::testing::Values(1, 2)));
INSTANTIATE_TEST_SUITE_P(StageAndRanks, StateEditsTest,
                         ::testing::Values(std::tuple(0, 1), std::tuple(1, 2)));

}  // namespace
}  // namespace zeropage::step_edits_test
