// Parameters, or shards of them, that several ranks have and that must be the same bits on each: which ones they are, and hashes
// of all of them, to be compared over the ranks that have them (zero/agreement/rank_agreement.h).
//
// * What is whole on a rank: over all ranks that train the model together; experts over the ranks that have the same ones.
// * A shard: over the groups of Options::shard_within.
// * Both also over a tensor-parallel group, where the parameter is no slice, and over the two stages of a pipeline that have a
//   tied weight.
//
// Parameters on NVMe have no memory here and are left out. What a page has beside its parameters is no value of anyone's.
//
// Cost: one look at what is hashed, on the host by the loops' threads.
// Lifetime: shares the pages. Threads: the training thread, or the one that runs backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/TensorBody.h>

#include "zero/pages/page_memory.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

// Called with a name of what is compared, and what this rank has.
using TellValues = std::function<void(const std::string& what, const std::string& has)>;

class ReplicatedValues {
 public:
  ReplicatedValues(std::shared_ptr<const ParameterPages> pages,
                   std::shared_ptr<const PageMemory> memory)
      : pages_(std::move(pages)), memory_(std::move(memory)) {}

  // Whether groups have any shards alike.
  bool have_shards_alike() const;

  // Hashes of what the ranks along an axis have alike: where they differ, so do the values.
  struct Hashes {
    uint64_t data = 0;      // but for experts
    uint64_t experts = 0;   // over the ranks that have the same ones
    uint64_t replicas = 0;  // shards, over groups
    uint64_t tensor = 0;
    uint64_t tied = 0;
  };
  // REQUIRES: no page is dirty.
  Hashes hashes() const;

  void describe(const TellValues& tell) const;

 private:
  struct Sharers;
  Sharers sharers(size_t parameter) const;
  std::string words(size_t parameter) const;

  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<const PageMemory> memory_;
};

// 'slice 1 of parameter "head.weight"', for errors.
std::string quoted(const NamedParameter& parameter);

// What this rank has of the parameter, all of it or its shard, as it lies: 1-D. Undefined where it has no element, or no memory.
at::Tensor values_here(const ParameterPages& pages, const PageMemory& memory, size_t parameter);

}  // namespace zeropage::zero
