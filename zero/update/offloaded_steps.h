// Makes the optimizer's steps on pages whose state is offloaded, on a thread of its own: takes a
// page's gradient when it has come down, updates the page, and sends its new values up, while the
// gradient of the next comes down and backward, or the training thread, goes on.
//
//   start(page) ... wait(page)      once a step; pages are updated in the order of start()
//
// Bytes over the link a step: what gradients come down, and the parameters up. Beside the own
// buffers there are two staging buffers for values in a lower precision, each of the largest owned
// part.
//
// On an accelerator nothing of a page changes before what the stream that is current at start() had
// been given by then has ended: it may still read the page's values, on the device or on the host. What
// that stream is given later is not waited for.
//
// Lifetime: owned by the optimizer. Threads: start() and wait() one thread at a time; a page's
// update is called on the thread of this class only.
// Throws: wait() what went wrong; then no later page is updated.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/stream.h"
#include "zero/layout/shard_layout.h"
#include "zero/tiers/page_offload.h"
#include "zero/update/page_update.h"
#include "zero/update/upload_buffers.h"
#include "zeropage/detail/pending.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

class OffloadedSteps {
 public:
  struct Part {
    size_t page = 0;
    std::string name;     // for errors
    at::Tensor values;    // [owned numel] of page_offload.values() or parameters()
    at::Tensor gradient;  // [owned numel] of page_offload.gradients()
    // [owned numel] on the device: takes over the new values, in its precision. Undefined: nothing
    // is sent up.
    at::Tensor to;
  };

  // When new values are sent up.
  enum class Publish : bool { kAtOnce, kWhenTold };

  // The step itself; has_gradient as it was at start(). gradient: [owned numel], the part's.
  using Step = std::function<void(const at::Tensor& gradient)>;

  // Where a part's gradient is when its step is started.
  struct Gradient {
    // Its way down, where it comes to the part's gradient by itself.
    memory::Pending arrival;
    // [owned numel]: on the device, where it does not; undefined: there is none.
    at::Tensor on_device;
  };

  OffloadedSteps(std::shared_ptr<PageOffload> page_offload, Publish publish);
  // Waits.
  ~OffloadedSteps();
  OffloadedSteps(const OffloadedSteps&) = delete;
  OffloadedSteps& operator=(const OffloadedSteps&) = delete;

  // Waits for the parts that were started. Returns the part's number.
  size_t add(Part part);
  // Where the part's update is to write its values in the precision of `to`, if that is lower;
  // undefined: none. Has memory while its step runs.
  const at::Tensor& copy_out(size_t part) const { return parts_[part].copy_out; }

  // unchanged: ranges of the part whose values the
  // step leaves as they are; of the parameters' last values no copy is kept here.
  void start(size_t part, Step step, const Gradient& gradient, std::vector<Range> unchanged = {});
  bool started(size_t part) const { return parts_[part].started; }
  // Waits until the part is updated, if it was started.
  void wait(size_t part);
  // The same; its values are where they belong, if they are sent at once, and it may be started
  // again.
  void take(size_t part);
  // kWhenTold: sends the part's values up. REQUIRES: take(part).
  void publish(size_t part);

 private:
  struct OfPart {
    Part part;
    at::Tensor copy_out;
    bool started = false;
    bool done = false;
    memory::Pending up;
  };
  struct Task {
    size_t part;
    Step step;
    memory::Pending gradient;
    std::vector<Range> unchanged;
    device::Event begun;  // of what was given to the device before
  };
  void run();
  void perform(const Task& task);
  static void step_and_round(OfPart& of_part, const Task& task);
  void step_into_staging(OfPart& of_part, const Task& task);
  void send_up(OfPart& of_part, const at::Tensor& from);
  int64_t largest_copy_bytes() const;

  // Changed by add() alone, while the thread has nothing to do.
  const std::shared_ptr<PageOffload> page_offload_;
  const Publish publish_;
  const std::shared_ptr<memory::Ledger> ledger_;
  std::vector<OfPart> parts_;

  // The thread's.
  UploadBuffers uploads_;  // of values in a lower precision

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_, and `done` and `up` of parts_.
  std::deque<Task> tasks_;
  size_t under_way_ = 0;  // started and not done
  bool ends_ = false;
  std::exception_ptr error_;

  std::thread thread_;  // last: it uses the others
};

}  // namespace zeropage::zero
