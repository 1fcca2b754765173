#include "zero/saving/detail/state_saving.h"
#include "zero/saving/sharded_state.h"

namespace zeropage {
namespace {

SavedReport save(const std::filesystem::path& directory, DistributedDataParallelBase& model,
                 ShardedOptimizer* optimizer, const RunState& run, const SaveOptions& options) {
  const comm::World texts = model.all_ranks().beside("state", options.deadline);
  detail::SharedSave shared(texts, directory);
  const detail::StatePlan plan = detail::plan_state(texts, model, optimizer, run, options);
  return detail::save_now(shared, plan, model, optimizer, options, /*keep=*/{});
}

}  // namespace

SavedReport save_state(const std::filesystem::path& directory, DistributedDataParallelBase& model,
                       ShardedOptimizer& optimizer, const RunState& run,
                       const SaveOptions& options) {
  return save(directory, model, &optimizer, run, options);
}

SavedReport save_weights(const std::filesystem::path& directory, DistributedDataParallelBase& model,
                         const RunState& run, const SaveOptions& options) {
  return save(directory, model, nullptr, run, options);
}

}  // namespace zeropage
