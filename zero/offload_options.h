// Which part of a rank's training state leaves its device, and when the optimizer's step on it is
// made.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "memory/ledger.h"

namespace zeropage {

// When the optimizer's step on offloaded state is computed. Results of the first two are the same.
enum class StepWhen : uint8_t {
  // In step(), page by page: while one is updated, gradients come down and parameters go up.
  kInStep,
  // A page is updated as soon as its gradient is reduced, while backward goes on. Each backward (of
  // an accumulator, its last) must then be followed by step(), with the options of that moment: what
  // looks at all gradients first (clipping, a loss scale that changes, norm spikes) is refused, and
  // so is a change of gradients or options in between, and a second backward() without zero_grad() (gradients are freed).
  kInBackward,
  // step() starts the update and the next step() takes it over, so it is computed beside a whole
  // forward and backward, whose parameters are one step old (Ren et al. 2021, "ZeRO-Offload",
  // section 5.2, delayed parameter update). Results differ from a run without. Only for parameters
  // that stay on the device, and for kHost.
  kOneStepLate,
};

struct OffloadOptions {
  // The tier of what the optimizer needs: fp32 values (the parameters' or their master weights),
  // its states, and, unless kDevice, the reduced gradients. kNvme: gradients are on the host. For
  // AdamW, Adam, SGD, Adagrad and Lion, whose steps have a fused form. Bytes an owned element: 4 of
  // values, 4 a state, and a gradient.
  memory::Tier optimizer = memory::Tier::kDevice;

  // The tier of sharded parameters: a page is brought when operators use it. The optimizer's fp32
  // values are then these, not a copy. Needs stage 3, on one rank too.
  memory::Tier parameters = memory::Tier::kDevice;

  // The most bytes of values, states and gradients that leave a rank: pages from the end of the
  // module, whose gradients come first, as long as they fit; the others stay.
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  int64_t optimizer_bytes = kAll;

  StepWhen step = StepWhen::kInStep;

  // For kNvme: a folder on a local disk.
  std::string nvme_directory;

  // Threads of the offloaded step, beside LibTorch's and pinned to the rank's cores. 0: one for
  // each core.
  int worker_threads = 0;

  // Makes copies between the tiers take as long as over a link of that speed in each direction, to
  // measure pipelines on a machine without one; host devices only. 0: as fast as they go.
  int64_t link_bytes_per_second = 0;

  bool any() const {
    return optimizer != memory::Tier::kDevice || parameters != memory::Tier::kDevice;
  }
};

}  // namespace zeropage
