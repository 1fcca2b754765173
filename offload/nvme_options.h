// What a file of records on NVMe may be asked for, and what it has done (offload/nvme_file.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "zeropage/ledger.h"

namespace zeropage::offload {

// Addresses and sizes that a device takes past the page cache.
inline constexpr int64_t kNvmeAlignment = 4096;

enum class NvmeEngine : uint8_t {
  kAutomatic,  // io_uring, or threads where the kernel refuses it; describe() says which and why
  kIoUring,    // throws where the kernel refuses it
  kThreads,    // pread and pwrite on a few threads
};

struct NvmeFileOptions {
  std::string directory;                   // exists, on a disk
  std::string name;                        // what its file there begins with; no other rank's
  std::string owner = "optimizer state";   // what the records are, for messages
  std::vector<std::string> record_names;   // for messages; empty: by number
  int64_t block_bytes = int64_t{2} << 20;  // of one operation and one checksum; multiple of 4096
  int queue_depth = 16;                    // operations at once
  NvmeEngine engine = NvmeEngine::kAutomatic;
  // The most host memory that records may take whose write fails. Unset: half of what is available
  // (MemAvailable) at that moment, 0: none.
  std::optional<int64_t> host_bytes_allowed;
  // What such records are on the ledger.
  memory::Kind kind = memory::Kind::kOptimizerState;
};

// Bytes are those that the device moved, with the padding of records to 4096 and with what was
// moved again after an error.
struct NvmeStatistics {
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  int64_t records_read = 0;     // as often as they were, from the host too
  int64_t records_written = 0;  // likewise
  int64_t retries = 0;          // operations that failed or moved nothing, and were tried again
  int64_t demoted_records = 0;  // that live in host memory, since a write failed
  int64_t demoted_bytes = 0;    // of them, now
  double waited_seconds = 0;    // in Pending::wait(), of all threads together
  double checksum_seconds = 0;  // of the thread that moves the bytes
  bool direct = false;          // past the page cache
};
// One line.
std::string to_string(const NvmeStatistics& statistics);

// Uninitialised host memory, uint8, at an address that is a multiple of 4096; kStaging.
at::Tensor make_buffer(int64_t bytes);  // [bytes]

}  // namespace zeropage::offload
