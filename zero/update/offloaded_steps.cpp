#include "zero/update/offloaded_steps.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "device/named_range.h"
#include "memory/storage.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"

namespace zeropage::zero {

using memory::Pending;
using offload::Direction;

OffloadedSteps::OffloadedSteps(std::shared_ptr<PageOffload> page_offload, Publish publish)
    : page_offload_(std::move(page_offload)),
      publish_(publish),
      ledger_(memory::Ledger::current()),
      thread_([this] { run(); }) {}

OffloadedSteps::~OffloadedSteps() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (OfPart& of_part : parts_) {
    try {
      of_part.up.synchronize();
    } catch (const std::exception&) {
      // Whoever waited for it was told.
    }
  }
}

size_t OffloadedSteps::add(Part part) {
  {
    // The thread reads the parts that it updates.
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return under_way_ == 0 || error_; });
    if (error_) std::rethrow_exception(error_);
  }
  OfPart of_part;
  if (part.to.defined() && part.to.scalar_type() != part.values.scalar_type()) {
    const auto bytes = static_cast<int64_t>(part.to.nbytes());
    const c10::ScalarType dtype = part.to.scalar_type();
    of_part.copy_out =
        publish_ == Publish::kWhenTold
            ? page_offload_->staging().add(part.page, part.to.numel(), dtype, 0,
                                           memory::Kind::kStaging)
            : memory::tensor_in(memory::storage_without_memory(bytes, part.values.device()),
                                part.values, /*offset=*/0, dtype);
  }
  of_part.part = std::move(part);
  parts_.push_back(std::move(of_part));
  return parts_.size() - 1;
}

void OffloadedSteps::start(size_t part, Step step, const Gradient& gradient,
                           std::vector<Range> unchanged) {
  OfPart& of_part = parts_[part];
  ZP_CHECK(!of_part.started, "backward() after one that has begun the step of page \"",
           of_part.part.name,
           "\" already (options.offload.step); expected step() after each backward, or the "
           "accumulator's last; accumulate with an Accumulator, or use StepWhen::kInStep");
  // With its buffers a gradient would stay on the device until its turn has come.
  Task task{part, std::move(step), gradient.arrival.without_buffers(), std::move(unchanged),
            device::Stream::current(page_offload_->device()).record()};
  if (gradient.on_device.defined()) {
    page_offload_->gradients().begin_writing(of_part.part.page);
    task.gradient = page_offload_->copies().start(Direction::kToHost, of_part.part.gradient,
                                                  gradient.on_device);
    // The next backward writes there before it is waited for.
    if (publish_ == Publish::kWhenTold) task.gradient.synchronize();
  }
  {
    std::unique_lock lock(mutex_);
    // Gradients that wait for their turn take memory. One waits beside the page that is updated, and
    // the next comes (zero/tiers/transient_storage.h).
    if (page_offload_->options().step == StepWhen::kInBackward) {
      changed_.wait(lock, [this] { return tasks_.empty() || error_; });
    }
    if (error_) std::rethrow_exception(error_);
    of_part.started = true;
    of_part.done = false;
    ++under_way_;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

void OffloadedSteps::wait(size_t part) {
  const OfPart& of_part = parts_[part];
  const memory::OwnerScope owner("offloaded step", of_part.part.name);
  const memory::SpanScope span(memory::Span::What::kWait, "offloaded step");
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !of_part.started || of_part.done || error_; });
  if (error_) std::rethrow_exception(error_);
}

void OffloadedSteps::take(size_t part) {
  wait(part);
  parts_[part].started = false;
  // The stream that goes on waits; whoever reuses the memory that it reads waits on the host.
  parts_[part].up.wait();
}

void OffloadedSteps::publish(size_t part) {
  OfPart& of_part = parts_[part];
  send_up(of_part, of_part.copy_out.defined() ? of_part.copy_out : of_part.part.values);
  parts_[part].up.wait();
}

void OffloadedSteps::run() {
  const at::NoGradGuard no_grad;
  const memory::LedgerScope ledger(ledger_);
  const optim::WorkerPoolScope pool(page_offload_->pool());
  // Copies wait for the current stream. The device's default one may be compute's, which has been
  // given what comes after, such as the rest of backward. It makes the device current too.
  const device::StreamScope stream(device::Stream::another(page_offload_->device()));
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
    if (tasks_.empty() || error_) {
      if (ends_) return;
      tasks_.clear();
      continue;
    }
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    changed_.notify_all();
    std::exception_ptr error;
    try {
      perform(task);
    } catch (c10::Error& failure) {
      failure.add_context(
          c10::str(memory::owner_prefix(), "updating page \"", parts_[task.part].part.name, "\""));
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    parts_[task.part].done = true;
    --under_way_;
    changed_.notify_all();
  }
}

void OffloadedSteps::perform(const Task& task) {
  const device::NamedRange range("OffloadedSteps::perform");
  OfPart& of_part = parts_[task.part];
  const size_t page = of_part.part.page;
  const memory::OwnerScope owner("offloaded step", of_part.part.name);
  // What the last step sent up was read from the memory that is about to change.
  of_part.up.synchronize();
  of_part.up = {};
  page_offload_->fetch_for_update(page);
  size_t next = page;
  {
    const std::lock_guard lock(mutex_);
    if (!tasks_.empty()) next = parts_[tasks_.front().part].part.page;
  }
  if (next != page) page_offload_->start_fetch_for_update(next);
  task.gradient.synchronize();
  task.begun.synchronize();
  if (of_part.copy_out.defined() && publish_ == Publish::kAtOnce) {
    step_into_staging(of_part, task);
  } else {
    step_and_round(of_part, task);
    if (publish_ == Publish::kAtOnce) send_up(of_part, of_part.part.values);
  }
  page_offload_->gradients().drop(page);
  // Memory that goes with the release is read until then.
  if (!page_offload_->values_stay()) of_part.up.synchronize();
  page_offload_->release_after_update(page);
}

void OffloadedSteps::step_and_round(OfPart& of_part, const Task& task) {
  task.step(of_part.part.gradient);
  if (!of_part.copy_out.defined()) return;
  // There it has what other pages left.
  for (const Range& range : task.unchanged) {
    of_part.copy_out.narrow(0, range.begin, range.numel())
        .copy_(of_part.part.values.narrow(0, range.begin, range.numel()));
  }
}

void OffloadedSteps::step_into_staging(OfPart& of_part, const Task& task) {
  UploadBuffers::Buffer& buffer = uploads_.next(largest_copy_bytes(), page_offload_->staging());
  const at::Tensor& copy_out = of_part.copy_out;
  const at::Tensor bytes = buffer.memory.narrow(0, 0, static_cast<int64_t>(copy_out.nbytes()));
  memory::give_memory(*copy_out.storage().unsafeGetStorageImpl(), bytes);
  step_and_round(of_part, task);
  memory::drop_memory(*copy_out.storage().unsafeGetStorageImpl());
  send_up(of_part, bytes.view(copy_out.scalar_type()));
  buffer.up = of_part.up;
}

void OffloadedSteps::send_up(OfPart& of_part, const at::Tensor& from) {
  if (!of_part.part.to.defined()) return;
  of_part.up = page_offload_->copies().start(Direction::kToDevice, of_part.part.to, from);
}

int64_t OffloadedSteps::largest_copy_bytes() const {
  int64_t largest = 0;
  for (const OfPart& of_part : parts_) {
    if (!of_part.copy_out.defined()) continue;
    largest = std::max(largest, static_cast<int64_t>(of_part.copy_out.nbytes()));
  }
  return largest;
}

}  // namespace zeropage::zero
