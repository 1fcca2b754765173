#include "paging/trace.h"

#include <algorithm>
#include <utility>

namespace zeropage::paging {
namespace {

// A pass that nobody ends must not grow for ever.
constexpr size_t kLongestPass = size_t{1} << 20;

}  // namespace

bool Trace::touch(size_t page) {
  if (!recorded_.empty() && recorded_.back() == page) return false;
  record(page);
  if (!following_) return false;
  if (position_ < plan_.size() && plan_[position_] == page) {
    ++position_;
  } else {
    following_ = false;
  }
  return true;
}

void Trace::record(size_t page) {
  if (recorded_.size() == kLongestPass) {
    recorded_.clear();
    following_ = false;
  }
  recorded_.push_back(page);
}

void Trace::end_pass() {
  if (recorded_.empty()) return;
  const bool as_planned = following_ && position_ == plan_.size();
  if (!as_planned) adopt_recording();
  recorded_.clear();
  position_ = 0;
  following_ = true;
}

void Trace::adopt_recording() {
  plan_ = std::move(recorded_);
  recorded_ = {};
  uses_.clear();
  for (size_t position = 0; position < plan_.size(); ++position) {
    const size_t page = plan_[position];
    if (page >= uses_.size()) uses_.resize(page + 1);
    uses_[page].push_back(position);
  }
}

size_t Trace::next_use(size_t page) const {
  if (page >= uses_.size()) return kNever;
  const std::vector<size_t>& uses = uses_[page];
  const auto next = std::lower_bound(uses.begin(), uses.end(), position_);
  return next == uses.end() ? kNever : *next;
}

}  // namespace zeropage::paging
