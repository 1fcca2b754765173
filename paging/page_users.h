// The operators and guards of the user that keep a page resident.
//
// Threads: guarded by the pager's mutex.
#pragma once

#include <c10/util/Exception.h>

#include "paging/page_use.h"

namespace zeropage::paging {

class PageUsers {
 public:
  void add(Pass pass, bool writes) { count(pass, writes, 1); }
  void remove(Pass pass, bool writes) {
    TORCH_INTERNAL_ASSERT(users_ > 0);
    count(pass, writes, -1);
  }

  bool any() const { return users_ > 0; }
  bool any_guard() const { return guards_ > 0; }
  // A guard under which the page's tensors may be written to.
  bool any_writing_guard() const { return writing_guards_ > 0; }

 private:
  void count(Pass pass, bool writes, int change) {
    users_ += change;
    if (pass != Pass::kAside) return;
    guards_ += change;
    if (writes) writing_guards_ += change;
  }

  int users_ = 0;
  int guards_ = 0;          // of users_
  int writing_guards_ = 0;  // of guards_
};

}  // namespace zeropage::paging
