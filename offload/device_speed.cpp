#include "offload/device_speed.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <unistd.h>
#include <vector>

#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::offload {
namespace {

using Clock = std::chrono::steady_clock;
using memory::operator""_MiB;

constexpr int64_t kRecordBytes = 16_MiB;
constexpr double kSecondsADay = 86400;

// Starts one record after the other, two at once, until all have ended or the time is up. Bytes a
// second.
template <typename Start>
double speed_of(const NvmeFile& file, double seconds, const Start& start_one) {
  const auto begun = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begun).count(); };
  std::array<memory::Pending, 2> in_flight;
  int64_t bytes = 0;
  for (size_t record = 0; record < file.records(); ++record) {
    in_flight[record % 2].wait();
    if (record >= 2 && elapsed() > seconds) break;
    in_flight[record % 2] = start_one(record, record % 2);
    bytes += file.buffer_bytes(record);
  }
  for (const memory::Pending& pending : in_flight) pending.wait();
  return static_cast<double>(bytes) / elapsed();
}

std::string in_words(double value, const char* unit) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.3g %s", value, unit);
  return text.data();
}

std::string bytes_of(double bytes) {
  return memory::format_bytes(static_cast<int64_t>(bytes));
}

}  // namespace

DeviceSpeed measure(const std::string& directory, int64_t bytes, double seconds) {
  ZP_CHECK(bytes >= kNvmeAlignment && seconds > 0, "measure: expected bytes of ", kNvmeAlignment,
           " or more and seconds above 0, got ", bytes, " and ", seconds);
  std::vector<int64_t> record_bytes(static_cast<size_t>(bytes / kRecordBytes), kRecordBytes);
  if (bytes % kRecordBytes != 0) record_bytes.push_back(bytes % kRecordBytes);
  NvmeFileOptions options;
  options.directory = directory;
  // Each process and each call measures for itself.
  options.name = c10::str("speed-", ::getpid(), "-", Clock::now().time_since_epoch().count());
  options.owner = "a measurement of the device";
  options.host_bytes_allowed = 0;
  NvmeFile file(options, record_bytes);
  std::array<at::Tensor, 2> buffers;
  for (at::Tensor& buffer : buffers) {
    buffer = make_buffer(file.largest_buffer_bytes());
    buffer.random_(0, 256);  // some devices write zeros for nothing
  }
  size_t written = 0;
  DeviceSpeed speed;
  speed.engine = file.describe();
  speed.write_bytes_per_second = speed_of(file, seconds / 2, [&](size_t record, size_t buffer) {
    written = record + 1;
    return file.start_write(record, buffers[buffer]);
  });
  speed.read_bytes_per_second = speed_of(file, seconds / 2, [&](size_t record, size_t buffer) {
    return file.start_read(record % written, buffers[buffer]);
  });
  return speed;
}

StepForecast forecast(const DeviceSpeed& speed, int64_t state_bytes, double compute_seconds) {
  ZP_CHECK(speed.read_bytes_per_second > 0 && speed.write_bytes_per_second > 0 &&
               state_bytes >= 0 && compute_seconds >= 0,
           "forecast: expected speeds above 0 and no negative bytes or seconds");
  StepForecast forecast;
  forecast.read_seconds = static_cast<double>(state_bytes) / speed.read_bytes_per_second;
  forecast.write_seconds = static_cast<double>(state_bytes) / speed.write_bytes_per_second;
  forecast.step_seconds = std::max(forecast.read_seconds + forecast.write_seconds, compute_seconds);
  if (forecast.step_seconds > 0) {
    forecast.bytes_written_a_day =
        static_cast<double>(state_bytes) * kSecondsADay / forecast.step_seconds;
  }
  return forecast;
}

std::string to_string(const DeviceSpeed& speed, int64_t state_bytes, const StepForecast& forecast) {
  return c10::str(memory::format_bytes(state_bytes),
                  " are read and written a step: ", in_words(forecast.read_seconds, "s"), " at ",
                  bytes_of(speed.read_bytes_per_second), "/s and ",
                  in_words(forecast.write_seconds, "s"), " at ",
                  bytes_of(speed.write_bytes_per_second), "/s, a step of ",
                  in_words(forecast.step_seconds, "s"), " or more; ",
                  bytes_of(forecast.bytes_written_a_day), " a day are written");
}

}  // namespace zeropage::offload
