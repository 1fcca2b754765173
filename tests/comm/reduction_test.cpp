#include <cmath>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "comm/devices/device_reduction.h"
#include "zeropage/communicator.h"

namespace zeropage::comm::reduction_test {
namespace {

// The tree of the header's definition, with LibTorch's own arithmetic.
torch::Tensor tree(const std::vector<torch::Tensor>& values, size_t low, size_t high) {
  if (high - low == 1) return values[low];
  size_t half = 1;
  while (half * 2 < high - low) half *= 2;
  return tree(values, low, low + half) + tree(values, low + half, high);
}

torch::Tensor reduce(const std::vector<torch::Tensor>& values, ReduceOp op) {
  std::vector<const void*> pointers;
  for (const auto& value : values) pointers.push_back(value.const_data_ptr());
  auto out = torch::empty_like(values.front());
  reduce_in_rank_order(pointers, out.mutable_data_ptr(), out.numel(), out.scalar_type(), op);
  return out;
}

class ReductionTest : public ::testing::TestWithParam<int> {
 protected:
  std::vector<torch::Tensor> random(torch::ScalarType dtype, int64_t numel = 2500) const {
    torch::manual_seed(GetParam());
    std::vector<torch::Tensor> values;
    for (int rank = 0; rank < GetParam(); ++rank) values.push_back(torch::randn({numel}).to(dtype));
    return values;
  }
};

TEST_P(ReductionTest, AddsAsATreeInRankOrder) {
  const auto values = random(torch::kFloat32);
  EXPECT_TRUE(torch::equal(reduce(values, ReduceOp::kSum), tree(values, 0, values.size())));
}

TEST_P(ReductionTest, DividesOnceAfterTheSum) {
  const auto values = random(torch::kFloat32);
  EXPECT_TRUE(
      torch::equal(reduce(values, ReduceOp::kMean), tree(values, 0, values.size()) / GetParam()));
}

TEST_P(ReductionTest, GivesAnElementTheSameBitsWhereverItLies) {
  const auto values = random(torch::kFloat32);
  const auto whole = reduce(values, ReduceOp::kMean);
  for (const int64_t begin : {1, 17, 1023, 1024, 2000}) {
    std::vector<torch::Tensor> parts;
    for (const auto& value : values) parts.push_back(value.slice(0, begin).clone());
    EXPECT_TRUE(torch::equal(reduce(parts, ReduceOp::kMean), whole.slice(0, begin))) << begin;
  }
}

TEST_P(ReductionTest, RoundsLowPrecisionOnlyOnce) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const auto values = random(dtype);
    std::vector<torch::Tensor> wide;
    for (const auto& value : values) wide.push_back(value.to(torch::kFloat32));
    EXPECT_TRUE(torch::equal(reduce(values, ReduceOp::kSum), tree(wide, 0, wide.size()).to(dtype)));
  }
}

TEST_P(ReductionTest, TakesTheLargestAndTheSmallest) {
  auto values = random(torch::kFloat64);
  EXPECT_TRUE(
      torch::equal(reduce(values, ReduceOp::kMax), std::get<0>(torch::stack(values).max(0))));
  EXPECT_TRUE(
      torch::equal(reduce(values, ReduceOp::kMin), std::get<0>(torch::stack(values).min(0))));
  values.back()[7] = NAN;
  EXPECT_TRUE(std::isnan(reduce(values, ReduceOp::kMax)[7].item<double>()));
  EXPECT_TRUE(std::isnan(reduce(values, ReduceOp::kMin)[7].item<double>()));
}

TEST_P(ReductionTest, AddsIntegersExactly) {
  std::vector<torch::Tensor> values;
  for (int rank = 0; rank < GetParam(); ++rank) {
    values.push_back(torch::full({5}, (int64_t{1} << 53) + rank, torch::kInt64));
  }
  EXPECT_TRUE(torch::equal(reduce(values, ReduceOp::kSum), torch::stack(values).sum(0)));
}

TEST_P(ReductionTest, MayWriteIntoAContribution) {
  const auto values = random(torch::kFloat32);
  const auto expected = tree(values, 0, values.size());
  std::vector<const void*> pointers;
  for (const auto& value : values) pointers.push_back(value.const_data_ptr());
  reduce_in_rank_order(pointers, values.back().mutable_data_ptr(), expected.numel(),
                       torch::kFloat32, ReduceOp::kSum);
  EXPECT_TRUE(torch::equal(values.back(), expected));
}

// The ranks of two hosts each bring together what they can; the whole has the bits of one reduction.
TEST_P(ReductionTest, OperatorsOnADeviceGiveTheSameBits) {
  const detail::Divisor divisor(GetParam(), torch::kCPU);
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kHalf,
                           torch::kInt64, torch::kInt32}) {
    std::vector<torch::Tensor> values;
    for (const auto& value : random(torch::kFloat32)) values.push_back((value * 1000).to(dtype));
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax}) {
      const auto contributions = torch::cat(values);
      const auto out = contributions.narrow(0, 0, values.front().numel());
      detail::reduce_in_rank_order(contributions, GetParam(), out, op, divisor);
      EXPECT_TRUE(torch::equal(out, reduce(values, op))) << dtype << static_cast<int>(op);
    }
  }
}

TEST_P(ReductionTest, CombinesPartialsOfSubtreesToTheSameBits) {
  const int size = GetParam();
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kHalf, torch::kFloat64}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax}) {
      const auto values = random(dtype);
      for (int split = 0; split <= size; ++split) {
        std::vector<std::vector<int>> hosts(2);
        for (int rank = 0; rank < size; ++rank) hosts[rank < split ? 0 : 1].push_back(rank);
        std::vector<torch::Tensor> accumulators;
        std::vector<Partial> partials;
        for (const auto& ranks : hosts) {
          for (const RankRange& subtree : maximal_subtrees(ranks, size)) {
            std::vector<const void*> pointers;
            for (int rank = subtree.begin; rank < subtree.end; ++rank) {
              pointers.push_back(values[static_cast<size_t>(rank)].const_data_ptr());
            }
            if (subtree.size() == 1) {
              partials.push_back({subtree, pointers.front()});
              continue;
            }
            accumulators.push_back(torch::empty({values[0].numel()}, accumulator_of(dtype)));
            reduce_to_accumulators(pointers, accumulators.back().mutable_data_ptr(),
                                   values[0].numel(), dtype, op);
            partials.push_back({subtree, accumulators.back().const_data_ptr()});
          }
        }
        auto out = torch::empty_like(values[0]);
        combine_in_rank_order(partials, out.mutable_data_ptr(), out.numel(), dtype, op);
        EXPECT_TRUE(torch::equal(out, reduce(values, op))) << split << " of " << size;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ReductionTest, ::testing::Values(1, 2, 3, 4, 5, 7, 8));

TEST(ReductionDtypeTest, AddsEightRanksOfBfloat16ToHalfAUnitInTheLastPlace) {
  constexpr int64_t kNumel = 1 << 20;
  auto generator = at::detail::createCPUGenerator(/*seed=*/8);
  std::vector<torch::Tensor> values;
  std::vector<const void*> pointers;
  for (int rank = 0; rank < 8; ++rank) {
    values.push_back(torch::randn({kNumel}, generator).to(torch::kBFloat16));
    pointers.push_back(values.back().const_data_ptr());
  }
  const auto sum = torch::empty({kNumel}, torch::kBFloat16);
  reduce_in_rank_order(pointers, sum.mutable_data_ptr(), kNumel, torch::kBFloat16, ReduceOp::kSum);
  const auto exact = torch::stack(values).to(torch::kFloat64).sum(0);
  // bfloat16 has 8 significant bits: its unit in the last place at [2^e, 2^(e+1)) is 2^(e-7).
  const auto ulp = torch::exp2(torch::floor(torch::log2(exact.abs().clamp_min(1e-30))) - 7);
  EXPECT_LE(((sum.to(torch::kFloat64) - exact).abs() / ulp).max().item<double>(), 0.5);
}

TEST(ReductionDtypeTest, RefusesWhatCannotBeAdded) {
  const bool value = true;
  const void* pointer = &value;
  bool out = false;
  EXPECT_THROW(reduce_in_rank_order({&pointer, 1}, &out, 1, torch::kBool, ReduceOp::kSum),
               c10::Error);
}

TEST(MaximalSubtreesTest, AreWholeWhereTheRanksArePowersOfTwoInARow) {
  EXPECT_EQ(maximal_subtrees(std::vector<int>{4, 5, 6, 7}, 8), (std::vector<RankRange>{{4, 8}}));
  EXPECT_EQ(maximal_subtrees(std::vector<int>{0, 1, 2, 3, 4, 5, 6}, 7),
            (std::vector<RankRange>{{0, 7}}));
}

TEST(MaximalSubtreesTest, PartWhereTheTreeDoes) {
  // ((0 1)(2 3))((4 5) 6)
  EXPECT_EQ(maximal_subtrees(std::vector<int>{1, 2, 3, 4}, 7),
            (std::vector<RankRange>{{1, 2}, {2, 4}, {4, 5}}));
  EXPECT_EQ(maximal_subtrees(std::vector<int>{4, 5, 6}, 7), (std::vector<RankRange>{{4, 7}}));
  EXPECT_EQ(maximal_subtrees(std::vector<int>{0, 2, 4, 6}, 7),
            (std::vector<RankRange>{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_TRUE(maximal_subtrees(std::vector<int>{}, 7).empty());
}

}  // namespace
}  // namespace zeropage::comm::reduction_test
