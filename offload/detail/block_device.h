// What moves bytes between memory and an open file, several operations at once.
//
// Lifetime: the descriptor outlives it; memory outlives the transfers into it.
// Threads: one uses it.
// Throws: the makers; wait() where the engine itself fails. A failed transfer is a Completion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace zeropage::offload::detail {

enum class Direction : uint8_t { kRead, kWrite };

struct Transfer {
  Direction direction = Direction::kRead;
  int64_t offset = 0;  // in the file
  std::byte* data = nullptr;
  int64_t bytes = 0;
  size_t tag = 0;  // comes back with the completion
};

struct Completion {
  size_t tag = 0;
  int64_t result = 0;  // bytes moved, perhaps fewer than asked for; or an errno, negated
};

class BlockDevice {
 public:
  virtual ~BlockDevice() = default;

  // The most transfers at once.
  virtual int depth() const = 0;
  // REQUIRES: fewer than depth() in flight.
  virtual void submit(const Transfer& transfer) = 0;
  // Blocks until one has ended, in any order. REQUIRES: one in flight.
  virtual Completion wait() = 0;
  virtual std::string describe() const = 0;
};

// By io_uring. Null where the kernel refuses it; then `refusal` has its reason.
std::unique_ptr<BlockDevice> make_uring_device(int descriptor, int depth, std::string& refusal);
// By pread and pwrite, on a few threads. reason: why not by io_uring, for describe().
std::unique_ptr<BlockDevice> make_thread_device(int descriptor, int depth, std::string reason);

}  // namespace zeropage::offload::detail
