#include "paging/pins.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "memory/check.h"

namespace zeropage::memory {
namespace {

Pass current_pass() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  return in_backward || c10::GradMode::is_enabled() ? Pass::kTraining : Pass::kInference;
}

}  // namespace

Pins::~Pins() noexcept(false) {
  std::exception_ptr error;
  for (size_t index = 0; index < taken_; ++index) {
    try {
      of_pagers_[index].pager->unpin(of_pagers_[index].uses, pass_);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error && std::uncaught_exceptions() == exceptions_) std::rethrow_exception(error);
}

void Pins::add(const PageAddress& address, bool writes) {
  TORCH_INTERNAL_ASSERT(address.pager && taken_ == 0);
  auto of_pager = std::find_if(of_pagers_.begin(), of_pagers_.end(),
                               [&](const OfPager& known) { return known.pager == address.pager; });
  if (of_pager == of_pagers_.end()) {
    of_pagers_.push_back({address.pager, {}});
    of_pager = of_pagers_.end() - 1;
  }
  for (PageUse& use : of_pager->uses) {
    if (use.page != address.page) continue;
    use.writes |= writes;
    return;
  }
  of_pager->uses.push_back({address.page, writes});
}

void Pins::take(std::string_view who) {
  take(who, current_pass());
}

void Pins::take_aside(std::string_view who) {
  take(who, Pass::kAside);
}

void Pins::take(std::string_view who, Pass pass) {
  pass_ = pass;
  for (; taken_ < of_pagers_.size(); ++taken_) {
    of_pagers_[taken_].pager->pin(of_pagers_[taken_].uses, who, pass);
  }
}

}  // namespace zeropage::memory
