// Expectations about what a training loop holds from step to step, for GoogleTest.
//
//   EXPECT_NO_GROWTH(5, [&] { train_step(model, optimizer); });
//
// memory/testing.h has EXPECT_PEAK_BYTES_LE for the peak of a step.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "profile/growth_over.h"

namespace zeropage::profile {

inline ::testing::AssertionResult does_not_grow(int64_t steps, const std::function<void()>& step) {
  const std::string growth = growth_over(steps, step);
  if (growth.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << growth;
}

}  // namespace zeropage::profile

// The ledger of the calling thread holds nothing more of after each of `steps` calls of the function, which are
// 3 or more. The failure names what grew, and who allocated it for which page.
#define EXPECT_NO_GROWTH(steps, ...) \
  EXPECT_TRUE(::zeropage::profile::does_not_grow(steps, __VA_ARGS__))
