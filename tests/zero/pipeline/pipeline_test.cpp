// Training over the stages of a pipeline: what it computes, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/zero/pipeline/pipeline_models.h"

namespace zeropage::pipeline_test {
namespace {

using namespace zeropage::pipeline_models;
using parallel::ScheduleKind;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::try_ranks;

// Compares what every rank says with a run without a pipeline.
void expect_same(const Outcome& expected, const std::vector<Outcome>& by_rank, double tolerance) {
  size_t seen = 0;
  for (const Outcome& actual : by_rank) {
    ASSERT_EQ(actual.losses.size(), expected.losses.size());
    for (size_t step = 0; step < expected.losses.size(); ++step) {
      const double loss = expected.losses[step], norm = expected.norms[step];
      EXPECT_LE(std::abs(actual.losses[step] - loss), tolerance * loss) << "step " << step;
      EXPECT_LE(std::abs(actual.norms[step] - norm), tolerance * norm) << "step " << step;
    }
    for (const auto& [name, values] : actual.weights) {
      ASSERT_TRUE(expected.weights.contains(name)) << name;
      if (tolerance == 0) {
        EXPECT_TRUE(torch::equal(values, expected.weights.at(name))) << name;
      }
      ++seen;
    }
  }
  EXPECT_GE(seen, expected.weights.size());
}

struct HowToRun {
  ScheduleKind schedule;
  int chunks;
};
constexpr HowToRun kSchedules[] = {{ScheduleKind::kGPipe, 1},
                                   {ScheduleKind::kOneForwardOneBackward, 1},
                                   {ScheduleKind::kInterleaved, 2}};

TEST(PipelineTest, HasTheBitsOfAsManyMicroStepsOnOneRankAtEveryStageAndSchedule) {
  constexpr int kSteps = 3;
  for (const int data : {1, 2}) {
    for (const int stage : {0, 1, 2, 3}) {
      const Outcome expected = train_whole({.data = data, .stage = stage}, kSteps);
      for (const auto& [schedule, chunks] : kSchedules) {
        const Shape shape{
            .pipeline = 2, .data = data, .stage = stage, .schedule = schedule, .chunks = chunks};
        SCOPED_TRACE(::testing::Message() << shape);
        expect_same(expected, train_pipeline_by_rank(shape, kSteps), 0);
      }
    }
  }
}

TEST(PipelineTest, ComputesTheSameLossesAndNormsOverEveryMesh) {
  constexpr int kSteps = 10;
  std::map<std::pair<int, Head>, Outcome> expected;
  int mesh = 0;
  for (const int ranks : {2, 4, 8}) {
    for (const int pipeline : {1, 2, 4}) {
      for (const int tensor : {1, 2}) {
        if (ranks % (pipeline * tensor) != 0) continue;
        // Stages, schedules and heads in turn, so that each meets each.
        Shape shape{.pipeline = pipeline,
                    .data = ranks / (pipeline * tensor),
                    .tensor = tensor,
                    .stage = mesh % 4};
        const HowToRun& how = kSchedules[mesh % 3];
        shape.schedule = how.schedule;
        shape.chunks = how.chunks;
        shape.head = mesh % 3 == 1 ? Head::kTied : Head::kOwn;
        ++mesh;
        SCOPED_TRACE(::testing::Message() << shape);
        auto& whole = expected[{shape.data, shape.head}];
        if (whole.losses.empty()) {
          whole = train_whole({.data = shape.data, .head = shape.head}, kSteps);
        }
        std::vector<Outcome> by_rank = train_pipeline_by_rank(shape, kSteps);
        expect_same(whole, by_rank, 1e-12);
      }
    }
  }
}

}  // namespace
}  // namespace zeropage::pipeline_test
