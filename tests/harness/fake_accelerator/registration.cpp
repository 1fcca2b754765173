// Tells LibTorch about the fake accelerator.
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "operators/meta_operators.h"
#include "tests/harness/fake_accelerator/allocator.h"
#include "tests/harness/fake_accelerator/attention.h"
#include "tests/harness/fake_accelerator/counters.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/fake_accelerator/guard.h"
#include "tests/harness/fake_accelerator/kernels.h"
#include "tests/harness/fake_accelerator/meta_kernels.h"
#include "tests/harness/fake_accelerator/operators.h"
#include "tests/harness/fake_accelerator/pinned_cache.h"
#include "tests/harness/fake_accelerator/recurrence.h"
#include "tests/harness/fake_accelerator/stream.h"

namespace zeropage::testing {
namespace {

using c10::DeviceIndex;
using c10::DispatchKey;
using torch::Library;

struct LaunchesByName {
  std::mutex mutex;
  std::map<std::string, int64_t> count;  // guarded by mutex
};

// Never destroyed: threads of streams and of autograd count until the process ends.
LaunchesByName& launches_by_name() {
  static auto* const launches = new LaunchesByName;
  return *launches;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kFakeDevices; }
  void setCurrentDevice(DeviceIndex device) const override {
    fake_guard().setDevice(fake_device(device));
  }
  DeviceIndex getCurrentDevice() const override { return fake_guard().getDevice().index(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return fake_guard().exchangeDevice(fake_device(device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  // Draws come from the host's generator, so a seed gives the CPU's numbers.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return getDefaultGenerator(0).clone();
  }
  at::Device getDeviceFromPtr(void* data) const override { return fake_device_of(data); }
  bool isPinnedPtr(const void* data) const override { return is_fake_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return fake_pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_fake_storage(storage, bytes);
  }
};

torch::CppFunction on_stream() {
  return torch::CppFunction::makeFromBoxedFunction<&run_on_fake_stream>();
}

bool makes_views(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && returns.front().alias_info() &&
         !returns.front().alias_info()->isWrite();
}

// Where the CPU has a kernel of its own and others compose the operator of several, the bits may
// differ: layer norm, group norm. Convolutions choose their kernel by the device. A list is copied by one
// kernel, as on CUDA, and not by one an element.
void prefer_cpu_kernels(Library& aten) {
  aten.impl("_foreach_copy_", on_stream());
  aten.impl("convolution", on_stream());
  aten.impl("convolution_backward", on_stream());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0) continue;
    const bool is_composed = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    if (!is_composed || !op->hasKernelForDispatchKey(DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) || makes_views(op->schema()))
      continue;
    aten.impl(toString(name).c_str(), on_stream());
  }
}

void register_once() {
  c10::register_privateuse1_backend("fake");
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, &fake_guard());
  c10::SetAllocator(c10::DeviceType::PrivateUse1, fake_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  operators::provide_meta_operators();

  // Never destroyed: kernels stay until the process ends.
  constexpr auto kKind = Library::IMPL;
  auto* const fallback = new Library(kKind, "_", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  fallback->fallback(on_stream());
  auto* const meta = new Library(kKind, "aten", DispatchKey::Meta, __FILE__, __LINE__);
  add_attention_meta(*meta);
  add_meta_kernels(*meta);
  auto* const aten = new Library(kKind, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  add_storage_kernels(*aten);
  add_copy_kernels(*aten);
  choose_attention_as_cpu(*aten);
  add_recurrent_kernels(*aten);
  prefer_cpu_kernels(*aten);
  constexpr auto kAutograd = DispatchKey::AutogradPrivateUse1;
  add_recurrent_kernels(*new Library(kKind, "aten", kAutograd, __FILE__, __LINE__));
}

}  // namespace

LiveCounters& live_counters() {
  static LiveCounters counters;
  return counters;
}

void count_launch(const std::string& what) {
  ++live_counters().launches;
  const std::lock_guard lock(launches_by_name().mutex);
  ++launches_by_name().count[what];
}

std::map<std::string, int64_t> fake_launches() {
  const std::lock_guard lock(launches_by_name().mutex);
  return launches_by_name().count;
}

FakeCounters fake_counters() {
  const LiveCounters& live = live_counters();
  return {.host_syncs = live.host_syncs,
          .device_syncs = live.device_syncs,
          .record_stream = live.record_stream,
          .launches = live.launches,
          .bytes_to_host = live.bytes_to_host,
          .not_async = live.not_async};
}

void reset_fake_counters() {
  LiveCounters& live = live_counters();
  for (auto* counter : {&live.host_syncs, &live.device_syncs, &live.record_stream, &live.launches,
                        &live.bytes_to_host, &live.not_async})
    *counter = 0;
  const std::lock_guard lock(launches_by_name().mutex);
  launches_by_name().count.clear();
}

void register_fake_accelerator() {
  static std::once_flag once;
  std::call_once(once, &register_once);
}

void finish_fake_work() {
  for (DeviceIndex index = 0; index < kFakeDevices; ++index) wait_for_fake_device(index);
}

}  // namespace zeropage::testing
