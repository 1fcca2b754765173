// Muon and LAMB as classes of torch::optim, beside their formulas in LibTorch's operators.
#include "zeropage/muon.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/optim/step_cases.h"
#include "zeropage/lamb.h"

namespace zeropage::muon_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

constexpr int kSteps = 10;

// torch.optim.Muon's, in the dtype of the matrix.
torch::Tensor newton_schulz(const torch::Tensor& matrix, const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  const bool is_tall = matrix.size(0) > matrix.size(1);
  torch::Tensor x = is_tall ? matrix.t() : matrix;
  x = x / x.norm().clamp_min(options.ns_eps());
  for (int64_t step = 0; step < options.ns_steps(); ++step) {
    const torch::Tensor gram = x.mm(x.t());
    x = a * x + (b * gram + c * gram.mm(gram)).mm(x);
  }
  return is_tall ? x.t() : x;
}

double relative_error(const torch::Tensor& expected, const torch::Tensor& actual) {
  return ((expected - actual.to(torch::kDouble)).norm() / expected.norm()).item<double>();
}

TEST(OrthogonalisedTest, IsTheIterationInFp64) {
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 9}, {9, 1}, {64, 64}, {128, 300}, {300, 128}, {257, 129}, {130, 4100}}) {
    const torch::Tensor matrix = torch::randn({rows, columns}, at::detail::createCPUGenerator(1));
    const torch::Tensor expected = newton_schulz(matrix.to(torch::kDouble), {});
    EXPECT_LT(relative_error(expected, orthogonalised(matrix)), 2e-6) << rows << " x " << columns;
    const torch::Tensor strided = torch::empty({columns, rows}).t().copy_(matrix);
    EXPECT_TRUE(torch::equal(orthogonalised(matrix), orthogonalised(strided)));
  }
}

TEST(OrthogonalisedTest, HasTheSameBitsOnAnyNumberOfThreads) {
  const torch::Tensor matrix = torch::randn({300, 700}, at::detail::createCPUGenerator(1));
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const torch::Tensor expected = orthogonalised(matrix);
  for (const int threads : {2, 3, 4}) {
    at::set_num_threads(threads);
    EXPECT_TRUE(torch::equal(expected, orthogonalised(matrix))) << threads;
  }
  at::set_num_threads(before);
}

TEST(OrthogonalisedTest, HasSingularValuesNearOne) {
  const torch::Tensor matrix = torch::randn({40, 90}, at::detail::createCPUGenerator(2));
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    const auto singular =
        torch::linalg_svdvals(orthogonalised(matrix, MuonOptions().ns_dtype(dtype)));
    EXPECT_GT(singular.min().item<double>(), 0.5);
    EXPECT_LT(singular.max().item<double>(), 1.3);
  }
}

TEST(OrthogonalisedTest, OfZerosIsZeros) {
  EXPECT_TRUE(torch::equal(orthogonalised(torch::zeros({3, 5})), torch::zeros({3, 5})));
  EXPECT_EQ(orthogonalised(torch::zeros({0, 5})).numel(), 0);
  EXPECT_THAT(error_of([] { orthogonalised(torch::zeros({5})); }), HasSubstr("of two dimensions"));
}

torch::Tensor gradient_of(int64_t step, torch::IntArrayRef sizes) {
  return torch::randn(sizes, at::detail::createCPUGenerator(static_cast<uint64_t>(50 + step)));
}

void expect_formula(const MuonOptions& options, int64_t rows, int64_t columns) {
  torch::Tensor value = torch::randn({rows, columns}, at::detail::createCPUGenerator(9));
  torch::Tensor expected = value.to(torch::kDouble);
  torch::Tensor momentum = torch::zeros_like(expected);
  value.requires_grad_();
  Muon muon({value}, options);
  const auto m = static_cast<double>(rows);
  const auto n = static_cast<double>(columns);
  const double scale = options.scale() == MuonScale::kOriginal ? std::sqrt(std::max(1.0, m / n))
                                                               : 0.2 * std::sqrt(std::max(m, n));
  for (int64_t step = 0; step < kSteps; ++step) {
    const torch::Tensor gradient = gradient_of(step, {rows, columns});
    value.mutable_grad() = gradient;
    muon.step();
    const double mu = options.momentum();
    momentum = mu * momentum + (1 - mu) * gradient.to(torch::kDouble);
    const torch::Tensor direction =
        options.nesterov() ? (1 - mu) * gradient.to(torch::kDouble) + mu * momentum : momentum;
    expected = expected * (1 - options.lr() * options.weight_decay()) -
               options.lr() * scale * newton_schulz(direction, options);
  }
  EXPECT_LT(relative_error(expected, value.detach()), 1e-6);
}

TEST(MuonTest, HasTheFormulasValuesAfterTenSteps) {
  expect_formula(MuonOptions(0.02), 32, 48);
  expect_formula(MuonOptions(0.02).nesterov(false).weight_decay(0), 48, 32);
  expect_formula(MuonOptions(0.02).scale(MuonScale::kMatchRmsAdamW), 200, 130);
}

TEST(MuonTest, HasAdamWsValuesForItsGroup) {
  const torch::Tensor values = random_numbers(300, 1);
  torch::Tensor ours = values.clone().requires_grad_();
  torch::Tensor theirs = values.clone().requires_grad_();
  Muon muon({ours}, MuonOptions::adamw(0.01));
  torch::optim::AdamW adamw({theirs}, torch::optim::AdamWOptions(0.01));
  for (int64_t step = 0; step < kSteps; ++step) {
    ours.mutable_grad() = gradient_of(step, {300});
    theirs.mutable_grad() = gradient_of(step, {300});
    muon.step();
    adamw.step();
  }
  EXPECT_TRUE(torch::allclose(ours, theirs, 1e-6, 1e-7));
}

TEST(MuonTest, UpdatesEachBlockOfRowsAsAMatrixOfItsOwn) {
  const torch::Tensor whole = random_numbers(30 * 8, 1).view({30, 8});
  torch::Tensor fused = whole.clone().requires_grad_();
  Muon of_fused({fused}, MuonOptions(0.02).row_blocks({10, 4, 16}));
  const torch::Tensor gradient = gradient_of(0, {30, 8});
  fused.mutable_grad() = gradient;
  of_fused.step();
  int64_t row = 0;
  for (const int64_t rows : {10, 4, 16}) {
    torch::Tensor part = whole.narrow(0, row, rows).clone().requires_grad_();
    Muon of_part({part}, MuonOptions(0.02));
    part.mutable_grad() = gradient.narrow(0, row, rows).clone();
    of_part.step();
    EXPECT_TRUE(torch::allclose(part, fused.detach().narrow(0, row, rows), 1e-6, 1e-7));
    row += rows;
  }
}

TEST(MuonTest, RefusesWhatItCannotUpdate) {
  torch::Tensor vector = torch::ones({3}).requires_grad_();
  Muon muon({vector});
  vector.mutable_grad() = torch::ones({3});
  EXPECT_THAT(error_of([&] { muon.step(); }), HasSubstr("Muon updates matrices, and this has 1"));
  EXPECT_THAT(error_of([&] { Muon({vector}, MuonOptions().momentum(1)); }), HasSubstr("[0, 1)"));
  EXPECT_THAT(error_of([&] { Muon({vector}, MuonOptions().ns_steps(0)); }), HasSubstr("1 to 99"));
  EXPECT_THAT(error_of([&] { Muon({vector}, MuonOptions().ns_dtype(torch::kHalf)); }),
              HasSubstr("float or bfloat16"));
  EXPECT_THAT(error_of([&] { Muon({vector}, MuonOptions().ns_eps(1e-39)); }),
              HasSubstr("ns_eps: expected 1e-30 or more"));
}

TEST(MuonTest, OptionsAreSavedAndLoaded) {
  const MuonOptions saved = MuonOptions(0.3)
                                .row_blocks({2, 3})
                                .matrices(MuonMatrices::kBatch)
                                .ns_dtype(torch::kFloat)
                                .rule(MuonRule::kAdamW)
                                .betas({0.8, 0.9});
  torch::serialize::OutputArchive out;
  saved.serialize(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  MuonOptions loaded;
  EXPECT_FALSE(loaded == saved);
  loaded.serialize(in);
  EXPECT_TRUE(loaded == saved);
}

void expect_lamb(const LambOptions& options, double first_value) {
  torch::Tensor value = random_numbers(60, 1).view({6, 10}).mul_(first_value);
  torch::Tensor expected = value.to(torch::kDouble);
  torch::Tensor average = torch::zeros_like(expected);
  torch::Tensor square = torch::zeros_like(expected);
  value.requires_grad_();
  Lamb lamb({value}, options);
  const auto [beta1, beta2] = options.betas();
  for (int64_t step = 0; step < kSteps; ++step) {
    value.mutable_grad() = gradient_of(step, {6, 10});
    lamb.step();
    const torch::Tensor gradient = gradient_of(step, {6, 10}).to(torch::kDouble);
    average = beta1 * average + (1 - beta1) * gradient;
    square = beta2 * square + (1 - beta2) * gradient * gradient;
    const auto made = static_cast<double>(step + 1);
    const torch::Tensor direction =
        average / (1 - std::pow(beta1, made)) /
            ((square / (1 - std::pow(beta2, made))).sqrt() + options.eps()) +
        options.weight_decay() * expected;
    double ratio = 1;
    if (options.trust_ratio() && expected.norm().item<double>() > 0) {
      ratio = (expected.norm() / direction.norm()).item<double>();
    }
    expected = expected - options.lr() * ratio * direction;
  }
  EXPECT_LT(relative_error(expected, value.detach()), 1e-6);
}

TEST(LambTest, HasTheFormulasValuesAfterTenSteps) {
  expect_lamb(LambOptions(0.02), 1);
  expect_lamb(LambOptions(0.02).trust_ratio(false), 1);
  // Its norm is 0, and the ratio 1.
  expect_lamb(LambOptions(0.02).weight_decay(0), 0);
}

}  // namespace
}  // namespace zeropage::muon_test
