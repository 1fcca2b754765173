// Overlap is right: with every operation late by a random time, and ranks of different speed, the
// bits stay the same.
#include <gtest/gtest.h>

#include "tests/harness/delays.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/zeropage.h"

namespace zeropage::overlap_delays_test {
namespace {

using namespace zeropage::testing;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int kRanks = 3;
constexpr int kSteps = 4;

Transformer make() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(11);
  return Transformer();
}

class OverlapDelaysTest : public ::testing::TestWithParam<int> {};

TEST_P(OverlapDelaysTest, SlowAndUnevenRanksComputeTheSameBits) {
  at::set_num_threads(1);
  const auto expected =
      train_reference<Transformer>(kRanks, kSteps, make, [](std::vector<torch::Tensor> parameters) {
        return std::make_unique<AdamW>(std::move(parameters), AdamWOptions(0.01));
      });
  Options options;
  options.update_by = UpdateBy::kClass;  // whose bits a plain run has
  options.stage = stage_of(GetParam());
  options.page_bytes = memory::operator""_KiB(4);  // many buckets in flight
  RankOptions delayed;
  delayed.decorate = [](std::unique_ptr<comm::Communicator> inner) {
    return std::make_unique<DelayedCommunicator>(std::move(inner), std::chrono::milliseconds(15));
  };
  run_ranks(
      kRanks,
      [&](comm::World& world) {
        DistributedDataParallel<Transformer> model(make(), world, options);
        Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
        for (int step = 0; step < kSteps; ++step) {
          const Samples samples = samples_of(world.rank(), step);
          std::this_thread::sleep_for(
              std::chrono::milliseconds(7 * ((world.rank() + step) % kRanks)));
          optimizer.zero_grad();
          auto outputs = model(samples.inputs);
          outputs.register_hook([&](torch::Tensor gradient) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5 * world.rank()));
            return gradient;
          });
          loss_of(outputs, samples).backward();
          optimizer.step();
        }
        EXPECT_TRUE(same_bits(expected, model.parameters())) << "rank " << world.rank();
      },
      delayed);
}

INSTANTIATE_TEST_SUITE_P(Stages, OverlapDelaysTest, ::testing::Values(0, 1, 2, 3));

}  // namespace
}  // namespace zeropage::overlap_delays_test
