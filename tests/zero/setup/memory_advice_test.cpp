// What is advised where a step does not fit: only what makes it fit, the cheapest first.
#include "zero/setup/memory_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zeropage/bytes.h"

namespace zeropage::memory_advice_test {
namespace {

using namespace memory;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Phase = zero::StepFacts::Phase;

// Four pages of 1 MiB of fp32 on two ranks, with AdamW, whose forward of 8 samples took 16 MiB. The device has run out of
// memory in the loss, for which another 1 MiB was asked.
class MemoryAdviceTest : public ::testing::Test {
 protected:
  MemoryAdviceTest() {
    std::vector<zero::StorageSpec> storages;
    for (int64_t index = 0; index < kPages; ++index) {
      storages.push_back({.name = c10::str("layer", index), .numel = kPageNumel});
    }
    model_.places = zero::PlaceOfRank{.rank = 0, .ranks = 2};
    model_.layouts = zero::lay_out_pages(storages, {.world_size = 2, .page_bytes = 1_MiB});
    model_.options.stage = stage_of(0);
    facts_ = {.phase = Phase::kEnded, .samples = 8, .states = 2};
    shortage_.request = {.device = c10::kCUDA,
                         .kind = Kind::kActivation,
                         .asked_bytes = 1_MiB,
                         .missing_bytes = 1_MiB};
    shortage_.on_device[Kind::kParameter] = 4_MiB;
    shortage_.on_device[Kind::kOptimizerState] = 8_MiB;
    shortage_.on_device[Kind::kActivation] = shortage_.activation_peak = 16_MiB;
  }

  // At that limit.
  std::string advised(int64_t limit) {
    shortage_.request.missing_bytes =
        shortage_.held_bytes() + shortage_.request.asked_bytes - limit;
    return zero::advice_on_memory(model_, facts_, shortage_);
  }

  static constexpr int64_t kPages = 4;
  static constexpr int64_t kPageNumel = 1_MiB / 4;

  zero::LimitedModel model_;
  zero::StepFacts::Values facts_;
  MemoryShortage shortage_;
};

// 12 MiB of parameters and states, 4 of gradients, 2 while one is added, and 17 of activations.
TEST_F(MemoryAdviceTest, BeginsWithTheMicroBatchAndSaysThePeakOfTheStep) {
  const std::string text = advised(28_MiB);
  EXPECT_THAT(text, StartsWith("a step as it is needs about 35.0 MiB of 28.0 MiB (activations "
                               "counted as that step's were); what makes it fit, the cheapest "
                               "first:\n  micro-batch 8 -> 2 with accumulation 4: "));
  // Accumulation keeps another gradient: 22 MiB and a quarter of 17.
  EXPECT_THAT(text, HasSubstr("accumulation 4: 8.8 MiB less, a peak of about 26.2 MiB\n"));
}

TEST_F(MemoryAdviceTest, CountsTheMicroBatchesThatThereAreAlready) {
  facts_.micro_steps = 2;
  EXPECT_THAT(advised(32_MiB), HasSubstr("micro-batch 8 -> 4 with accumulation 4: "));
}

TEST_F(MemoryAdviceTest, NamesRecomputeOnlyWhereNothingIsRecomputed) {
  EXPECT_THAT(advised(34_MiB), HasSubstr("  recompute: zeropage::recompute(model, "
                                         "RecomputeOptions::budget("));
  facts_.recomputes = true;
  EXPECT_THAT(advised(34_MiB), Not(HasSubstr("recompute")));
}

TEST_F(MemoryAdviceTest, NamesHigherStagesOnly) {
  EXPECT_THAT(advised(32_MiB),
              AllOf(HasSubstr("  stage 1: "), HasSubstr("  stage 2: "), HasSubstr("  stage 3: ")));
  model_.options.stage = stage_of(2);
  EXPECT_THAT(advised(28_MiB), AllOf(Not(HasSubstr("stage 1")), Not(HasSubstr("stage 2"))));
  model_.options.stage = stage_of(3);
  EXPECT_THAT(advised(24_MiB), Not(HasSubstr("  stage 1")));
  // Whole gradients beside sharded parameters are no stage below 3.
  model_.options.stage = {.optimizer_state = true, .parameters = true};
  EXPECT_THAT(advised(24_MiB), AllOf(Not(HasSubstr("stage 1: ")), Not(HasSubstr("stage 2: "))));
}

TEST_F(MemoryAdviceTest, LeavesWhatAnOptimizerAloneCannotDo) {
  model_.is_wrapped = false;
  EXPECT_THAT(advised(32_MiB),
              AllOf(HasSubstr("stage 1: "), Not(HasSubstr("stage 2")), Not(HasSubstr("stage 3"))));
}

// On the host, where the device is the host, offload frees the device's limit and not the host's.
TEST_F(MemoryAdviceTest, CountsWhatIsOffloadedAgainstTheHostsLimitAlone) {
  model_.device_is_host = true;
  shortage_.request.device = c10::kCPU;
  const std::string offload = "  options.offload.optimizer = Tier::kHost: ";
  EXPECT_THAT(advised(32_MiB), HasSubstr(offload));
  shortage_.request.counts_host_tier = true;
  EXPECT_THAT(advised(32_MiB), Not(HasSubstr(offload)));
}

TEST_F(MemoryAdviceTest, KeepsTheHostsLimitTooWhereTheDevicesWasPassed) {
  const std::string offload = "  options.offload.optimizer = Tier::kHost: ";
  EXPECT_THAT(advised(32_MiB), HasSubstr(offload));
  model_.limits.host_bytes = 1_MiB;
  EXPECT_THAT(advised(32_MiB), Not(HasSubstr(offload)));
}

TEST_F(MemoryAdviceTest, LeavesAnOptimizerThatCannotLeaveOnTheDevice) {
  facts_.optimizer_can_leave = false;
  EXPECT_THAT(advised(32_MiB), Not(HasSubstr("offload")));
}

TEST_F(MemoryAdviceTest, PutsChangesTogetherWhereNoneSufficesAlone) {
  facts_.optimizer_can_leave = false;
  facts_.recomputes = true;
  const std::string text = advised(16_MiB);
  EXPECT_THAT(text, HasSubstr("; no single change makes it fit, but together do, the cheapest "
                              "first:\n  micro-batch 8 -> "));
  EXPECT_THAT(text, HasSubstr(", and stage 2: "));
}

TEST_F(MemoryAdviceTest, SaysWhatIsTheLeastWhereNothingFits) {
  const std::string text = advised(2_MiB);
  EXPECT_THAT(text, HasSubstr("; nothing that keeps the results makes it fit: with micro-batch 8 "
                              "-> 1 with accumulation 8, recompute, "));
  EXPECT_THAT(text, HasSubstr(", the least, it needs about "));
  EXPECT_THAT(text, Not(HasSubstr("the cheapest first")));
}

TEST_F(MemoryAdviceTest, CountsMoreActivationsTheEarlierTheStepFailed) {
  const auto needed = [&] {
    const std::string text = advised(20_MiB);
    return text.substr(0, text.find(" of "));
  };
  EXPECT_EQ(needed(), "a step as it is needs about 35.0 MiB");
  facts_.phase = Phase::kLoss;
  EXPECT_EQ(needed(), "a step as it is needs about 39.2 MiB");
  facts_.phase = Phase::kForward;
  EXPECT_EQ(needed(), "a step as it is needs about 43.5 MiB");
  // A step has been seen whole, of as many samples.
  facts_.whole_samples = 8;
  facts_.whole_bytes = 18_MiB;
  EXPECT_EQ(needed(), "a step as it is needs about 36.0 MiB");
  // In that step 2 MiB were gradients of parameters, whatever the samples.
  facts_.whole_samples = 4;
  EXPECT_EQ(needed(), "a step as it is needs about 50.0 MiB");
}

// What was there before the forward does not shrink with the micro-batch.
TEST_F(MemoryAdviceTest, LeavesTheDataAsTheyAre) {
  EXPECT_THAT(advised(33_MiB), HasSubstr("micro-batch 8 -> 4 with"));
  facts_.besides_bytes = 8_MiB;
  EXPECT_THAT(advised(33_MiB), HasSubstr("micro-batch 8 -> 1 with"));
  EXPECT_THAT(advised(30_MiB), Not(HasSubstr("first:\n  micro-batch")));
}

TEST_F(MemoryAdviceTest, CutsABatchWhoseSizeIsNotKnown) {
  facts_.samples = 0;
  EXPECT_THAT(advised(32_MiB),
              HasSubstr("micro-batches of 1/2 of the samples with accumulation 2: "));
}

TEST_F(MemoryAdviceTest, SaysThatBatchNormsSeeFewerSamples) {
  facts_.has_batch_norm = true;
  EXPECT_THAT(advised(32_MiB),
              HasSubstr(" with accumulation 2 (batch norms then see fewer samples at once): "));
}

}  // namespace
}  // namespace zeropage::memory_advice_test
