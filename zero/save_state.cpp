#include <utility>

#include "memory/check.h"
#include "zero/detail/state_saving.h"
#include "zero/detail/told_errors.h"
#include "zero/sharded_state.h"

namespace zeropage {
namespace {

using Clock = std::chrono::steady_clock;

int64_t bytes_of(const std::vector<state::ChecksumPiece>& pieces) {
  int64_t bytes = 0;
  for (const state::ChecksumPiece& piece : pieces) bytes += static_cast<int64_t>(piece.bytes);
  return bytes;
}

SavedReport save(const std::filesystem::path& directory, DataParallelBase& model,
                 ShardedOptimizer* optimizer, const RunState& run, const SaveOptions& options) {
  const auto start = Clock::now();
  const comm::World texts = model.world().beside("state", options.deadline);
  const detail::StatePlan plan = detail::plan_state(texts, model, optimizer, run);
  detail::SharedSave save(texts, directory);
  const std::filesystem::path folder = save.create(plan);
  detail::SharedSave::Pieces pieces;
  const std::exception_ptr error = detail::error_of([&] {
    detail::FileSink weights(folder / plan.weights.name(), options.direct_io);
    detail::collect_weights(model, plan, weights);
    pieces.weights = weights.finish();
    if (optimizer == nullptr) return;
    detail::FileSink states(folder / plan.optimizer->name(), options.direct_io);
    detail::collect_optimizer(model, *optimizer, plan, states);
    pieces.optimizer = states.finish();
  });
  SavedReport report{.directory = directory, .step = plan.step};
  report.notes = save.commit(plan, pieces, error, options.update_latest, /*keep=*/{});
  report.bytes = static_cast<int64_t>(plan.bytes());
  report.bytes_of_rank = bytes_of(pieces.weights) + bytes_of(pieces.optimizer);
  report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return report;
}

}  // namespace

SavedReport save_state(const std::filesystem::path& directory, DataParallelBase& model,
                       ShardedOptimizer& optimizer, const RunState& run,
                       const SaveOptions& options) {
  return save(directory, model, &optimizer, run, options);
}

SavedReport save_weights(const std::filesystem::path& directory, DataParallelBase& model,
                         const RunState& run, const SaveOptions& options) {
  return save(directory, model, nullptr, run, options);
}

}  // namespace zeropage
