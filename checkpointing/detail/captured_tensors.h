// What a checkpointed function reads besides its inputs and that it has not made, such as the
// parameters that it captured. A repetition must read the values of the first run, so a change in
// place in between is refused. An optimizer's step is one.
//
// Holds version counters, not memory.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/Tensor.h>

namespace zeropage::checkpointing::detail {

class CapturedTensors {
 public:
  // An input of the function, whose changes others notice.
  void leave_out(const at::Tensor& input);
  // The first run reads that tensor, which was there before.
  void note(const at::Tensor& tensor);
  // A repetition is about to read that tensor. Throws if it is a noted one and was changed since.
  // who: begins the error.
  void check(const at::Tensor& tensor, const std::string& who) const;

 private:
  struct Noted {
    c10::VariableVersion counter;
    uint32_t version;
  };

  std::unordered_set<const c10::StorageImpl*> inputs_;
  // Views share their storage's counter.
  std::unordered_map<const c10::StorageImpl*, Noted> noted_;
};

}  // namespace zeropage::checkpointing::detail
