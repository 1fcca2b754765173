// fit() below 28 limits: what it chooses trains below them.
#include <array>
#include <cstdio>
#include <mutex>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/limited_models.h"
#include "tests/harness/ranks.h"
#include "zeropage/bytes.h"
#include "zeropage/fit.h"
#include "zeropage/zeropage.h"

namespace zeropage::fitted_limits_test {
namespace {

using namespace memory;
using testing::LimitedModel;
using testing::Net;

constexpr int64_t kBatch = 8;

struct Outcome {
  int64_t peak_bytes = 0;  // of the rank that held most
  std::string chosen;
  std::string error;
};

// Below a limit, as fit() chooses; plainly without one.
Outcome train(const LimitedModel& given, int ranks, int64_t limit_bytes) {
  Outcome outcome;
  std::mutex mutex;
  const auto run = [&](comm::World& world) {
    const auto construct = [&] {
      const std::lock_guard lock(mutex);
      torch::manual_seed(1);
      return given.make();
    };
    const torch::Tensor samples = given.samples.narrow(0, 0, kBatch).clone();
    const torch::Tensor targets = given.targets.narrow(0, 0, kBatch).clone();
    Fitted fitted;
    fitted.options.stage = stage_of(0);
    fitted.options.device_memory_bytes = limit_bytes;
    if (limit_bytes > 0) {
      fitted = fit(construct, samples, targets, testing::class_loss, world, fitted.options);
    }
    DistributedDataParallel<std::shared_ptr<Net>> model(
        DeferredModule<std::shared_ptr<Net>>(construct), world, fitted.options);
    Optimizer<torch::optim::AdamW> optimizer(model);
    checkpointing::Recompute recompute = zeropage::recompute(model, fitted);
    Ledger::current()->reset_peak();
    for (int step = 0; step < 3; ++step) {
      torch::Tensor loss;
      {
        const checkpointing::ActivationScope forward(recompute);
        loss = testing::class_loss(model(samples), targets);
      }
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const std::lock_guard lock(mutex);
    outcome.chosen = fitted.description;
    outcome.peak_bytes = std::max(outcome.peak_bytes, Ledger::current()->at_peak().total());
  };
  for (const std::exception_ptr& error : testing::try_ranks(ranks, run)) {
    if (outcome.error.empty()) outcome.error = testing::message_of(error);
  }
  return outcome;
}

TEST(FittedLimitsTest, AreNeverPassed) {
  int limits = 0, kept = 0, refused = 0;
  for (const LimitedModel& model : testing::limited_models()) {
    for (const int percent : {86, 89, 92, 94, 97, 100, 104}) {
      const int ranks = 1 + limits % 2;
      ++limits;
      const int64_t roomy = train(model, ranks, Options::kNoLimit).peak_bytes;
      const int64_t limit = roomy * percent / 100;
      const Outcome outcome = train(model, ranks, limit);
      EXPECT_LE(outcome.peak_bytes, limit) << outcome.chosen;
      // What nothing fits below is refused before the first step.
      if (!outcome.error.empty()) {
        EXPECT_THAT(outcome.error, ::testing::HasSubstr("no setting keeps below the limits"));
        ++refused;
        continue;
      }
      if (outcome.peak_bytes <= limit) ++kept;
      std::printf("%s, %d ranks, %d %% of %s: %.1f %% of the limit by %s\n", model.name, ranks,
                  percent, format_bytes(roomy).c_str(),
                  100.0 * static_cast<double>(outcome.peak_bytes) / static_cast<double>(limit),
                  outcome.chosen.c_str());
    }
  }
  std::printf("%d of %d limits are kept, and below %d nothing fits\n", kept, limits, refused);
  EXPECT_EQ(kept + refused, limits);
  EXPECT_LE(refused, 6);
  EXPECT_EQ(limits, 28);
}

}  // namespace
}  // namespace zeropage::fitted_limits_test
