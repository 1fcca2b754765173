// The order in which a pass touches its pages, recorded once and then followed.
//
// A pass is what repeats: the forwards and backwards between two optimizer steps, or an evaluation.
// The first one is recorded. From then on a touch either is the plan's next one, and the future is
// known, or it departs from the plan: then nothing is known until the pass ends, and what was
// recorded meanwhile becomes the new plan.
//
// Pages are touched by several operators in a row; that is one touch.
//
// Threads: guarded by its pager's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace zeropage::paging {

class Trace {
 public:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  // True if this touch moved on: to the plan's next position, or away from the plan.
  bool touch(size_t page);
  // Ends the pass. Nothing happens if it touched no page.
  void end_pass();

  // Whether the touches so far are the beginning of the plan.
  bool following() const { return following_; }
  // Where the pass stands in the plan, and the plan from its beginning.
  // REQUIRES: following().
  size_t next_position() const { return position_; }
  const std::vector<size_t>& plan() const { return plan_; }
  // The position of the page's next touch after the current one; kNever if the plan has none.
  // REQUIRES: following().
  size_t next_use(size_t page) const;

 private:
  void record(size_t page);
  void adopt_recording();

  std::vector<size_t> plan_;
  std::vector<std::vector<size_t>> uses_;  // by page: its positions in the plan
  size_t position_ = 0;                    // in the plan, of the first touch that is to come
  bool following_ = false;
  std::vector<size_t> recorded_;  // this pass
};

}  // namespace zeropage::paging
