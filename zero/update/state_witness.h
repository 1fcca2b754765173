// Entries in an optimizer's state() for scripts that look there, since the states themselves lie in shards.
//
// torch::optim::Optimizer gives its map to everybody, so scripts clear it, and zero moments in a loop over it. On an empty
// map both would do nothing, without a word. After the first step the map has an entry for each parameter, of the class's
// own type. Its tensors throw whatever an operator does with them, its count of steps is -1, and an entry that is taken away,
// put in or changed is seen at the next step, and when states are saved or read. A class that is not LibTorch's or ours has no entries, and there only what is put in is seen.
//
// Lifetime: within the optimizer's. Threads: the training thread. Cost: 100 bytes a parameter, and at each step a pass over
// the map's entries.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

namespace zeropage::zero {

class StateWitness {
 public:
  // class_name: of the update's class, as "torch::optim::AdamW".
  StateWitness(torch::optim::Optimizer& optimizer, std::string class_name);

  // Entries for all parameters of the optimizer's groups.
  void enter();
  // Throws where the map has others than were entered. who: for the error.
  void check(const char* who);

 private:
  // Whether the map has what note_entries() found there.
  bool is_as_noted() const;
  void note_entries();

  torch::optim::Optimizer& optimizer_;
  const std::string class_name_;
  at::Tensor refusing_;
  // The sum of the entries' addresses, so that another entry for the same parameter is seen too.
  uint64_t sum_ = 0;
  size_t groups_ = 0;  // that were entered
  // What note_entries() found: the map's entries in its own order, which stays as long as they do; those that are not null by
  // address, in which order memory brings them soonest; and the sum of their addresses.
  std::vector<const torch::optim::OptimizerParamState*> entries_;
  std::vector<torch::optim::OptimizerParamState*> by_address_;
  uint64_t noted_sum_ = 0;
};

}  // namespace zeropage::zero
