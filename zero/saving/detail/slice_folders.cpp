#include "zero/saving/detail/slice_folders.h"

#include <string>
#include <vector>

#include "memory/check.h"
#include "zero/setup/sharded_parameters.h"

namespace zeropage::detail {

void check_folders_of_slices(const DistributedDataParallelBase& model,
                             const std::filesystem::path& folder) {
  const comm::World* const group = sharded_parameters_of(model).pages->tensor_world();
  if (group == nullptr) return;
  const std::string own = (std::filesystem::absolute(folder) / "").lexically_normal().string();
  const std::vector<std::string> by_rank = group->gather_text("the folder of the state", own);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      ZP_CHECK(
          by_rank[rank] != by_rank[other], "state in ", by_rank[rank],
          ": expected a folder for each rank of a tensor-parallel group, as each has slices of its "
          "own, got the same on ranks ",
          other, " and ", rank, "; add the rank to its name, such as \"slice-", rank, "\"");
    }
  }
}

}  // namespace zeropage::detail
