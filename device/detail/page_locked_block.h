// A block of page-locked host memory, which streams of a device read and write while the host goes on.
//
// A block is known by its addresses. So a use is noted for the right block whatever tensor the memory is seen through: a part of
// the block, a storage within another one, a tensor over a bare address. When a block ends, what holds its memory is let go once
// all streams that used it have passed what they had been given by then. Until then it waits in a list, and each block that begins or
// ends takes the first ones from it that are free. The host never waits for it.
//
// The table of blocks and that list are global to the process, as the addresses are.
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>

#include "device/stream.h"

namespace zeropage::device {

class PageLockedBlock {
 public:
  // holder: lets the memory go when it is destroyed, on any thread.
  PageLockedBlock(const void* data, int64_t bytes, std::shared_ptr<const void> holder);
  // bytes of what LibTorch's cache for that kind of device has, at a multiple of `alignment`.
  static std::unique_ptr<PageLockedBlock> from_cache(int64_t bytes, c10::DeviceType device,
                                                     int64_t alignment);
  ~PageLockedBlock();
  PageLockedBlock(const PageLockedBlock&) = delete;
  PageLockedBlock& operator=(const PageLockedBlock&) = delete;

  void* data() const { return const_cast<void*>(data_); }

  // The stream uses the block at that address from now on. Memory of others is left to them.
  static void note_use(const void* data, const Stream& stream);
  // Blocks until the memory of every block that has ended is gone.
  static void wait_for_ended();

 private:
  const void* const data_;
  std::shared_ptr<const void> holder_;
};

}  // namespace zeropage::device
