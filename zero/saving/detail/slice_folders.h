// Where a model's parameters are slices, each rank of the tensor-parallel group has a state of its own, together
// with the ranks that have the same slices.
#pragma once

#include <filesystem>

#include "zero/distributed_data_parallel.h"

namespace zeropage::detail {

// Throws on all ranks of the group alike where two of them name the same folder: one state would replace the
// other's, or be loaded as the other's. Collective over the group.
void check_folders_of_slices(const DistributedDataParallelBase& model,
                             const std::filesystem::path& folder);

}  // namespace zeropage::detail
