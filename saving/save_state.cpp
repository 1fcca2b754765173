#include "saving/detail/state_saving.h"
#include "zero/model_parts.h"
#include "zeropage/saving.h"

namespace zeropage {
namespace {

SavedReport save(const std::filesystem::path& directory, const ModelRef& model,
                 ShardedOptimizer* optimizer, const RunState& run, const SaveOptions& options) {
  const comm::World texts = model->all_ranks().beside("state", options.deadline);
  saving::SharedSave shared(texts, directory);
  const saving::StatePlan plan = saving::plan_state(texts, model, optimizer, run, options);
  return saving::save_now(shared, plan, model, optimizer, options, /*keep=*/{});
}

}  // namespace

SavedReport save_state(const std::filesystem::path& directory, const TrainedModule& model,
                       ShardedOptimizer& optimizer, const RunState& run,
                       const SaveOptions& options) {
  return save(directory, model.with(optimizer), &optimizer, run, options);
}

SavedReport save_weights(const std::filesystem::path& directory,
                         const DistributedDataParallelBase& model, const RunState& run,
                         const SaveOptions& options) {
  return save(directory, model, nullptr, run, options);
}

SavedReport save_weights(const std::filesystem::path& directory, const TrainedModule& model,
                         const ShardedOptimizer& optimizer, const RunState& run,
                         const SaveOptions& options) {
  return save(directory, model.with(optimizer), nullptr, run, options);
}

}  // namespace zeropage
