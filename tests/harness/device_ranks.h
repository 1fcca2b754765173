// Ranks that train on the fake accelerator, each on a device of its own.
#pragma once

#include "comm/device_communicator.h"
#include "comm/gloo_communicator.h"
#include "comm/solo_communicator.h"
#include "comm/staged_communicator.h"
#include "memory/device.h"
#include "memory/stream.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/fake_backend.h"
#include "tests/harness/fake_environment.h"
#include "tests/harness/ranks.h"

namespace zeropage::testing {

enum class Carrier : uint8_t {
  kStaged,  // through the host, by shared memory
  kDevice,  // as NCCL does, on streams of the device
};

constexpr const char* name(Carrier carrier) {
  return carrier == Carrier::kStaged ? "Staged" : "Device";
}

// For each rank's communicator of the host: one that works on streams of its device.
inline auto over_fake_backend(comm::ReductionOrder order, std::chrono::milliseconds deadline) {
  return [order, deadline, store = c10::make_intrusive<c10d::HashStore>()](
             std::unique_ptr<comm::Communicator> host) {
    const int rank = host->rank();
    const int size = host->size();
    const c10::Device device = fake_device(static_cast<c10::DeviceIndex>(rank));
    std::unique_ptr<comm::Communicator> carrier = std::make_unique<comm::SoloCommunicator>();
    if (size > 1) {
      carrier = comm::make_gloo_communicator({.store = store, .rank = rank, .size = size});
    }
    return comm::make_device_communicator(
        std::move(host), {.backend = c10::make_intrusive<FakeBackend>(std::move(carrier), device),
                          .device = device,
                          .order = order,
                          .deadline = deadline,
                          .transport = "fake"});
  };
}

inline RankOptions on_fake_devices(Carrier carrier, int size) {
  register_fake_accelerator();
  RankOptions options;
  if (carrier == Carrier::kDevice) {
    options.decorate = over_fake_backend(comm::ReductionOrder::kFast, options.deadline);
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
        const memory::StreamScope compute(ranks == 1 ? memory::Stream::current(world.device())
                                                     : memory::Stream::another(world.device()));
        fn(world);
      },
      on_fake_devices(carrier, ranks));
}

}  // namespace zeropage::testing
