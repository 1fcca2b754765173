#include <functional>
#include <optional>
#include <set>
#include <utility>

#include <ATen/ATen.h>

#include "memory/storage.h"
#include "saving/detail/collective_errors.h"
#include "saving/detail/owned_weights.h"
#include "saving/detail/plain_weights.h"
#include "saving/detail/state_plan.h"
#include "saving/detail/weight_files.h"
#include "saving/detail/weight_matching.h"
#include "zero/model_parts.h"
#include "zeropage/check.h"
#include "zeropage/saving.h"

namespace zeropage {
namespace {

using saving::error_of;
using saving::throw_alike;
using state::StateError;
using Entry = WeightsSource::Entry;

constexpr const char* kTopic = "loading weights";

class SourceLoading {
 public:
  SourceLoading(WeightsSource& source, const ModelRef& model, const LoadOptions& options)
      : source_(source),
        model_(model),
        pages_(*model->sharded().pages),
        options_(options),
        matching_(source, options.names, options.prefix) {}

  void match(LoadReport& report) {
    for (const zero::PlacedParameter& placed : model_->parameters()) {
      const zero::NamedParameter& named = placed.parameter;
      parameters_.push_back(
          matching_.match(named.names, named.whole_sizes(), named.tensor.scalar_type()));
    }
    for (const zero::NamedParameter& buffer : model_->buffers()) {
      const auto* const entry =
          matching_.match(buffer.names, buffer.tensor.sizes(), buffer.tensor.scalar_type());
      buffers_.emplace_back(buffer, entry);
    }
    match_other_stages();
    const ModuleLoadReport found = matching_.report();
    report.missing = found.missing;
    report.unexpected = found.unexpected;
    matching_.check(found, options_.strict);
  }

  // What cannot be taken back once it has begun. Gathers nothing, so that a rank whose disk fails keeps none waiting.
  void load() {
    const at::NoGradGuard no_grad;
    for (size_t page = 0; page < pages_.layouts().size(); ++page) load_page(page);
    for (const auto& [buffer, entry] : buffers_) {
      const at::Tensor& tensor = buffer.tensor;
      if (entry == nullptr || tensor.numel() == 0) continue;
      const at::Tensor flat = at::empty({tensor.numel()}, entry->dtype);
      source_.read(*entry, 0, flat);
      memory::write_values(tensor, flat.view(tensor.sizes()),
                           "buffer \"" + buffer.names.front() + "\"");
    }
  }

 private:
  // What other stages of a pipeline have is no surprise here.
  void match_other_stages() {
    if (zero::pipeline_world_of(pages_) == nullptr) return;
    for (const auto& of_model : {pages_.part()->parameters, pages_.part()->buffers}) {
      for (const TensorOfModel& of : of_model) matching_.match(of.names, of.sizes, of.dtype);
    }
  }

  void load_page(size_t page) {
    model_->sharded().masters->visit_owned(
        page, zero::TierStorage::Use::kWrite, [&](const zero::MasterWeights::Owned& owned) {
          for (const size_t index : model_->parameters().of_page(page)) {
            if (parameters_[index] == nullptr) continue;
            const Entry& entry = *parameters_[index];
            const auto read = [&](int64_t first, const at::Tensor& to) {
              saving::read_as(entry.dtype, first, to, [&](int64_t at, const at::Tensor& piece) {
                source_.read(entry, at, piece);
              });
            };
            saving::fill_owned(pages_, model_->parameters()[index], owned,
                               {.dtype = entry.dtype, .rounded = read, .exact = read});
          }
        });
  }

  WeightsSource& source_;
  const ModelRef& model_;
  const zero::ParameterPages& pages_;
  const LoadOptions& options_;
  saving::WeightMatching matching_;
  std::vector<const Entry*> parameters_;  // by the model's index; null: stays as it is
  std::vector<std::pair<zero::NamedParameter, const Entry*>> buffers_;
};

// Ranks that read other files would train other weights.
std::string text_of(const WeightsSource& source) {
  std::string text;
  for (const Entry& entry : source.tensors()) {
    text += c10::str(entry.name, " ", entry.dtype, " ", at::IntArrayRef(entry.sizes), "\n");
  }
  return text;
}

LoadReport load(WeightsSource& source, const ModelRef& model, const LoadOptions& options) {
  saving::check_has_all_slices(model);
  const comm::World texts = model->all_ranks().beside("state", options.deadline);
  const zero::ShardedModel& sharded = model->sharded();
  LoadReport report{.directory = source.name()};
  std::optional<SourceLoading> loading;
  const std::exception_ptr error = error_of([&] {
    ZP_CHECK(!model->world().device().is_meta(), kTopic, ": a simulated world has no values");
    loading.emplace(source, model, options);
    loading->match(report);
  });
  const auto own = std::hash<std::string>()(text_of(source));
  saving::settle(texts, kTopic, own, error, [](const std::vector<nlohmann::json>& by_rank) {
    for (size_t rank = 1; rank < by_rank.size(); ++rank) {
      ZP_CHECK(by_rank[rank] == by_rank[0], kTopic, ": rank ", rank,
               " has other tensors than rank 0 in its source; give all ranks the same file");
    }
    return nlohmann::json();
  });
  sharded.writes->take_over("load_weights()");
  try {
    throw_alike(texts, kTopic, error_of([&] { loading->load(); }));
  } catch (const StateError& half) {
    throw StateError::as_said(
        std::string(half.what()) + "; the model is half loaded, load all of it before training",
        half.file(), half.offset());
  }
  for (size_t page = 0; page < sharded.pages->layouts().size(); ++page) {
    sharded.memory->start_gather_shards(page).wait();
  }
  sharded.writes->end_load();
  return report;
}

}  // namespace

namespace saving {

bool is_plain_weights(const comm::World& texts, const std::filesystem::path& path) {
  return saving::settle(texts, kTopic, nullptr, nullptr,
                        [&](const auto& /*by_rank*/) {
                          return nlohmann::json(saving::WeightFiles::is_plain(path));
                        })
      .get<bool>();
}

LoadReport load_plain_weights(const std::filesystem::path& path, const ModelRef& model,
                              const LoadOptions& options) {
  const comm::World texts = model->all_ranks().beside("state", options.deadline);
  std::unique_ptr<WeightsSource> source;
  throw_alike(texts, kTopic, error_of([&] { source = open_weights(path); }));
  return load(*source, model, options);
}

}  // namespace saving

LoadReport load_weights(WeightsSource& source, const DistributedDataParallelBase& model,
                        const LoadOptions& options) {
  return load(source, model, options);
}

LoadReport load_weights(WeightsSource& source, const TrainedModule& model,
                        const ShardedOptimizer& optimizer, const LoadOptions& options) {
  return load(source, model.with(optimizer), options);
}

}  // namespace zeropage
