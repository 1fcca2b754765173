// What scripts wrote to parameters, as hashes that ranks compare (zero/agreement/rank_agreement.h).
//
// A write by an operator raises the version of the parameter's tensor, and all of a parameter is hashed whose version
// is another than when ranks agreed last. A write through .data(), or by a kernel past the dispatcher, raises none.
// So one line of the cache in 64 of each parameter is hashed in each backward, other ones each time: that sees a write
// to all of a parameter at once, and one to a few elements within 64 backwards, where it stays. On an accelerator
// there is only the first.
//
// A sharded page is whole only for a while. What was written to it is hashed when it goes back to its shards.
//
// Lifetime: shares the pages. Threads: the training thread, or the one that runs backward;
// note_written_back() under the pager's mutex.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/page_memory.h"
#include "zero/pages/parameter_pages.h"
#include "zero/pages/replicated_values.h"

namespace zeropage::zero {

class UserWrites {
 public:
  UserWrites(std::shared_ptr<const ParameterPages> pages, std::shared_ptr<const PageMemory> memory);

  // The version of the parameter's tensor was raised, and not by the script.
  void note_own(size_t parameter) { ++own_raises_[parameter]; }
  // whole: of a sharded page that was written to. [padded_numel]
  void note_written_back(size_t page, const at::Tensor& whole);

  struct Hashes {
    uint64_t all = 0;         // what ranks with the same parameters have alike
    uint64_t whole = 0;       // what ranks with other slices of them have alike
    uint64_t of_experts = 0;  // what ranks with the same experts have alike, and is in neither
  };
  // Hashes what was written since forget(), and the sample of that round, where there is one and values are on the
  // host. Ranks give the same rounds, and all or none gives one.
  Hashes look(std::optional<uint64_t> sample_round);
  // Whether something was written since forget() that no look() has seen.
  bool has_news() const;
  // What look() has seen is the same on all ranks.
  void forget();

  // What was written to sharded pages. What others have is values (zero/pages/replicated_values.h).
  void describe(const TellValues& tell) const;

 private:
  int64_t raises(size_t parameter) const;
  void see_all();
  bool is_compared(size_t parameter) const;
  at::Tensor sampled_shard(size_t parameter) const;
  uint64_t sample(size_t parameter, uint64_t round) const;

  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<const PageMemory> memory_;
  // By parameter, how often its version was raised: by us; by scripts, when ranks agreed last and when looked at last.
  std::vector<int64_t> own_raises_;
  std::vector<int64_t> agreed_raises_;
  std::vector<int64_t> seen_raises_;
  // Hashes of what was written to sharded pages, by the first parameter of each storage: before the last look, and since.
  std::map<size_t, uint64_t> seen_back_;
  std::map<size_t, uint64_t> written_back_;
};

}  // namespace zeropage::zero
