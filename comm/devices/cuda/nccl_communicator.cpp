#include "comm/devices/nccl_communicator.h"

#include <future>
#include <mutex>
#include <utility>

#include <c10/cuda/CUDAGuard.h>

// LibTorch's header is empty without it; the library was built with it.
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/devices/device_communicator.h"
#include "comm/devices/nccl_environment.h"
#include "comm/watch/detached_thread.h"
#include "zeropage/check.h"

namespace zeropage::comm {
namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;

constexpr auto kBetweenLooks = std::chrono::milliseconds(50);

// NCCL connects on the thread that asks, without a limit, and cannot be woken while it does. So that
// is a thread that may be left behind.
void connect(const Backend& backend, Communicator& host, const NcclOptions& options) {
  auto connected = std::make_shared<std::promise<void>>();
  std::future<void> outcome = connected->get_future();
  detail::start_detached([backend, connected, device = options.device] {
    try {
      const c10::cuda::CUDAGuard guard(device);
      backend->eagerConnectSingleDevice(device);
      connected->set_value();
    } catch (...) {
      connected->set_exception(std::current_exception());
    }
  });
  const auto give_up_at = std::chrono::steady_clock::now() + options.deadline;
  while (outcome.wait_for(kBetweenLooks) != std::future_status::ready) {
    const std::vector<int> lost = host.lost_ranks();
    ZP_CHECK(lost.empty(), "connecting NCCL on ", options.device, ": lost rank ",
             options.names[lost.front()], "; it has ended or was killed. See its last lines");
    ZP_CHECK(std::chrono::steady_clock::now() < give_up_at, "connecting NCCL on ", options.device,
             ": not all ranks came within ", static_cast<double>(options.deadline.count()) / 1000.0,
             " s; set NCCL_DEBUG=INFO to see why, or raise the deadline");
  }
  try {
    outcome.get();
  } catch (const std::exception& error) {
    ZP_THROW(
        "connecting NCCL on ", options.device, ": ", memory::message_of(error),
        "; set NCCL_DEBUG=INFO to see why, or use gloo or shared, which pass through the host");
  }
}

}  // namespace

bool has_nccl() {
  return true;
}

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> host,
                                                     const NcclOptions& options) {
  static std::once_flag once;
  std::call_once(once, detail::leave_nccl_errors_to_us);
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  // Ours ends an operation first, and knows what it was.
  nccl->timeout = std::chrono::hours(24 * 365);
  const Backend backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(options.store, host->rank(), host->size(), nccl);
  connect(backend, *host, options);
  return make_device_communicator(std::move(host), {.backend = backend,
                                                    .device = options.device,
                                                    .order = options.order,
                                                    .transport = "nccl",
                                                    .names = options.names});
}

}  // namespace zeropage::comm
