// The one look at each parameter and its gradient that a step has: whether the parameter still lives in its page, and whether
// its p.grad() is what a backward left or what a script put there.
//
// A step of many small parameters is mostly such looks. Each is at half a dozen objects of LibTorch's, which have left the
// cache since backward and are found through each other. So there is one pass, and it asks for what it will read some parameters
// ahead, pointer by pointer.
//
// Lifetime: shares what it looks at. Threads: the training thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "zero/gradients/backward.h"
#include "zero/pages/module_placement.h"

namespace zeropage::zero {

// What p.grad() of a parameter was.
enum class SeenGradient : uint8_t {
  kNone,     // also where it does not train
  kReduced,  // what a backward made ready
  kOther,    // a tensor that a script put there
};

class StepLook {
 public:
  StepLook(std::shared_ptr<const GradientReducer> reducer,
           std::shared_ptr<const ModulePlacement> in_place);

  // Throws if a parameter no longer lives in its page. who: "step()".
  void at_all(const char* who);
  void at_gradients();

  // Whether gradients are as they were seen, unless a script or a reduction has changed them since: no other parameters train.
  bool is_of_all_that_train() const { return trained_ == reducer_->training().all().size(); }
  SeenGradient seen(size_t parameter) const { return seen_[parameter]; }
  // The parameters whose p.grad() a script put there, ascending.
  std::vector<size_t> others() const;

 private:
  SeenGradient see(size_t parameter) const;
  void ask_ahead_of(size_t parameter) const;

  const std::shared_ptr<const GradientReducer> reducer_;
  const std::shared_ptr<const ModulePlacement> in_place_;
  // By parameter. It is not made anew in each step: memory for 10,000 would be asked for right behind a backward that has
  // let go of many small pieces, all of which the allocator sorts then, for 50 ns each.
  std::vector<SeenGradient> seen_;
  size_t trained_ = 0;  // how many trained then
};

}  // namespace zeropage::zero
