// Ranks that train on the fake accelerator, each on a device of its own.
#pragma once

#include <memory>
#include <mutex>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include "comm/devices/device_communicator.h"
#include "comm/devices/staged_communicator.h"
#include "comm/gloo/gloo_communicator.h"
#include "device/stream.h"
#include "memory/device_memory.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/fake_backend.h"
#include "tests/harness/fake_environment.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "zeropage/communicator.h"
#include "zeropage/device.h"

namespace zeropage::testing {

enum class Carrier : uint8_t {
  kStaged,  // through the host, by shared memory
  kDevice,  // as NCCL does, on streams of the device
};

constexpr const char* name(Carrier carrier) {
  return carrier == Carrier::kStaged ? "Staged" : "Device";
}

// For each rank's communicator of the host: one that works on streams of its device.
inline auto over_fake_backend(comm::ReductionOrder order,
                              FakeBackend::Streams streams = FakeBackend::Streams::kAsNccl) {
  return [order, streams, store = c10::make_intrusive<c10d::HashStore>()](
             std::unique_ptr<comm::Communicator> host) {
    const int rank = host->rank();
    const int size = host->size();
    const c10::Device device = fake_device(static_cast<c10::DeviceIndex>(rank));
    std::unique_ptr<comm::Communicator> carrier = std::make_unique<comm::SoloCommunicator>();
    if (size > 1) {
      carrier = comm::make_gloo_communicator({.store = store, .rank = rank, .size = size});
    }
    return comm::make_device_communicator(
        std::move(host),
        {.backend = c10::make_intrusive<FakeBackend>(std::move(carrier), device, streams),
         .device = device,
         .order = order,
         .transport = "fake"});
  };
}

// The module on its device, its values the same at every call.
template <typename Module>
Module make_on(c10::Device device) {
  // Modules draw from the one generator of the process, and ranks are threads of it.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  Module module;
  module->to(device);
  return module;
}

inline Samples samples_on(c10::Device device, int rank, int step) {
  const Samples samples = samples_of(rank, step);
  return {samples.inputs.to(device), samples.targets.to(device)};
}

// While it lives, ledgers know the memory of fake devices.
class FakeMemoryOnLedgers {
 public:
  FakeMemoryOnLedgers() {
    register_fake_accelerator();
    set_fake_memory_observer([](bool allocated, void* data, size_t bytes, int) {
      if (allocated) {
        memory::note_device_block(data, static_cast<int64_t>(bytes), c10::DeviceType::PrivateUse1);
      } else {
        memory::forget_device_block(data);
      }
    });
  }
  ~FakeMemoryOnLedgers() { set_fake_memory_observer({}); }
  FakeMemoryOnLedgers(const FakeMemoryOnLedgers&) = delete;
  FakeMemoryOnLedgers& operator=(const FakeMemoryOnLedgers&) = delete;
};

inline RankOptions on_fake_devices(Carrier carrier, int size) {
  register_fake_accelerator();
  RankOptions options;
  if (carrier == Carrier::kDevice) {
    options.decorate = over_fake_backend(comm::ReductionOrder::kFast);
    return options;
  }
  options.device = c10::DeviceType::PrivateUse1;
  if (size > 1) options.transport = comm::Transport::kShared;
  return options;
}

// Ranks on fake devices. A single one computes on the default stream, several on streams of their
// own, where nothing is in order by being on the default one.
inline void on_devices(Carrier carrier, int ranks, const RankFunction& fn) {
  run_ranks(
      ranks,
      [&](comm::World& world) {
        memory::set_current_device(world.device());
        const device::StreamScope compute(ranks == 1 ? device::Stream::current(world.device())
                                                     : device::Stream::another(world.device()));
        fn(world);
      },
      on_fake_devices(carrier, ranks));
}

}  // namespace zeropage::testing
