#include "saving/detail/state_saving.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include "optim/split_values.h"
#include "saving/detail/collective_errors.h"
#include "saving/detail/element_runs.h"
#include "zero/averaged_pages.h"
#include "zero/model_parts.h"
#include "zeropage/weight_average.h"

namespace zeropage::saving {
namespace {

using nlohmann::json;
using state::ChecksumPiece;

// The part of the page that this rank writes: its shard, also where every rank has the whole page. Among several groups the
// first one writes.
Range written_part(const zero::ParameterPages& pages, size_t page) {
  if (pages.worlds().group() > 0) return {};
  return pages.layouts()[page].shard(pages.shards(page).rank());
}

bool is_first_of_slices(const zero::ParameterPages& pages) {
  return pages.tensor_world() == nullptr || pages.tensor_world()->rank() == 0;
}

// Where ranks have slices of parameters, the first one writes what all of them have; where two stages have a
// parameter, the first.
bool writes(const zero::ParameterPages& pages, const zero::PlacedParameter& placed) {
  if (placed.parameter.counts_elsewhere) return false;
  return placed.parameter.slice || is_first_of_slices(pages);
}

template <typename Visit>
void for_each_written(const ModelRef& model, size_t page, const Visit& visit) {
  for (const size_t index : model->parameters().of_page(page)) {
    const zero::PlacedParameter& placed = model->parameters()[index];
    if (writes(*model->sharded().pages, placed)) visit(placed);
  }
}

// values: of elements of the page from `first` on, all that are in `range`.
void put_runs(const zero::PlacedParameter& placed, const Range& range, const at::Tensor& values,
              int64_t first, const PlannedFile& file, const std::string& tensor, StateSink& sink) {
  for_each_run(placed, range, [&](const ElementRun& run) {
    sink.put(file.offset(tensor, run.in_whole), values.narrow(0, run.in_page - first, run.numel));
  });
}

// The values of the page's `range`, which lies in `owned_range`, in fp32 with all their digits.
at::Tensor exact_values(const zero::MasterWeights::Owned& owned, const Range& owned_range,
                        const Range& range) {
  const auto part = [&](const at::Tensor& of_owned) {
    return of_owned.narrow(0, range.begin - owned_range.begin, range.numel());
  };
  if (owned.copy.defined()) return part(owned.copy);
  if (!owned.remainders.defined()) return part(owned.values).to(at::kFloat);
  return optim::joined_values(part(owned.values), part(owned.remainders));
}

void collect_masters(const ModelRef& model, const PlannedFile& file, StateSink& sink) {
  const zero::ShardedModel& parts = model->sharded();
  const zero::ParameterPages& pages = *parts.pages;
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    if (!has_exact_values(parts, page)) continue;
    const Range owned_range = pages.owned(page);
    const Range range = intersection(written_part(pages, page), owned_range);
    parts.masters->visit_owned(page, zero::TierStorage::Use::kRead, [&](const auto& owned) {
      const at::Tensor exact = exact_values(owned, owned_range, range);
      for_each_written(model, page, [&](const zero::PlacedParameter& placed) {
        put_runs(placed, range, exact, range.begin, file,
                 state_name(placed.parameter.name(), kMasterState), sink);
      });
    });
  }
}

void collect_average(const ModelRef& model, WeightAverage& average, const PlannedFile& file,
                     StateSink& sink) {
  const zero::ParameterPages& pages = *model->sharded().pages;
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    const Range owned_range = pages.owned(page);
    const Range range = intersection(written_part(pages, page), owned_range);
    const at::Tensor& of_page = pages_of(average).average(page);
    for_each_written(model, page, [&](const zero::PlacedParameter& placed) {
      put_runs(placed, range, of_page, owned_range.begin, file,
               state_name(placed.parameter.name(), kAverageState), sink);
    });
  }
}

void put_steps(const StatePlan& plan, StateSink& sink) {
  for (const auto& [name, steps] : plan.steps) {
    sink.put(plan.optimizer->offset(state_name(name, kStepState)),
             {reinterpret_cast<const char*>(&steps), sizeof(steps)});
  }
}

int64_t bytes_of(const std::vector<ChecksumPiece>& pieces) {
  int64_t bytes = 0;
  for (const ChecksumPiece& piece : pieces) bytes += static_cast<int64_t>(piece.bytes);
  return bytes;
}

json to_json(const std::vector<ChecksumPiece>& pieces) {
  json list = json::array();
  for (const ChecksumPiece& piece : pieces) {
    list.push_back({piece.offset, piece.bytes, piece.crc});
  }
  return list;
}

state::FileEntry entry_of(const PlannedFile& file, const std::vector<json>& by_rank,
                          const char* key) {
  std::vector<ChecksumPiece> pieces;
  for (const json& of_rank : by_rank) {
    for (const json& piece : of_rank.at(key)) {
      pieces.push_back({piece.at(0), piece.at(1), piece.at(2)});
    }
  }
  return {file.name(), file.bytes(),
          state::join_pieces(file.name(), file.bytes(), std::move(pieces))};
}

// Buffers that another stage of a pipeline writes, by any of their names.
std::unordered_set<std::string> buffers_elsewhere(const zero::ParameterPages& pages) {
  std::unordered_set<std::string> names;
  const auto& part = pages.part();
  if (!part) return names;
  for (const TensorOfModel& of : part->buffers) {
    if (of.rank != part->ranks.rank()) names.insert(of.names.begin(), of.names.end());
  }
  return names;
}

}  // namespace

void collect_weights(const ModelRef& model, const StatePlan& plan, StateSink& sink) {
  const at::NoGradGuard no_grad;
  const zero::ShardedModel& sharded = model->sharded();
  const zero::ParameterPages& pages = *sharded.pages;
  const auto name_of = [&](const zero::NamedParameter& named) {
    return plan.prefix + named.name();
  };
  if (model->all_ranks().rank() == 0) sink.put(0, plan.weights.prefix());
  // A stage of a pipeline has buffers of its own, and some that the first stage with each writes.
  const std::unordered_set<std::string> elsewhere = buffers_elsewhere(pages);
  if (model->world().rank() == 0 && is_first_of_slices(pages)) {
    for (const zero::NamedParameter& buffer : model->buffers()) {
      if (buffer.tensor.numel() == 0 || elsewhere.contains(buffer.name())) continue;
      const at::ScalarType dtype = saved_dtype(buffer.tensor.scalar_type(), plan.weights_as);
      sink.put(plan.weights.offset(name_of(buffer)),
               buffer.tensor.to(dtype).contiguous().view({-1}));
    }
  }
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    const Range owned_range = pages.owned(page);
    const Range range = intersection(written_part(pages, page), owned_range);
    const at::ScalarType dtype = pages.layouts()[page].dtype;
    const at::ScalarType saved_as = saved_dtype(dtype, plan.weights_as);
    if (plan.weights_as == WeightsAs::kAverage) {
      const at::Tensor values = pages_of(*plan.average).average(page).to(saved_as);
      for_each_written(model, page, [&](const zero::PlacedParameter& placed) {
        put_runs(placed, range, values, owned_range.begin, plan.weights, name_of(placed.parameter),
                 sink);
      });
      continue;
    }
    const bool widens = saved_as != dtype;
    sharded.masters->visit_owned(page, zero::TierStorage::Use::kRead, [&](const auto& owned) {
      const at::Tensor values = widens ? exact_values(owned, owned_range, range) : owned.values;
      const int64_t first = widens ? range.begin : owned_range.begin;
      for_each_written(model, page, [&](const zero::PlacedParameter& placed) {
        put_runs(placed, range, values, first, plan.weights, name_of(placed.parameter), sink);
      });
    });
  }
}

void collect_optimizer(const ModelRef& model, ShardedOptimizer& optimizer, const StatePlan& plan,
                       StateSink& sink) {
  const at::NoGradGuard no_grad;
  const zero::ParameterPages& pages = *model->sharded().pages;
  const PlannedFile& file = *plan.optimizer;
  if (model->all_ranks().rank() == 0) {
    sink.put(0, file.prefix());
    put_steps(plan, sink);
  }
  collect_masters(model, file, sink);
  if (plan.average != nullptr) collect_average(model, *plan.average, file, sink);
  // State by state, as they lie in the file.
  std::vector<zero::OwnedState> of_page;
  const auto put_page = [&](size_t page) {
    const Range range = written_part(pages, page);
    const int64_t owned_begin = pages.owned(page).begin;
    std::vector<std::string> names;
    for (const zero::OwnedState& owned : of_page) {
      for (const auto* const tensors : {&owned.tensors, &owned.whole_tensors}) {
        for (const auto& [name, values] : *tensors) {
          if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
        }
      }
    }
    for (const std::string& name : names) {
      for (const zero::OwnedState& owned : of_page) {
        const zero::PlacedParameter& placed = model->parameters()[owned.parameter];
        if (!writes(pages, placed)) continue;
        const int64_t first = owned_begin + owned.range.begin;
        for (const zero::OwnedState::Tensor& tensor : owned.tensors) {
          if (tensor.name != name) continue;
          put_runs(placed, intersection(range, {first, first + owned.range.numel()}), tensor.values,
                   first, file, state_name(placed.parameter.name(), name), sink);
        }
        // The rank with the parameter's first element writes what all that have a part have.
        const bool has_first = range.begin <= placed.range.begin && placed.range.begin < range.end;
        for (const zero::OwnedState::Tensor& tensor : owned.whole_tensors) {
          if (tensor.name != name || !has_first) continue;
          sink.put(file.offset(state_name(placed.parameter.name(), name)), tensor.values.view(-1));
        }
      }
    }
    of_page.clear();
  };
  updates_of(optimizer).visit_states(
      zero::StateAccess::kRead, [&](size_t, zero::OwnedState& owned) { of_page.push_back(owned); },
      put_page);
}

SharedSave::SharedSave(comm::World texts, std::filesystem::path target,
                       const state::RunToken* token)
    : texts_(std::move(texts)), target_(std::move(target)), token_(token) {}

SharedSave::~SharedSave() = default;

std::filesystem::path SharedSave::create(const StatePlan& plan) {
  const json folder = settle(texts_, "saving " + target_.string(), nullptr, nullptr, [&](auto&) {
    const auto held = token_ == nullptr ? nullptr : token_->hold();
    state_ = std::make_unique<state::NewState>(
        target_, token_ == nullptr ? "" : std::to_string(token_->number()));
    state_->create_file(plan.weights.name(), plan.weights.bytes());
    if (plan.optimizer) state_->create_file(plan.optimizer->name(), plan.optimizer->bytes());
    return json(state_->directory().string());
  });
  return folder.get<std::string>();
}

SavedReport SharedSave::commit(const StatePlan& plan, const Pieces& pieces,
                               const std::exception_ptr& error, bool update_latest,
                               const state::Keep& keep) {
  const json own = {{"optimizer", to_json(pieces.optimizer)}, {"weights", to_json(pieces.weights)}};
  SavedReport report{.directory = target_,
                     .step = plan.step,
                     .bytes = static_cast<int64_t>(plan.bytes()),
                     .bytes_of_rank = bytes_of(pieces.weights) + bytes_of(pieces.optimizer)};
  const auto end = c10::make_scope_exit([&] { state_.reset(); });
  // Told instead of what ranks met in a folder that a newer run has removed. The folder is not held for as long
  // as the slowest rank takes.
  const std::exception_ptr taken = error_of([&] {
    if (token_ != nullptr) token_->hold();
  });
  const std::exception_ptr first = taken ? taken : error;
  settle(texts_, "saving " + target_.string(), own, first, [&](const auto& by_rank) -> json {
    const auto held = token_ == nullptr ? nullptr : token_->hold();
    state::Manifest manifest{.step = plan.step, .content = plan.content};
    if (plan.optimizer) {
      manifest.files.push_back(entry_of(*plan.optimizer, by_rank, "optimizer"));
    }
    manifest.files.push_back(entry_of(plan.weights, by_rank, "weights"));
    state_->commit(manifest, update_latest);
    report.notes = state_->notes();
    if (held && !held->note().empty()) report.notes.push_back(held->note());
    const auto removed = state::remove_old_states(target_.parent_path(), keep);
    report.notes.insert(report.notes.end(), removed.begin(), removed.end());
    return nullptr;
  });
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  return report;
}

SavedReport save_now(SharedSave& save, const StatePlan& plan, const ModelRef& model,
                     ShardedOptimizer* optimizer, const SaveOptions& options,
                     const state::Keep& keep) {
  const std::filesystem::path folder = save.create(plan);
  SharedSave::Pieces pieces;
  const auto write = [&](const PlannedFile& file, const auto& collect) {
    FileSink sink(folder / file.name(), options.direct_io);
    collect(sink);
    return sink.finish();
  };
  const std::exception_ptr error = error_of([&] {
    pieces.weights = write(plan.weights, [&](auto& to) { collect_weights(model, plan, to); });
    if (optimizer == nullptr) return;
    pieces.optimizer =
        write(*plan.optimizer, [&](auto& to) { collect_optimizer(model, *optimizer, plan, to); });
  });
  return save.commit(plan, pieces, error, options.update_latest, keep);
}

}  // namespace zeropage::saving
