// How fast a directory's device reads and writes by the engine of NvmeFile, and what a step will take with it: to
// say before a run what it will cost.
//
// Throws: what NvmeFile's constructor does, and an error of the device.
#pragma once

#include <cstdint>
#include <string>

#include "offload/nvme_file.h"

namespace zeropage::offload {

struct DeviceSpeed {
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  std::string engine;  // how: NvmeFile::describe()
};

// Writes a file of `bytes`, in records of a few MiB, and reads it, each for half of `seconds` at
// most; where the page cache is in the way, these are its figures, and `engine` says so. Virtual
// disks may give less for longer.
DeviceSpeed measure(const std::string& directory, int64_t bytes = int64_t{256} << 20,
                    double seconds = 1);

struct StepForecast {
  double read_seconds = 0;   // of the state, once
  double write_seconds = 0;  // likewise
  double step_seconds = 0;   // with what is computed; reading and writing share the device
  double bytes_written_a_day = 0;
};
// state_bytes: read and written once a step. compute_seconds: of a step without any of it, which
// runs beside.
StepForecast forecast(const DeviceSpeed& speed, int64_t state_bytes, double compute_seconds);

// "6.00 GiB are read and written a step: 3.1 s at 2.0 GiB/s and 1.2 s at 5.0 GiB/s, a step of 4.3 s
// or more; 118.0 TiB a day are written".
std::string to_string(const DeviceSpeed& speed, int64_t state_bytes, const StepForecast& forecast);

}  // namespace zeropage::offload
