#include "comm/watch/announced_call.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace zeropage::comm::detail {
namespace {

using memory::Span;

thread_local AnnouncedCall* announced = nullptr;

// What is performed may ask another communicator, which is then part of it.
thread_local bool is_performing = false;

class PerformingScope {
 public:
  PerformingScope() : before_(std::exchange(is_performing, true)) {}
  ~PerformingScope() { is_performing = before_; }
  PerformingScope(const PerformingScope&) = delete;
  PerformingScope& operator=(const PerformingScope&) = delete;

 private:
  const bool before_;
};

}  // namespace

AnnouncedCall::AnnouncedCall(const char* operation, const std::string& what)
    : operation_(operation), what_(what) {
  if (is_performing) return;
  sink_ = memory::current_sink();
  if (sink_) before_ = std::exchange(announced, this);
}

AnnouncedCall::~AnnouncedCall() {
  if (!sink_) return;
  announced = before_;
  if (before_ != nullptr) before_->is_told_ = true;
  if (is_told_) return;
  Span moment = span();
  moment.begin = moment.end = std::chrono::steady_clock::now();
  sink_->on_span(moment);
}

void AnnouncedCall::moves(const at::Tensor& tensor) {
  bytes_ = std::max(bytes_, static_cast<int64_t>(tensor.nbytes()));
}

Span AnnouncedCall::span() const {
  return {.what = Span::What::kCollective,
          .name = operation_,
          .of = what_,
          .bytes = bytes_,
          .begin = {},
          .end = {}};
}

std::function<void()> AnnouncedCall::told(std::function<void()> task) {
  if (announced == nullptr) return task;
  announced->is_told_ = true;
  return [task = std::move(task), sink = announced->sink_, what = announced->what_,
          span = announced->span()]() mutable {
    span.of = what;
    span.begin = std::chrono::steady_clock::now();
    {
      const PerformingScope performing;
      task();
    }
    span.end = std::chrono::steady_clock::now();
    sink->on_span(span);
  };
}

}  // namespace zeropage::comm::detail
