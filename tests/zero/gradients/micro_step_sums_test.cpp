#include "zero/gradients/micro_step_sums.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "zeropage/ledger.h"

namespace zeropage::zero::micro_step_sums_test {
namespace {

constexpr int64_t kNumel = 1000;
constexpr size_t kMostTerms = 17;

// Terms of magnitudes so different that every order of additions has bits of its own.
std::vector<torch::Tensor> terms(size_t count) {
  auto generator = at::detail::createCPUGenerator(11);
  std::vector<torch::Tensor> made;
  for (size_t term = 0; term < count; ++term) {
    made.push_back(torch::randn({kNumel}, generator) *
                   torch::exp(4 * torch::randn({kNumel}, generator)));
  }
  return made;
}

// The pairwise tree over [low, high): the left half is the largest power of two below.
torch::Tensor tree(const std::vector<torch::Tensor>& of, size_t low, size_t high) {
  if (high - low == 1) return of[low];
  size_t half = 1;
  while (half * 2 < high - low) half *= 2;
  return tree(of, low, low + half) + tree(of, low + half, high);
}

torch::Tensor running(const std::vector<torch::Tensor>& of) {
  torch::Tensor sum = of[0].clone();
  for (size_t term = 1; term < of.size(); ++term) sum += of[term];
  return sum;
}

torch::Tensor sum_of(MicroStepSums& sums, const std::vector<torch::Tensor>& of) {
  for (size_t term = 0; term + 1 < of.size(); ++term) sums.push(of[term]);
  const torch::Tensor last = of.back().clone();
  sums.add_to(last);
  return last;
}

TEST(MicroStepSumsTest, AddInThePairwiseTreeForAnyNumberOfTerms) {
  for (size_t count = 1; count <= kMostTerms; ++count) {
    const auto of = terms(count);
    MicroStepSums sums(SumOrder::kTree);
    EXPECT_TRUE(torch::equal(sum_of(sums, of), tree(of, 0, count))) << count;
  }
}

TEST(MicroStepSumsTest, AddOneAfterTheOtherInRunningOrder) {
  for (size_t count = 1; count <= kMostTerms; ++count) {
    const auto of = terms(count);
    MicroStepSums sums(SumOrder::kRunning);
    EXPECT_TRUE(torch::equal(sum_of(sums, of), running(of))) << count;
  }
}

TEST(MicroStepSumsTest, HaveOtherBitsInTheOtherOrder) {
  for (const size_t count : {4, 7, 17}) {
    const auto of = terms(count);
    EXPECT_FALSE(torch::equal(tree(of, 0, count), running(of))) << count;
  }
}

TEST(MicroStepSumsTest, SetAsideOneTensorForEachBinaryDigitThatIsOne) {
  const memory::LedgerScope scope(std::make_shared<memory::Ledger>("sums"));
  const memory::Ledger& ledger = *memory::Ledger::current();
  const auto of = terms(kMostTerms);
  const auto held = [&] { return ledger.now()[memory::Kind::kGradient]; };
  constexpr int64_t kTermBytes = kNumel * 4;
  MicroStepSums in_tree(SumOrder::kTree);
  MicroStepSums in_running(SumOrder::kRunning);
  const memory::KindScope kind(memory::Kind::kGradient);
  for (size_t pushed = 1; pushed <= kMostTerms; ++pushed) {
    int64_t before = held();
    in_running.push(of[pushed - 1]);
    EXPECT_EQ(held() - before, pushed == 1 ? kTermBytes : 0) << pushed;
    before = held();
    in_tree.push(of[pushed - 1]);
    const int tensors = __builtin_popcountll(pushed);
    EXPECT_EQ(held() - before, (tensors - __builtin_popcountll(pushed - 1)) * kTermBytes) << pushed;
    EXPECT_EQ(held(), (1 + tensors) * kTermBytes) << pushed;
  }
  in_tree.clear();
  in_running.add_to(of[0]);
  EXPECT_EQ(held(), 0);
}

class MicroStepSumsOfOrderTest : public ::testing::TestWithParam<SumOrder> {
 protected:
  MicroStepSums sums_{GetParam()};
};

TEST_P(MicroStepSumsOfOrderTest, AreEmptyUntilATermIsPushedAndAfterTheyWereAdded) {
  EXPECT_TRUE(sums_.empty());
  sums_.push(torch::ones({3}));
  EXPECT_FALSE(sums_.empty());
  sums_.add_to(torch::ones({3}));
  EXPECT_TRUE(sums_.empty());
  const torch::Tensor last = torch::ones({3});
  sums_.add_to(last);
  EXPECT_TRUE(last.eq(1).all().item<bool>()) << "nothing was pushed since";
}

TEST_P(MicroStepSumsOfOrderTest, DoNotSeeWhatTermsBecomeAfterThePush) {
  const torch::Tensor term = torch::ones({3});
  for (int pushed = 0; pushed < 5; ++pushed) {
    term.fill_(1 << pushed);
    sums_.push(term);
    term.fill_(1000);
  }
  const torch::Tensor last = torch::zeros({3});
  sums_.add_to(last);
  EXPECT_TRUE(last.eq(31).all().item<bool>()) << last;
}

TEST_P(MicroStepSumsOfOrderTest, ForgetARangeInAllThatWasPushedAndNothingElse) {
  for (int pushed = 0; pushed < 3; ++pushed) sums_.push(torch::ones({6}));
  sums_.zero(2, 3);
  sums_.push(torch::ones({6}));
  const torch::Tensor last = torch::zeros({6});
  sums_.add_to(last);
  EXPECT_TRUE(torch::equal(last, torch::tensor({4.F, 4.F, 1.F, 1.F, 1.F, 4.F}))) << last;
}

TEST_P(MicroStepSumsOfOrderTest, BeginAnewAfterClear) {
  const auto of = terms(6);
  for (const torch::Tensor& term : terms(3)) sums_.push(term);
  sums_.clear();
  EXPECT_TRUE(sums_.empty());
  const torch::Tensor expected =
      GetParam() == SumOrder::kTree ? tree(of, 0, of.size()) : running(of);
  EXPECT_TRUE(torch::equal(sum_of(sums_, of), expected));
}

INSTANTIATE_TEST_SUITE_P(Orders, MicroStepSumsOfOrderTest,
                         ::testing::Values(SumOrder::kRunning, SumOrder::kTree),
                         [](const auto& info) {
                           return info.param == SumOrder::kTree ? "Tree" : "Running";
                         });

}  // namespace
}  // namespace zeropage::zero::micro_step_sums_test
