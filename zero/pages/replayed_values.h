// Whether the ranks' replays of a recorded constructor gave the same values, by their hashes.
//
// Ranks that replay the same random numbers need not send each other a byte. Other seeds, or processors whose kernels round
// otherwise, show here.
//
// Lifetime: the pages must outlive it. Threads: the training thread.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include <ATen/core/TensorBody.h>

#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

class ReplayedValues {
 public:
  explicit ReplayedValues(const ParameterPages& pages) : pages_(pages) {}

  // values: [numel], on the host; of experts that are cut over ranks, those of all of them.
  void note(size_t storage, const at::Tensor& values);

  // The storages whose values are not the same on all ranks, the same list on all of them. Rank 0 tells of the first on stderr, with
  // a rank that has others. Collective: a text of a hash, and one of all hashes where something differs.
  std::set<size_t> find_differing() const;

 private:
  std::set<size_t> find_differing_over(const comm::World& ranks, std::set<size_t> known) const;
  void tell(const comm::World& ranks, size_t storage, int rank, size_t count) const;

  const ParameterPages& pages_;
  std::map<size_t, uint64_t> hashes_;  // by storage
};

}  // namespace zeropage::zero
