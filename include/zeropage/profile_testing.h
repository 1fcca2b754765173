// Expectations on the growth of memory over steps.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <gtest/gtest.h>

// Finds what calls of a function leave behind (zeropage/profile_testing.h).

namespace zeropage::profile {

// Calls `step` once to let it make what stays, and then `steps` times, which must be 3 or more. Returns a line for
// everything that the calling thread's ledger holds more of after each of them, with its owner; "": nothing. Throws
// for fewer steps, and what `step` throws.
std::string growth_over(int64_t steps, const std::function<void()>& step);

// Expectations about what a training loop holds from step to step, for GoogleTest.
//
//   EXPECT_NO_GROWTH(5, [&] { train_step(model, optimizer); });
//
// zeropage/testing.h has EXPECT_PEAK_BYTES_LE for the peak of a step.
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
