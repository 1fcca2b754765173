#include <functional>
#include <set>
#include <utility>

#include <c10/util/StringUtil.h>

#include "saving/detail/collective_errors.h"
#include "saving/detail/name_lists.h"
#include "saving/detail/plain_weights.h"
#include "saving/detail/run_json.h"
#include "saving/detail/saved_generators.h"
#include "saving/detail/state_loading.h"
#include "saving/detail/state_plan.h"
#include "zero/averaged_pages.h"
#include "zero/model_parts.h"
#include "zero/update/archive_values.h"
#include "zeropage/check.h"
#include "zeropage/saving.h"
#include "zeropage/state_folder.h"
#include "zeropage/weight_average.h"

namespace zeropage {
namespace {

using nlohmann::json;
using saving::error_of;
using saving::list_of;
using saving::throw_alike;
using state::SavedState;
using state::StateError;

// Rank 0 looks for all.
void find(const comm::World& texts, const std::filesystem::path& path, const LoadOptions& options,
          LoadReport& report) {
  const json found =
      saving::settle(texts, "loading " + path.string(), nullptr, nullptr, [&](auto&) {
        if (!options.fall_back) {
          return json{{"directory", state::find_state(path).string()}, {"refused", json::array()}};
        }
        const state::FoundState valid = state::find_valid_state(path);
        return json{{"directory", valid.directory.string()}, {"refused", valid.refused}};
      });
  report.directory = found.at("directory").get<std::string>();
  for (const std::string refused : found.at("refused")) {
    report.notes.push_back("an older state is loaded, as the newer is damaged: " + refused);
  }
}

void check_strict(const SavedState& saved, const LoadReport& report) {
  if (report.missing.empty() && report.unexpected.empty()) return;
  throw StateError(
      saved.directory().string(), 0,
      "the state is of another model or optimizer:" + list_of("missing in it", report.missing) +
          list_of("unexpected", report.unexpected) +
          "\nLoad what is there with LoadOptions::strict = false, give "
          "LoadOptions::names or prefix, or load_weights() alone");
}

// Union over ranks of what each found of what it owns.
void merge_names(const comm::World& texts, LoadReport& report) {
  const json own = {{"missing", report.missing}, {"unexpected", report.unexpected}};
  const json all = saving::settle(texts, "loading state", own, nullptr, [](const auto& by_rank) {
    json merged;
    for (const char* key : {"missing", "unexpected"}) {
      std::set<std::string> names;
      for (const json& of_rank : by_rank) {
        for (const std::string name : of_rank.at(key)) names.insert(name);
      }
      merged[key] = names;
    }
    return merged;
  });
  report.missing = all.at("missing").get<std::vector<std::string>>();
  report.unexpected = all.at("unexpected").get<std::vector<std::string>>();
}

// Whether the state's generators are for these ranks, which all ranks settle alike.
void settle_random(const comm::World& texts, const json& saved, const ModelRef& model,
                   LoadReport& report) {
  json own = saving::own_generators(model);
  // They are only compared.
  own["states"] = std::hash<std::string>()(own["states"].dump());
  const std::string reason =
      saving::settle(texts, "loading state", own, nullptr,
                     [&](const auto& by_rank) { return saving::reason_to_stay(saved, by_rank); });
  report.random_goes_on = reason.empty();
  if (!reason.empty()) report.notes.push_back(reason);
}

// What cannot be taken back once it has begun. Gathers nothing, so that a rank whose disk fails keeps
// none waiting.
void load_all(const SavedState& saved, const ModelRef& model, ShardedOptimizer* optimizer,
              RunState* run, saving::StateLoading& loading, LoadReport& report) {
  const json& content = saved.manifest().content;
  loading.load_weights();
  if (optimizer == nullptr) return;
  loading.load_optimizer();
  if (run != nullptr && run->average != nullptr) loading.load_average();
  report.step = saved.manifest().step;
  if (run != nullptr) {
    run->step = saved.manifest().step;
    saving::take_over(content.at("progress"), *run);
  }
  if (report.random_goes_on) {
    saving::set_generators(content.at("random"), saving::own_generators(model), model);
  }
}

LoadReport load(const std::filesystem::path& path, const ModelRef& model,
                ShardedOptimizer* optimizer, RunState* run, const LoadOptions& options) {
  saving::check_has_all_slices(model);
  const comm::World texts = model->all_ranks().beside("state", options.deadline);
  const zero::ShardedModel& sharded = model->sharded();
  LoadReport report;
  find(texts, path, options, report);
  std::unique_ptr<SavedState> saved;
  std::unique_ptr<saving::StateLoading> loading;
  throw_alike(texts, "loading state", error_of([&] {
                ZP_CHECK(!model->world().device().is_meta(),
                         "loading state: a simulated world has no values");
                ZP_CHECK(optimizer == nullptr || updates_of(*optimizer).updates(*sharded.pages),
                         "loading state: the optimizer is of another model; give this one's");
                WeightAverage* const average = run == nullptr ? nullptr : run->average;
                ZP_CHECK(average == nullptr || pages_of(*average).averages(*sharded.pages),
                         "loading state: RunState::average is of another model; give this one's");
                ZP_CHECK(average == nullptr || !average->is_swapped_in(),
                         "loading state: the model has the average; call "
                         "WeightAverage::swap_out() first");
                saved = std::make_unique<SavedState>(report.directory);
                loading = std::make_unique<saving::StateLoading>(*saved, model, optimizer, average,
                                                                 options);
                loading->match(report);
                if (run != nullptr) {
                  saving::match_extras(saved->manifest().content.at("progress"), *run, report);
                }
              }));
  report.step = saved->manifest().step;
  merge_names(texts, report);
  if (options.strict) check_strict(*saved, report);
  if (options.random && optimizer != nullptr) {
    settle_random(texts, saved->manifest().content.at("random"), model, report);
  }
  if (options.verify_first && !options.fall_back) {
    throw_alike(texts, "loading state", error_of([&] {
                  saved->verify(static_cast<uint64_t>(texts.rank()),
                                static_cast<uint64_t>(texts.size()));
                }));
  }
  sharded.writes->take_over("load_state()");
  try {
    throw_alike(texts, "loading state",
                error_of([&] { load_all(*saved, model, optimizer, run, *loading, report); }));
  } catch (const StateError& error) {
    throw StateError::as_said(std::string(error.what()) +
                                  "; the model is half loaded, load a whole state before training",
                              error.file(), error.offset());
  }
  for (size_t page = 0; page < sharded.pages->layouts().size(); ++page) {
    sharded.memory->start_gather_shards(page).wait();
  }
  sharded.writes->end_load();
  return report;
}

LoadReport load_weights_alone(const std::filesystem::path& path, const ModelRef& model,
                              const LoadOptions& options) {
  if (saving::is_plain_weights(model->all_ranks().beside("state", options.deadline), path)) {
    return saving::load_plain_weights(path, model, options);
  }
  return load(path, model, nullptr, nullptr, options);
}

}  // namespace

LoadReport load_state(const std::filesystem::path& path, const TrainedModule& model,
                      ShardedOptimizer& optimizer, RunState& run, const LoadOptions& options) {
  return load(path, model.with(optimizer), &optimizer, &run, options);
}

LoadReport load_state(const std::filesystem::path& path, const TrainedModule& model,
                      ShardedOptimizer& optimizer, const LoadOptions& options) {
  return load(path, model.with(optimizer), &optimizer, nullptr, options);
}

LoadReport load_weights(const std::filesystem::path& path, const DistributedDataParallelBase& model,
                        const LoadOptions& options) {
  return load_weights_alone(path, model, options);
}

LoadReport load_weights(const std::filesystem::path& path, const TrainedModule& model,
                        const ShardedOptimizer& optimizer, const LoadOptions& options) {
  return load_weights_alone(path, model.with(optimizer), options);
}

}  // namespace zeropage
