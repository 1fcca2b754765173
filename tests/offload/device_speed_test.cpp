#include "offload/device_speed.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"

namespace zeropage::offload::device_speed_test {
namespace {

using ::testing::HasSubstr;

TEST(DeviceSpeedTest, MeasuresTheDirectoryAndLeavesNothing) {
  const std::string folder = std::filesystem::current_path() / "speed-test";
  std::filesystem::create_directory(folder);
  const DeviceSpeed speed = measure(folder, int64_t{20} << 20, 0.2);
  EXPECT_GT(speed.read_bytes_per_second, 1e6);
  EXPECT_GT(speed.write_bytes_per_second, 1e6);
  EXPECT_THAT(speed.engine, HasSubstr("2 records, 20.0 MiB"));
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove(folder);
  EXPECT_THAT(zeropage::testing::error_of([&] { measure(folder); }), HasSubstr("No such file"));
}

TEST(DeviceSpeedTest, AStepTakesTheLongerOfDeviceAndComputeAndWritesTheStateOnce) {
  const DeviceSpeed speed{.read_bytes_per_second = 200, .write_bytes_per_second = 100};
  const StepForecast bound_by_device = forecast(speed, 1000, 2);
  EXPECT_DOUBLE_EQ(bound_by_device.read_seconds, 5);
  EXPECT_DOUBLE_EQ(bound_by_device.write_seconds, 10);
  EXPECT_DOUBLE_EQ(bound_by_device.step_seconds, 15);
  EXPECT_DOUBLE_EQ(bound_by_device.bytes_written_a_day, 86400.0 / 15 * 1000);
  EXPECT_DOUBLE_EQ(forecast(speed, 1000, 20).step_seconds, 20);
  EXPECT_EQ(
      to_string(speed, 1000, bound_by_device),
      "1000 B are read and written a step: 5 s at 200 B/s and 10 s at 100 B/s, a step of 15 s "
      "or more; 5.5 MiB a day are written");
}

}  // namespace
}  // namespace zeropage::offload::device_speed_test
