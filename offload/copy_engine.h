// Copies between a device and the host tier beside compute: one queue in each direction, so that
// both run at once.
//
// On an accelerator a queue is a stream; the host's end is to be page-locked (device/pinned_arena), else LibTorch waits.
// On a host device it is a thread, so that the same code runs with the host as both ends, and its
// speed can be limited: a link of known speed to measure pipelines with. Tensors on the meta device
// have nothing to copy: their bytes are counted.
//
// Lifetime: a Pending keeps its tensors, and outlives the engine. Whoever started a copy keeps the end on an accelerator until
// synchronize() has returned: its memory may else be reused while it is read. The end on the host may go (device/page_locked.h).
// Threads: any.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/pending.h"

namespace zeropage::offload {

enum class Direction : uint8_t { kToHost, kToDevice };

struct CopyEngineOptions {
  // Speed of each direction. 0: as fast as it goes. For measuring, on a host device only.
  int64_t bytes_per_second = 0;
};

class CopyEngine {
 public:
  // Throws for a speed on an accelerator, or a negative one.
  static std::unique_ptr<CopyEngine> make(c10::Device device,
                                          const CopyEngineOptions& options = {});
  virtual ~CopyEngine() = default;
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // to, from: contiguous, of the same dtype and sizes. Begins once `after` has ended, and what the
  // calling thread's current stream of the device has been given so far.
  memory::Pending start(Direction direction, const at::Tensor& to, const at::Tensor& from,
                        const memory::Pending& after = {});

  // On an accelerator, until all that was started has ended; then memory that only Pendings kept may
  // go. On a host copies keep theirs.
  virtual void wait_for_device() const {}

  // Bytes that were copied since the engine was made, or are on their way.
  int64_t bytes(Direction direction) const { return bytes_[static_cast<size_t>(direction)]; }

 protected:
  CopyEngine() = default;

 private:
  virtual memory::Pending enqueue(Direction direction, const at::Tensor& to, const at::Tensor& from,
                                  const memory::Pending& after) = 0;

  std::array<std::atomic<int64_t>, 2> bytes_{};
};

}  // namespace zeropage::offload
