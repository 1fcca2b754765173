// What programs of release 0.1 wrote still builds, and is the same.
#include <type_traits>

#include "tests/harness/ranks.h"
#include "zero/zeropage.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace zeropage::old_names_test {
namespace {

TEST(OldNamesTest, DataParallelIsTheDistributedOne) {
  static_assert(
      std::is_same_v<DataParallel<torch::nn::Linear>, DistributedDataParallel<torch::nn::Linear>>);
  static_assert(std::is_same_v<DataParallelBase, DistributedDataParallelBase>);
}

TEST(OldNamesTest, TheModuleOfADataParallelIsDeduced) {
  testing::run_ranks(1, [](World& world) {
    DataParallel model(torch::nn::Linear(3, 2), world);
    EXPECT_EQ(model(torch::ones({4, 3})).size(1), 2);
  });
}

TEST(OldNamesTest, OffloadAndItsOptionsAreThoseOfTheirSubject) {
  static_assert(std::is_same_v<Offload, OffloadOptions>);
  static_assert(std::is_same_v<checkpointing::OffloadOptions, ActivationOffloadOptions>);
  static_assert(std::is_same_v<checkpointing::OffloadStatistics, ActivationOffloadStatistics>);
}

TEST(OldNamesTest, ARecomputeScopeIsAnActivationScope) {
  static_assert(std::is_same_v<RecomputeScope, checkpointing::RecomputeScope>);
  Recompute recompute(RecomputeOptions::selective());
  const auto x = torch::ones({64, 64}).requires_grad_();
  torch::Tensor loss;
  {
    const RecomputeScope forward(recompute);
    EXPECT_FALSE(RecomputeScope::decides_alone());
    loss = x.sin().sin().sum();
  }
  loss.backward();
  EXPECT_GT(recompute.statistics().replays, 0);
}

TEST(OldNamesTest, WholeBelowIsTheMinimumSizeOfWhatIsSharded) {
  Options old_name, new_name;
  old_name.whole_below_bytes = 4_KiB;
  new_name.minimum_sharded_bytes = 4_KiB;
  EXPECT_EQ(describe(old_name), describe(new_name));
  EXPECT_NE(describe(old_name), describe(Options()));
}

TEST(OldNamesTest, NamesOfFoldersAreThoseOfZeropage) {
  static_assert(std::is_same_v<World, comm::World>);
  static_assert(std::is_same_v<Ledger, memory::Ledger>);
  static_assert(std::is_same_v<ActivationOffload, checkpointing::ActivationOffload>);
  EXPECT_EQ(2_MiB, int64_t{2} << 20);
}

}  // namespace
}  // namespace zeropage::old_names_test
