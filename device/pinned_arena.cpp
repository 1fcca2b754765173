#include "device/pinned_arena.h"

#include <cstring>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include "base/exact.h"
#include "device/detail/cuda_device.h"
#include "device/detail/page_locked_block.h"
#include "device/host_memory.h"
#include "device/stream.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/device.h"

namespace zeropage::device {
namespace {

// A cache line, and what the widest vector instructions like.
constexpr int64_t kAlignment = 64;

int64_t bytes_of(const Take& take) {
  ZP_CHECK(take.numel >= 0, "PinnedArena: expected a tensor of 0 elements or more, got ",
           take.numel);
  return base::round_up(take.numel * static_cast<int64_t>(c10::elementSize(take.dtype)),
                        kAlignment);
}

// Before the first page is written: past its memory a process is killed without a word.
void check_host_has(int64_t bytes) {
  ZP_CHECK(bytes >= 1, "PinnedArena: expected 1 byte or more, got ", bytes,
           "; bytes_for(takes) computes what is needed");
  HostMemory memory = read_host_memory();
  if (bytes > memory.usable_bytes()) {
    // Those that have ended may have taken it, and go as soon as their last copy has.
    PageLockedBlock::wait_for_ended();
    memory = read_host_memory();
  }
  ZP_CHECK(bytes <= memory.usable_bytes(), "PinnedArena: ", describe_need(bytes, memory),
           "; use more ranks or machines, or keep less on the host");
}

// Pages of exactly that size. For CUDA they are registered with the driver.
class Mapping {
 public:
  Mapping(int64_t bytes, const PinnedArenaOptions& options)
      : device_(options.device), mapping_(bytes, {options.cores, options.huge_pages}) {
    if (!device_.is_cuda()) return;
    memory::check_device(device_);
    // A thread whose current device is another would get a context there, of some 500 MB.
    const c10::DeviceGuard guard(device_);
    device::cuda::register_host_memory(mapping_.data(), mapping_.bytes());
  }
  ~Mapping() {
    if (!device_.is_cuda()) return;
    try {
      const c10::DeviceGuard guard(device_);
      device::cuda::unregister_host_memory(mapping_.data());
    } catch (const std::exception&) {
      // A process that ends has no device any more.
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return mapping_.data(); }

 private:
  const c10::Device device_;
  const HostMapping mapping_;
};

}  // namespace

class PinnedArena::Memory {
 public:
  Memory(int64_t bytes, const PinnedArenaOptions& options) {
    check_host_has(bytes);
    if (has_streams(options.device.type()) && !options.device.is_cuda()) {
      block_ = PageLockedBlock::from_cache(bytes, options.device.type(), kAlignment);
      data_ = static_cast<std::byte*>(block_->data());
      std::memset(data_, 0, static_cast<size_t>(bytes));
      return;
    }
    mapping_ = std::make_shared<const Mapping>(bytes, options);
    data_ = mapping_->data();
    if (!options.device.is_cuda()) return;
    block_ = std::make_unique<PageLockedBlock>(data_, bytes, std::exchange(mapping_, nullptr));
  }

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::shared_ptr<const Mapping> mapping_;  // for the host
  std::unique_ptr<PageLockedBlock> block_;  // for a device
};

PinnedArena::PinnedArena(int64_t bytes, const PinnedArenaOptions& options)
    : bytes_(bytes), memory_(std::make_shared<Memory>(bytes, options)) {}

at::Tensor PinnedArena::take(int64_t numel, at::ScalarType dtype) {
  const int64_t asked_bytes = bytes_of({numel, dtype});
  ZP_CHECK(asked_bytes <= bytes_ - taken_bytes_, "PinnedArena: exhausted: of ",
           memory::format_bytes(bytes_), " are ", memory::format_bytes(taken_bytes_),
           " taken, and ", memory::format_bytes(asked_bytes), " asked for (", numel, " of ", dtype,
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

}  // namespace zeropage::device
