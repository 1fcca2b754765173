// What lines of progress are made of.
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "examples/progress/told_if_slow.h"
#include "examples/progress/words.h"

namespace zeropage::progress_test {
namespace {

using examples::duration;
using examples::fixed;
using examples::line_of;

TEST(ProgressTest, TellsTimeThatIsNeverNegative) {
  EXPECT_EQ(duration(59.4), "59s");
  EXPECT_EQ(duration(200), "3m 20s");
  EXPECT_EQ(duration(45'900), "12h 45m");
  EXPECT_EQ(duration(-3), "0s");
  EXPECT_EQ(duration(NAN), "?");
  EXPECT_EQ(duration(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(duration(1e300), "?");
}

TEST(ProgressTest, WritesALossThatDivergedInFewDigits) {
  EXPECT_EQ(fixed(3.2640219, 4), "3.2640");
  EXPECT_EQ(fixed(-0.5, 2), "-0.50");
  EXPECT_EQ(fixed(1.7976931348623157e308, 4), "1.798e+308");
  EXPECT_EQ(fixed(-1e30, 4), "-1e+30");
  EXPECT_EQ(fixed(NAN, 4), "nan");
}

TEST(ProgressTest, MakesLinesThatATerminalOf80ColumnsCanReplace) {
  EXPECT_EQ(line_of({"epoch 1/2", "loss 2.3", "4s left"}), "epoch 1/2, loss 2.3, 4s left");
  const std::string all = line_of({"epoch 1000/1000 step 123456/123456", "loss 6.1234",
                                   "top-1 12.34 %", "123h 45m left", "12345.6 images/s", "rate 1"});
  EXPECT_EQ(all, "epoch 1000/1000 step 123456/123456, loss 6.1234, top-1 12.34 %, 123h 45m left");
  EXPECT_LT(all.size(), 80U);
}

TEST(ProgressTest, TellsOfWhatIsSlowAndNotOfWhatIsFast) {
  std::atomic<int> told = 0;
  {
    const examples::ToldIfSlow slow(std::chrono::milliseconds(1), [&] { ++told; });
    while (told == 0) std::this_thread::yield();
  }
  EXPECT_EQ(told, 1);
  {
    const examples::ToldIfSlow fast(std::chrono::hours(1), [&] { ++told; });
  }
  EXPECT_EQ(told, 1);
}

}  // namespace
}  // namespace zeropage::progress_test
