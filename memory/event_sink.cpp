#include "zeropage/event_sink.h"

namespace zeropage::memory {
namespace {

thread_local OwnerScope::Owner owner_of_thread;

}  // namespace

OwnerScope::OwnerScope(const char* owner, std::string_view page)
    : before_(std::exchange(owner_of_thread, Owner{owner, page})) {}

OwnerScope::~OwnerScope() {
  owner_of_thread = before_;
}

OwnerScope::Owner OwnerScope::current() {
  return owner_of_thread;
}

void SpanScope::end() const {
  const OwnerScope::Owner owner = OwnerScope::current();
  sink_->on_span({.what = what_,
                  .name = name_,
                  .of = owner.page,
                  .bytes = 0,
                  .begin = begin_,
                  .end = std::chrono::steady_clock::now()});
}

}  // namespace zeropage::memory
