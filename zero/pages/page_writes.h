// Passes writes to parameters (by the user between two steps, by an update, by a load) to all that depend on them:
// shards, master weights, and autograd, which refuses a backward over a graph from before.
//
//   begin_update() ... end_update()     around an update of what this rank owns
//
// Lifetime: shares the pages. Threads: the training thread, or the one that runs backward.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "zero/pages/master_weights.h"
#include "zero/pages/module_placement.h"
#include "zero/pages/parameter_pages.h"
#include "zero/pages/user_writes.h"
#include "zero/pages/whole_pages.h"

namespace zeropage::zero {

class PageWrites {
 public:
  PageWrites(std::shared_ptr<ParameterPages> pages, std::shared_ptr<MasterWeights> masters,
             std::shared_ptr<const WholePages> paging,
             std::shared_ptr<const ModulePlacement> in_place,
             std::shared_ptr<UserWrites> user_writes);

  // What scripts wrote. It has all of it after write_back(): until then something may be in a sharded page that is
  // whole.
  UserWrites& user_writes() const { return *user_writes_; }
  void write_back() const;

  // From here on no sharded page is resident, and what was written to parameters is in a copy of them
  // in another tier; master weights beside them follow it in the update (OwnedPart::adopts_copy).
  // Throws if a page is in use.
  void begin_update();
  // The same for one page, before its update in the middle of a backward. has_gradient: of its
  // parameters.
  void begin_update_in_backward(size_t page, const std::function<bool(size_t)>& has_gradient);
  // updated: by parameter. A backward over a graph from before is refused from here on.
  void end_update(const std::vector<uint8_t>& updated);
  // Instead of both, where a step changes nothing: ends its pass.
  void skip_update();
  // Whether a backward has begun the parameter's update, and no step has ended it.
  bool is_in_update(size_t parameter) const { return versions_[parameter] != 0; }

  // The same of any parameter: ranks have new values of what they own alone, until the step.
  bool is_any_in_update() const;

  // What was written to parameters is from here on in what this rank owns, master weights included; no
  // sharded page is resident. Throws if one is in use, or a parameter is not in place. who:
  // "save_state()".
  void take_over(const char* who);
  // The same for one page, which stays resident if it is. REQUIRES: parameters are in place.
  void take_over(size_t page);
  // All values were replaced, behind autograd's back.
  void end_load();
  // Parameters of these pages were written to. A backward over a graph from before is refused from here
  // on.
  void note_written(const std::vector<size_t>& pages);

  // The parameter was frozen when it was placed. Its page trains from here on.
  void begin_training(size_t parameter);

 private:
  enum class By : uint8_t { kUs, kScript };
  void bump_version(size_t parameter, By by) const;
  void check_unwritten_since_backward() const;

  const std::shared_ptr<ParameterPages> pages_;
  const std::shared_ptr<MasterWeights> masters_;
  const std::shared_ptr<const WholePages> paging_;
  const std::shared_ptr<const ModulePlacement> in_place_;
  const std::shared_ptr<UserWrites> user_writes_;
  // By parameter: its tensor's when a backward made its step (StepWhen::kInBackward), or 0.
  std::vector<int64_t> versions_;
};

}  // namespace zeropage::zero
