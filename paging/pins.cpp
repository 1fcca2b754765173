#include "paging/pins.h"

#include <algorithm>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "zeropage/check.h"

namespace zeropage::paging {
namespace {

constexpr size_t kFewUses = 16;

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
  if (PageUse* const known = of_pager->use_of(address.page)) {
    known->writes |= writes;
  } else {
    of_pager->add({address.page, writes});
  }
}

PageUse* Pins::OfPager::use_of(size_t page) {
  if (uses.size() <= kFewUses) {
    const auto at = std::find_if(uses.begin(), uses.end(),
                                 [page](const PageUse& use) { return use.page == page; });
    return at == uses.end() ? nullptr : &*at;
  }
  const auto at = places.find(page);
  return at == places.end() ? nullptr : &uses[at->second];
}

void Pins::OfPager::add(const PageUse& use) {
  uses.push_back(use);
  if (uses.size() <= kFewUses) return;
  // All of them, once: those of an operator are few, and looked through faster than a table.
  for (size_t index = places.size(); index < uses.size(); ++index) {
    places.emplace(uses[index].page, index);
  }
}

void Pins::announce(const c10::OperatorName& operation, bool reads) const {
  for (const OfPager& of_pager : of_pagers_) of_pager.pager->announce(operation, reads);
}

void Pins::take(std::string_view who) {
  take(who, current_pass());
}

void Pins::take_outside_trace(std::string_view who) {
  take(who, Pass::kAside);
}

void Pins::take(std::string_view who, Pass pass) {
  pass_ = pass;
  for (; taken_ < of_pagers_.size(); ++taken_) {
    of_pagers_[taken_].pager->pin(of_pagers_[taken_].uses, who, pass);
  }
}

}  // namespace zeropage::paging
