// How fast a machine is at what a training step does, for the seconds that a plan predicts (planning/step_time.h).
//
// Measured in a few seconds: a matrix product, an element-wise operator, a pass over memory, messages between two
// ranks of this host, and a disk. Of one thread, so that any number of threads and ranks can be predicted.
//
// Cached in a file, by the processor, the dtype and LibTorch's release: $XDG_CACHE_HOME/zeropage, or
// ~/.cache/zeropage. A figure that is not in it is measured and added.
//
// Threads: any; measure with nothing else running. Throws c10::Error for a file that is not what this
// writes; one that cannot be written is said on stderr, and measured again next time.
#pragma once

#include <string>

#include <c10/core/ScalarType.h>

#include "comm/simulated_communicator.h"

namespace zeropage {

// Speeds of one thread; 0: not known.
struct MachineSpeeds {
  double product_flops_per_second = 0;      // of matrix products
  double elementwise_bytes_per_second = 0;  // read and written by an operator such as GELU
  double memory_bytes_per_second = 0;  // read and written by a pass over more than the caches hold
  comm::Link link;                     // between ranks of a host
  double disk_read_bytes_per_second = 0;  // of the folder that was asked for
  double disk_write_bytes_per_second = 0;
  int cores = 0;

  bool known() const { return product_flops_per_second > 0; }
};

struct MachineSpeedsOptions {
  // Dtype of parameters and activations.
  c10::ScalarType dtype = c10::kFloat;
  // A folder on the disk to measure; "": none is. Not cached, since folders may be anywhere.
  std::string folder;
  // The file; "": in the user's cache. "none": neither read nor written.
  std::string cache;
};

// The speeds in the cache; measured where it has none.
MachineSpeeds machine_speeds(const MachineSpeedsOptions& options = {});
// Measured now.
MachineSpeeds measure_machine(const MachineSpeedsOptions& options = {});

// "32 GFLOP/s of products, 9.1 GiB/s element by element, ... a thread".
std::string to_string(const MachineSpeeds& speeds);

}  // namespace zeropage
