#include "zeropage/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/libtorch_release.h"
#include "device/accelerator_driver.h"
#include "device/detail/cuda_device.h"
#include "device/stream.h"
#include "zeropage/check.h"

namespace zeropage::memory {
namespace {

bool is_cuda(c10::DeviceType type) {
  return type == c10::DeviceType::CUDA;
}

std::string why_none(c10::DeviceType type) {
  if (is_cuda(type)) return device::cuda::why_none();
  return "LibTorch has no such device in this process; use cuda or cpu";
}

}  // namespace

int device_count(c10::DeviceType type) {
  if (!device::has_streams(type)) return type == c10::DeviceType::CPU ? 1 : 0;
  if (is_cuda(type)) return device::cuda::device_count();
  if (!c10::impl::hasDeviceGuardImpl(type)) return 0;
  device::note_driver_use(
      c10::str("memory::device_count(", c10::DeviceTypeName(type, /*lower_case=*/true), ")"));
  return c10::impl::VirtualGuardImpl(type).deviceCount();
}

std::string obstacle_to(c10::Device device) {
  if (device.is_cpu()) return "";
  const int count = device_count(device.type());
  if (count == 0) return c10::str(device, ": ", why_none(device.type()));
  if (device.index() >= 0 && device.index() < count) return "";
  return c10::str(device, ": this process sees ", count, " such device", count == 1 ? "" : "s",
                  ", from index 0; choose one of them, or check CUDA_VISIBLE_DEVICES");
}

void check_device(c10::Device device) {
  const std::string obstacle = obstacle_to(device);
  ZP_CHECK(obstacle.empty(), obstacle);
}

std::string device_identity(c10::Device device) {
  return is_cuda(device.type()) ? device::cuda::uuid(device.index()) : device.str();
}

std::string device_name(c10::Device device) {
  return is_cuda(device.type()) ? device::cuda::name(device.index()) : device.str();
}

DeviceMemory device_memory(c10::Device device) {
  using c10::CachingAllocator::StatType;
  constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);
  const auto [free, total] = base::free_and_total_bytes(device);
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return {.total_bytes = static_cast<int64_t>(total),
          .free_bytes = static_cast<int64_t>(free),
          .cached_bytes = stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current};
}

void release_cached_memory(c10::Device device) {
  if (device::has_streams(device.type())) c10::getDeviceAllocator(device.type())->emptyCache();
}

void set_current_device(c10::Device device) {
  if (device::has_streams(device.type()))
    c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}

}  // namespace zeropage::memory
