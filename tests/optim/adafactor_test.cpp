// Adafactor as a class of torch::optim beside its formulas in LibTorch's operators, and the moments that it has of parts of a
// matrix.
#include "zeropage/adafactor.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "optim/factored_moments.h"
#include "tests/harness/errors.h"

namespace zeropage::adafactor_test {
namespace {

using namespace zeropage::testing;
using optim::FactoredPart;
using optim::FactoredShape;
using ::testing::HasSubstr;

constexpr int kSteps = 10;

torch::Tensor numbers(torch::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed));
}

double relative_error(const torch::Tensor& expected, const torch::Tensor& actual) {
  return ((expected - actual.to(torch::kDouble)).norm() / expected.norm()).item<double>();
}

double root_mean_square(const torch::Tensor& tensor) {
  return tensor.square().mean().sqrt().item<double>();
}

// torch.optim.Adafactor's formulas, in fp64.
struct Formulas {
  AdafactorOptions options;
  torch::Tensor value;
  torch::Tensor rows = {}, columns = {}, moment = {};

  void step(int count, const torch::Tensor& gradient) {
    const auto [root, least] = options.eps();
    const double rate = std::pow(count, options.beta2_decay());
    const double length = std::max(least, root_mean_square(value)) *
                          std::min(options.lr(), 1 / std::sqrt(static_cast<double>(count)));
    value = value * (1 - options.lr() * options.weight_decay());
    const auto move = [&](torch::Tensor& to, const torch::Tensor& mean) {
      to = to.defined() ? to.lerp(mean, rate) : mean;
    };
    torch::Tensor estimate;
    if (gradient.dim() > 1) {
      move(rows, gradient.square().mean(-1, true));
      move(columns, gradient.square().mean(-2, true));
      estimate = rows * columns / rows.mean(-2, true).clamp_min(root);
    } else {
      move(moment, gradient.square());
      estimate = moment;
    }
    const torch::Tensor direction = gradient / estimate.clamp_min(root * root).sqrt();
    value = value - length / std::max(1.0, root_mean_square(direction) / options.d()) * direction;
  }
};

TEST(AdafactorTest, HasTheFormulasValuesAfterTenSteps) {
  const std::vector<std::vector<int64_t>> shapes = {
      {40, 70}, {70, 40}, {1, 9}, {9, 1}, {1, 1}, {33}, {1}, {3, 5, 7}, {6, 4, 3, 3}};
  for (const auto& sizes : shapes) {
    for (const auto& options : {AdafactorOptions(), AdafactorOptions(0.9).weight_decay(0.1),
                                AdafactorOptions(0.02).beta2_decay(-0.5).eps({0.01, 0.1}).d(2)}) {
      torch::Tensor value = numbers(sizes, 1).requires_grad_();
      Formulas formulas{options, value.detach().to(torch::kDouble)};
      Adafactor adafactor({value}, options);
      for (int step = 1; step <= kSteps; ++step) {
        const torch::Tensor gradient = numbers(sizes, 100 + static_cast<uint64_t>(step));
        value.mutable_grad() = gradient;
        adafactor.step();
        formulas.step(step, gradient.to(torch::kDouble));
      }
      EXPECT_LT(relative_error(formulas.value, value.detach()), 1e-6) << value.sizes();
    }
  }
}

TEST(AdafactorTest, TakesParametersWithoutElementsAndWithoutDimensions) {
  torch::Tensor empty = torch::zeros({0, 4}).requires_grad_();
  torch::Tensor number = torch::tensor(2.0F).requires_grad_();
  Adafactor adafactor({empty, number}, AdafactorOptions(0.1));
  empty.mutable_grad() = torch::zeros({0, 4});
  number.mutable_grad() = torch::tensor(3.0F);
  adafactor.step();
  EXPECT_NEAR(number.item<double>(), 2 - 0.1 * 2, 1e-6);
}

TEST(AdafactorTest, AGradientOfZerosChangesNothing) {
  torch::Tensor value = torch::ones({4, 6}).requires_grad_();
  Adafactor adafactor({value});
  value.mutable_grad() = torch::zeros({4, 6});
  adafactor.step();
  EXPECT_TRUE(torch::equal(value, torch::ones({4, 6})));
}

TEST(AdafactorTest, AGradientThatIsNotFiniteMakesAllOfTheParameterSo) {
  for (const float wrong : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    torch::Tensor value = torch::ones({4, 6}).requires_grad_();
    Adafactor adafactor({value});
    value.mutable_grad() = torch::ones({4, 6});
    value.mutable_grad()[1][2] = wrong;
    adafactor.step();
    EXPECT_FALSE(value.isfinite().any().item<bool>());
  }
}

TEST(AdafactorTest, RefusesOptionsOutOfRange) {
  const torch::Tensor value = torch::ones({2, 2}).requires_grad_();
  const std::vector<std::pair<AdafactorOptions, std::string>> wrong = {
      {AdafactorOptions(-1), "lr: expected 0 or more, got -1"},
      {AdafactorOptions().beta2_decay(0.5), "beta2_decay: expected 0 or less, got 0.5"},
      {AdafactorOptions().eps({-1, 0}), "eps: expected each 0 or more"},
      {AdafactorOptions().d(0.5), "d: expected 1 or more"},
      {AdafactorOptions().weight_decay(-1), "weight_decay: expected 0 or more"}};
  for (const auto& [options, words] : wrong) {
    EXPECT_THAT(error_of([&, &of = options] { Adafactor adafactor({value}, of); }),
                HasSubstr("Adafactor: " + words));
  }
}

TEST(AdafactorTest, GoesOnFromAnArchive) {
  torch::Tensor value = numbers({5, 8}, 1).requires_grad_();
  torch::Tensor vector = numbers({8}, 2).requires_grad_();
  const auto step = [&](Adafactor& adafactor, uint64_t seed) {
    value.mutable_grad() = numbers({5, 8}, seed);
    vector.mutable_grad() = numbers({8}, seed + 50);
    adafactor.step();
  };
  Adafactor adafactor({value, vector}, AdafactorOptions(0.1));
  step(adafactor, 3);
  std::stringstream text;
  torch::save(adafactor, text);
  const torch::Tensor value_then = value.detach().clone();
  const torch::Tensor vector_then = vector.detach().clone();
  step(adafactor, 4);
  const torch::Tensor expected = value.detach().clone();
  const torch::Tensor expected_vector = vector.detach().clone();
  Adafactor other({value, vector});
  torch::load(other, text);
  {
    const torch::NoGradGuard no_grad;
    value.copy_(value_then);
    vector.copy_(vector_then);
  }
  step(other, 4);
  EXPECT_TRUE(torch::equal(value, expected));
  EXPECT_TRUE(torch::equal(vector, expected_vector));
}

// All that is made of a matrix's gradient, on parts that begin at `cuts`.
struct Made {
  torch::Tensor magnitudes, sums, directions;
  optim::FactoredMoments moments;
};

Made made_of_parts(const FactoredShape& shape, const torch::Tensor& gradient,
                   std::vector<int64_t> cuts,
                   optim::cpu::Instructions instructions = optim::cpu::Instructions::kAvx512,
                   optim::FactoredBy by = optim::FactoredBy::kLoops) {
  Made made{.magnitudes = torch::zeros({shape.sums()}),
            .sums = torch::zeros({shape.sums()}, torch::kDouble),
            .directions = torch::empty({gradient.numel()}),
            .moments = {.shape = shape,
                        .rows = torch::zeros({shape.all_rows()}),
                        .columns = torch::zeros({shape.all_columns()})}};
  cuts.push_back(gradient.numel());
  const auto for_each_part = [&](const auto& visit) {
    int64_t begin = 0;
    for (const int64_t end : cuts) {
      visit(FactoredPart{.gradient = gradient.narrow(0, begin, end - begin),
                         .scale = 0.3F,
                         .first = begin,
                         .shape = shape,
                         .instructions = instructions,
                         .by = by},
            made.directions.narrow(0, begin, end - begin));
      begin = end;
    }
  };
  for_each_part([&](const FactoredPart& part, const torch::Tensor&) {
    optim::raise_to_magnitudes(part, made.magnitudes);
  });
  const torch::Tensor windows = optim::windows_of(shape, made.magnitudes);
  for_each_part([&](const FactoredPart& part, const torch::Tensor&) {
    optim::add_squares(part, windows, made.sums);
  });
  made.moments.take(made.sums, 1);
  for_each_part([&](const FactoredPart& part, const torch::Tensor& directions) {
    made.moments.divide_by_roots(part, 1e-7, directions);
  });
  return made;
}

// With numbers of many sizes, of which some are zero and one is below fp32's normal ones.
torch::Tensor uneven_numbers(int64_t numel) {
  const torch::Tensor sizes = numbers({numel}, 5).mul_(6).clamp_max_(8).exp_();
  torch::Tensor made = numbers({numel}, 6).mul_(sizes);
  made.masked_fill_(numbers({numel}, 7) > 1.5, 0);
  made[0] = 1e-42F;
  return made;
}

class FactoredMomentsTest : public ::testing::TestWithParam<torch::ScalarType> {};

TEST_P(FactoredMomentsTest, HaveTheSameBitsHoweverTheMatrixIsCut) {
  for (const FactoredShape& shape :
       {FactoredShape{1, 9, 37}, FactoredShape{1, 37, 9}, FactoredShape{5, 3, 4},
        FactoredShape{1, 1, 70}, FactoredShape{1, 70, 1}, FactoredShape{4, 1, 1},
        FactoredShape{1, 600, 700}}) {
    SCOPED_TRACE(c10::str(shape.batches, " x ", shape.rows, " x ", shape.columns));
    const int64_t numel = shape.all_rows() * shape.columns;
    const torch::Tensor gradient = uneven_numbers(numel).to(GetParam());
    const Made whole = made_of_parts(shape, gradient, {});
    for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{1},
                                             {numel / 2},
                                             {numel / 3, numel / 3 + 1, numel - 1},
                                             {0, numel}}) {
      for (const auto instructions :
           {optim::cpu::Instructions::kAnyProcessor, optim::cpu::Instructions::kAvx2,
            optim::cpu::Instructions::kAvx512}) {
        const Made made = made_of_parts(shape, gradient, cuts, instructions);
        EXPECT_TRUE(torch::equal(whole.magnitudes, made.magnitudes));
        EXPECT_TRUE(torch::equal(whole.sums, made.sums));
        EXPECT_TRUE(torch::equal(whole.directions, made.directions));
      }
      const Made by_operators = made_of_parts(
          shape, gradient, cuts, optim::cpu::Instructions::kAvx512, optim::FactoredBy::kOperators);
      EXPECT_TRUE(torch::equal(whole.magnitudes, by_operators.magnitudes));
      EXPECT_TRUE(torch::equal(whole.sums, by_operators.sums));
      EXPECT_TRUE(torch::equal(whole.directions, by_operators.directions));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gradients, FactoredMomentsTest,
                         ::testing::Values(torch::kFloat, torch::kBFloat16, torch::kHalf),
                         [](const auto& param) { return std::string(c10::toString(param.param)); });

TEST(FactoredMomentsTest, AreTheMeansInFp64) {
  const FactoredShape shape{2, 300, 500};
  const torch::Tensor gradient = uneven_numbers(300000);
  const Made made = made_of_parts(shape, gradient, {777});
  const torch::Tensor squares = (gradient * 0.3F).to(torch::kDouble).square().view({2, 300, 500});
  EXPECT_TRUE(torch::allclose(made.sums.narrow(0, 0, 600), squares.sum(2).view(-1), 1e-9, 0));
  EXPECT_TRUE(torch::allclose(made.sums.narrow(0, 600, 1000), squares.sum(1).view(-1), 1e-9, 0));
  EXPECT_TRUE(
      torch::equal(made.moments.rows, made.sums.narrow(0, 0, 600).div(500).to(torch::kFloat)));
}

TEST(FactoredMomentsTest, HaveTheSameBitsOnAnyNumberOfThreads) {
  const FactoredShape shape{1, 700, 900};
  const torch::Tensor gradient = uneven_numbers(630000);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const Made expected = made_of_parts(shape, gradient, {});
  for (const int threads : {2, 3, 4}) {
    at::set_num_threads(threads);
    const Made made = made_of_parts(shape, gradient, {});
    EXPECT_TRUE(torch::equal(expected.sums, made.sums)) << threads;
    EXPECT_TRUE(torch::equal(expected.directions, made.directions)) << threads;
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace zeropage::adafactor_test
