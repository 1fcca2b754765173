// What an ActivationOffload may be asked for, and what it has done (checkpointing/activation_offload.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "checkpointing/activation_store.h"

namespace zeropage::checkpointing {

// How activations are kept on the host. All but kNone change gradients.
enum class Compression : uint8_t {
  kNone,  // bit by bit
  kBf16,  // fp32 and fp64 as bfloat16: 2 bytes an element, off by up to 2^-8 of it
  k8Bit,  // all floating types as int8 with an fp32 scale for 256: 1.02 bytes an element, off by
          // up to 1/254 of the largest of its 256
};
std::string_view name(Compression compression);  // "none", "bf16", "8-bit"

struct ActivationOffloadOptions {
  // Saved tensors below stay: a copy of little costs more than it gives.
  int64_t least_bytes = int64_t{1} << 10;
  // The most device memory that is on its way out, and, apart from that, fetched ahead; a larger
  // tensor goes alone. More hides more, and is memory. 0: twice the largest that has left, and at
  // least 64 MiB.
  int64_t staging_bytes = 0;
  // Lossy unless kNone: not the gradients of a run without it.
  Compression compression = Compression::kNone;
  // Where copies lie; null: in host memory. On the host, too, they are then brought back ahead, with
  // staging_bytes of host memory.
  std::shared_ptr<ActivationStore> store = nullptr;
};

struct ActivationOffloadStatistics {
  Compression compression = Compression::kNone;
  int64_t saved_tensors = 0;          // that left
  int64_t copies = 0;                 // that they left in: fewer where they share memory
  std::string where = "on the host";  // or in a store: then host_* count what lies there
  int64_t host_bytes = 0;             // of copies, now
  int64_t host_peak_bytes = 0;        // the most that was
  int64_t host_total_bytes = 0;       // of all copies so far
  int64_t fetched_bytes = 0;          // brought back, as they were before compression
  int64_t fetched_ahead_bytes = 0;  // of them, those that were on their way before they were needed
  int64_t most_leaving_bytes = 0;   // that were on their way out at once; 0 on the host
  int64_t most_ahead_bytes = 0;     // that were fetched ahead at once; 0 on the host
  double waited_seconds = 0;        // of the threads that pack, for earlier copies to end
};
// One line. Says that it is lossy if it is.
std::string to_string(const ActivationOffloadStatistics& statistics);

}  // namespace zeropage::checkpointing
