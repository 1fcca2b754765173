// Copies between the host and fake devices, and values that the host reads.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>

#include "tests/harness/fake_accelerator/counters.h"
#include "tests/harness/fake_accelerator/fake_accelerator.h"
#include "tests/harness/fake_accelerator/host_view.h"
#include "tests/harness/fake_accelerator/kernels.h"
#include "tests/harness/fake_accelerator/pinned_cache.h"
#include "tests/harness/fake_accelerator/stream.h"

namespace zeropage::testing {
namespace {

using at::Tensor;

void enqueue_copy(c10::Stream stream, const Tensor& to, const Tensor& from) {
  count_launch("aten::copy_");
  fake_stream(stream).enqueue("aten::copy_", [to, from] { to.copy_(from); });
}

void let_wait(c10::Stream later, c10::Stream earlier) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(earlier);
  event.block(later);
}

void wait_for_values(c10::Stream stream) {
  ++live_counters().host_syncs;
  fake_stream(stream).wait();
  rethrow_task_error(stream.device_index());
}

// CUDA copies so: on the source's stream, in order with the target's.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  const c10::Stream its = current_fake_stream(from.device().index());
  const c10::Stream other = current_fake_stream(to.device().index());
  if (its != other) let_wait(its, other);
  enqueue_copy(its, host_view(to), host_view(from));
  if (its != other) let_wait(other, its);
}

// The host's end of a copy that it does not wait for. Page-locked memory is not kept alive by what is queued, as on CUDA: its cache is
// told of the copy, as LibTorch's kernel tells it.
Tensor end_of_copy(const Tensor& on_host, c10::Stream stream) {
  record_pinned_use(on_host.const_data_ptr(), on_host.storage().data_ptr().get_context(), stream);
  return host_view(on_host);
}

// Memory that is not page-locked is read before the call returns, blocking or not.
void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_fake_stream(to.device().index());
  const bool is_read_later = non_blocking && is_fake_pinned(from.const_data_ptr());
  enqueue_copy(stream, host_view(to),
               is_read_later ? end_of_copy(from, stream) : host_snapshot(from));
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_fake_stream(from.device().index());
  live_counters().bytes_to_host += static_cast<int64_t>(to.nbytes());
  const bool is_written_later = non_blocking && is_fake_pinned(to.const_data_ptr());
  enqueue_copy(stream, is_written_later ? end_of_copy(to, stream) : to, host_view(from));
  if (!non_blocking) wait_for_values(stream);
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  const Tensor from = source.expand(to.sizes());
  if (to.numel() == 0) return to;
  TORCH_CHECK(from.is_cpu() || from.is_privateuseone(), "a copy from ", from.device(), " to ",
              to.device());
  if (from.is_cpu()) {
    copy_to_device(from, to, non_blocking);
  } else if (to.is_cpu()) {
    copy_to_host(from, to, non_blocking);
  } else {
    copy_between_devices(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  live_counters().bytes_to_host += static_cast<int64_t>(self.itemsize());
  wait_for_values(current_fake_stream(self.device().index()));
  return at::_local_scalar_dense(host_view(self));
}

}  // namespace

void add_copy_kernels(torch::Library& aten) {
  aten.impl("_copy_from", &copy_from);
  aten.impl("_copy_from_and_resize", &copy_from_and_resize);
  aten.impl("_local_scalar_dense", &local_scalar_dense);
}

}  // namespace zeropage::testing
