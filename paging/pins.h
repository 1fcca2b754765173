// Keeps pages resident for as long as something uses them: an operator, or a guard of the user.
//
// Threads: taken and let go on one thread.
#pragma once

#include <exception>
#include <memory>
#include <string_view>
#include <unordered_map>

#include <c10/util/SmallVector.h>

#include "paging/pager.h"

namespace zeropage::paging {

// Pages, of any pagers, that stay resident while it lives.
class Pins {
 public:
  Pins() = default;
  // Throws what writing back a page throws, unless an exception is unwinding already; the page then stays as it is,
  // and the next operator that needs its memory throws.
  ~Pins() noexcept(false);
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  void add(const PageAddress& address, bool writes);
  // Calls PagerOptions::before_use for these pages.
  void announce(const c10::OperatorName& operation, bool reads) const;
  // Waits until all that were added are resident. who: for errors, such as an operator.
  void take(std::string_view who);
  // The same, without a place in a trace.
  void take_outside_trace(std::string_view who);
  bool empty() const { return of_pagers_.empty(); }

 private:
  void take(std::string_view who, Pass pass);

  struct OfPager {
    std::shared_ptr<Pager> pager;
    c10::SmallVector<PageUse, 4> uses;  // each page once
    // Into uses, where there are more than a few, as under a guard of a whole model.
    std::unordered_map<size_t, size_t> places = {};

    // Null where it is not used yet.
    PageUse* use_of(size_t page);
    void add(const PageUse& use);
  };
  c10::SmallVector<OfPager, 1> of_pagers_;
  size_t taken_ = 0;  // of of_pagers_
  const int exceptions_ = std::uncaught_exceptions();
  Pass pass_ = Pass::kAside;
};

}  // namespace zeropage::paging
