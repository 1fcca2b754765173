// The states of parameters of pages that do not train, which a load gave: they are kept on the host, saved again, and given to the
// page's update when there is one.
//
// Lifetime: that of the updates. Threads: the training thread.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <vector>

#include "zero/pages/memory_holders.h"
#include "zero/update/page_update.h"

namespace zeropage::zero {

class FrozenStates {
 public:
  // Takes the place of what was kept before.
  void keep(std::map<size_t, std::vector<OwnedState>> by_page);

  // Calls visit for each state of the page, or of all pages, and end_page, which may be empty, for each page with some.
  using Visit = std::function<void(size_t page, OwnedState& state)>;
  using EndPage = std::function<void(size_t page)>;
  void visit(const Visit& visit, const EndPage& end_page);
  void visit(size_t page, const Visit& visit);

  void visit_memory(const VisitMemory& visit) const;

  // state: of a parameter of the page, as an update has it to be written to (PageUpdate::visit_states).
  void write_to(size_t page, OwnedState& state) const;
  void forget(size_t page) { by_page_.erase(page); }
  bool has(size_t page) const { return by_page_.contains(page); }

 private:
  std::map<size_t, std::vector<OwnedState>> by_page_;
};

}  // namespace zeropage::zero
