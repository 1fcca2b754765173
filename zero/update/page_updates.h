// Which update each page has that trains, and where it is made: on the device, or away from it, where
// the optimizer's state is offloaded.
//
// Lifetime: that of the optimizer, whose factory and groups it uses.
// Threads: the training thread; offloaded() and steps() also the one that runs backward.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "zero/setup/sharded_model.h"
#include "zero/update/frozen_states.h"
#include "zero/update/offloaded_steps.h"
#include "zero/update/page_update.h"
#include "zero/update/parameter_groups.h"
#include "zero/update/update_factory.h"

namespace zeropage::zero {

class PageUpdates {
 public:
  struct OfPage {
    size_t page;
    std::unique_ptr<PageUpdate> update;
    std::optional<size_t> part;  // of steps(): its state is offloaded
    // The user's numbers of the groups that lie in it, as they were added to the update.
    std::vector<size_t> groups = {};
  };

  // Throws where the optimizer is to be offloaded, and its class has no fused form.
  PageUpdates(ShardedModel parameters, const UpdateFactory& factory, ParameterGroups& groups);

  // By page, ascending.
  const std::vector<OfPage>& all() const { return updates_; }
  // States of pages that do not train, until they do.
  FrozenStates& frozen_states() { return frozen_states_; }
  // The page's; null where it does not train.
  const OfPage* find(size_t page) const;
  // The page's, if its state is offloaded; otherwise null.
  const OfPage* offloaded(size_t page) const;
  // What makes the offloaded ones; null where nothing is offloaded.
  OffloadedSteps* steps() const { return steps_.get(); }

  // Takes in pages that train now and were frozen, and groups that were added. steps: of the optimizer so
  // far.
  void adopt(int64_t steps);
  void adopt_groups();
  // The page's next step is with the options that the groups have now.
  void set_options(const OfPage& of_page) const;

  // Whether a device's flag can keep each of them from being made.
  bool read_found_inf() const;
  void uncount_step() const;
  void set_updates(int64_t updates) const;

  // Whether one was begun that no step has ended.
  bool are_under_way() const;
  // Calls visit for each state of the page, then end_page, which may be empty; until then offloaded
  // states have memory.
  void visit_states(const OfPage& of_page, StateAccess access,
                    const std::function<void(size_t page, OwnedState&)>& visit,
                    const std::function<void(size_t page)>& end_page) const;

 private:
  void visit_memory(const VisitMemory& visit) const;
  std::string settle() const;
  OfPage make(size_t page) const;
  OfPage make_offloaded(size_t page) const;
  void adopt_pages(int64_t steps);
  void add_groups(OfPage& of_page, size_t first) const;
  void take_frozen_states(const OfPage& of_page);

  const ShardedModel parameters_;
  const UpdateFactory& factory_;
  ParameterGroups& groups_;
  std::vector<OfPage> updates_;
  FrozenStates frozen_states_;
  size_t known_groups_ = 0;                // of updates_
  uint64_t known_training_ = 0;            // of the pages, when updates_ were made
  std::unique_ptr<OffloadedSteps> steps_;  // behind updates_, which its thread uses
  const std::shared_ptr<const MemoryHolder> holder_;
};

}  // namespace zeropage::zero
