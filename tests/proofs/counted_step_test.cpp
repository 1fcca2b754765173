// What a step asks of an accelerator stays what it is: bounds that a change must not pass unnoticed.
#include "tests/proofs/counted_step.h"

#include <gtest/gtest.h>

#include "tests/harness/fake_accelerator/fake_accelerator.h"

namespace zeropage::counted_step_test {
namespace {

using namespace zeropage::testing;

struct Bound {
  int stage;
  int64_t micro_steps;
  double launches;
  double host_waits;
};

class CountedStepTest : public ::testing::TestWithParam<Bound> {
 protected:
  CountedStepTest() { register_fake_accelerator(); }
};

TEST_P(CountedStepTest, LaunchesAndWaitsNoMoreThanItDid) {
  const Bound& bound = GetParam();
  const StepEvents events = count_step({.layers = 4,
                                        .width = 32,
                                        .stage = bound.stage,
                                        .ranks = 2,
                                        .micro_steps = bound.micro_steps});
  EXPECT_LE(events.total().launches, bound.launches);
  EXPECT_LE(events.total().host_waits, bound.host_waits);
  // Else it looked at a training that does nothing.
  EXPECT_GE(events.total().launches, static_cast<double>(events.tensors));
}

INSTANTIATE_TEST_SUITE_P(StagesAndAccumulators, CountedStepTest,
                         ::testing::Values(Bound{0, 0, 225, 1}, Bound{0, 1, 635, 2},
                                           Bound{1, 0, 223, 2}, Bound{1, 1, 575, 3},
                                           Bound{2, 0, 220, 1}, Bound{2, 1, 570, 2},
                                           Bound{3, 0, 234, 1}, Bound{3, 1, 582, 2}),
                         [](const auto& info) {
                           return c10::str("Stage", info.param.stage,
                                           info.param.micro_steps > 0 ? "Accumulated" : "Plain");
                         });

}  // namespace
}  // namespace zeropage::counted_step_test
