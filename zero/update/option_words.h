// The options of a parameter group as a hash and in words, whatever the optimizer's class, so that ranks can
// compare them.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <typeindex>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

namespace zeropage::zero {

// An optimizer's class has options of this one, which may be a user's.
struct OptionsClass {
  std::type_index type = typeid(torch::optim::OptimizerOptions);
  size_t bytes = 0;  // of an object

  // The object's memory; empty for one of another class, that may be derived from this one.
  std::string_view memory_of(const torch::optim::OptimizerOptions& options) const {
    if (typeid(options) != type) return {};
    return {static_cast<const char*>(dynamic_cast<const void*>(&options)), bytes};
  }
};

// By name, as the class saves them: {"lr", "0.1"}. Of a class that does not save them the learning rate, if it has one.
std::vector<std::pair<std::string, std::string>> option_words(
    const torch::optim::OptimizerOptions& options);

// The hash of one group's options. Options of LibTorch's and this library's classes take some nanoseconds. Those of another
// class are hashed as it saves them, which takes 0.1 ms, when their memory is another one than the last time.
class OptionsHash {
 public:
  uint64_t of(const torch::optim::OptimizerOptions& options, const OptionsClass& of_class);

 private:
  std::string bytes_;  // that hash_ was made of
  uint64_t hash_ = 0;
  bool saves_ = true;  // the class saves them
};

}  // namespace zeropage::zero
