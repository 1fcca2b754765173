#include "device/pinned_arena.h"

#include <cstring>
#include <optional>

#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include "device/detail/cuda_device.h"
#include "device/device.h"
#include "device/host_memory.h"
#include "device/stream.h"
#include "memory/bytes.h"
#include "memory/check.h"
#include "memory/exact.h"

namespace zeropage::memory {
namespace {

// A cache line, and what the widest vector instructions like.
constexpr int64_t kAlignment = 64;

int64_t bytes_of(const Take& take) {
  ZP_CHECK(take.numel >= 0, "PinnedArena: expected a tensor of 0 elements or more, got ",
           take.numel);
  return round_up(take.numel * static_cast<int64_t>(c10::elementSize(take.dtype)), kAlignment);
}

// Before the first page is written: past its memory a process is killed without a word.
void check_host_has(int64_t bytes) {
  ZP_CHECK(bytes >= 1, "PinnedArena: expected 1 byte or more, got ", bytes,
           "; bytes_for(takes) computes what is needed");
  const HostMemory memory = read_host_memory();
  ZP_CHECK(bytes <= memory.usable_bytes(), "PinnedArena: ", describe_need(bytes, memory),
           "; use more ranks or machines, or keep less on the host");
}

}  // namespace

class PinnedArena::Memory {
 public:
  Memory(int64_t bytes, const PinnedArenaOptions& options) : device_(options.device) {
    check_host_has(bytes);
    if (has_streams(device_.type()) && !device_.is_cuda()) {
      allocated_ = at::globalContext()
                       .getPinnedMemoryAllocator(device_.type())
                       ->allocate(static_cast<size_t>(bytes));
      std::memset(allocated_.get(), 0, static_cast<size_t>(bytes));
      return;
    }
    mapping_.emplace(bytes, HostMappingOptions{options.cores, options.huge_pages});
    if (!device_.is_cuda()) return;
    check_device(device_);
    // A thread whose current device is another would get a context there, of some 500 MB.
    const c10::DeviceGuard guard(device_);
    cuda::register_host_memory(mapping_->data(), mapping_->bytes());
  }
  ~Memory() {
    if (!device_.is_cuda()) return;
    try {
      const c10::DeviceGuard guard(device_);
      cuda::unregister_host_memory(mapping_->data());
    } catch (const std::exception&) {
      // A process that ends has no device any more.
    }
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const {
    return mapping_ ? mapping_->data() : static_cast<std::byte*>(allocated_.get());
  }

 private:
  const c10::Device device_;
  std::optional<HostMapping> mapping_;
  c10::DataPtr allocated_;  // instead of it
};

PinnedArena::PinnedArena(int64_t bytes, const PinnedArenaOptions& options)
    : bytes_(bytes), memory_(std::make_shared<Memory>(bytes, options)) {}

at::Tensor PinnedArena::take(int64_t numel, at::ScalarType dtype) {
  const int64_t asked_bytes = bytes_of({numel, dtype});
  ZP_CHECK(asked_bytes <= bytes_ - taken_bytes_, "PinnedArena: exhausted: of ",
           format_bytes(bytes_), " are ", format_bytes(taken_bytes_), " taken, and ",
           format_bytes(asked_bytes), " asked for (", numel, " of ", dtype,
           "); make it of bytes_for all that will be taken");
  std::byte* const data = memory_->data() + taken_bytes_;
  taken_bytes_ += asked_bytes;
  // Told its device, LibTorch does not ask CUDA whose memory it is.
  return at::from_blob(
      data, {numel}, [memory = memory_](void* /*data*/) {}, at::TensorOptions().dtype(dtype),
      c10::Device(c10::DeviceType::CPU));
}

int64_t PinnedArena::bytes_for(std::span<const Take> takes) {
  int64_t total = 0;
  for (const Take& take : takes) total += bytes_of(take);
  return total;
}

}  // namespace zeropage::memory
