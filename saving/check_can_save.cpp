#include <memory>

#include "saving/detail/collective_errors.h"
#include "saving/detail/state_plan.h"
#include "state/folder_probe.h"
#include "zero/model_parts.h"
#include "zeropage/saving.h"

namespace zeropage {
namespace {

// What a state takes once the optimizer has all of its own. Collective over the stages of a pipeline.
uint64_t bytes_of_a_state(const saving::StatePlan& plan, const ModelRef& model,
                          const ShardedOptimizer& optimizer) {
  const zero::ShardedModel& sharded = model->sharded();
  uint64_t bytes = 0;
  const auto& parameters = model->parameters();
  for (size_t index = 0; index < parameters.size(); ++index) {
    const zero::NamedParameter& parameter = parameters[index].parameter;
    if (parameter.counts_elsewhere || plan.steps.contains(parameter.name())) continue;
    if (!parameter.tensor.requires_grad()) continue;
    // States in 8 bits are saved in fp32.
    const bool halves =
        state_format_of(sharded.options, parameter.tensor.numel()) == StateFormat::kBf16;
    const int64_t numel = c10::multiply_integers(parameter.whole_sizes());
    bytes += static_cast<uint64_t>(static_cast<double>(numel) *
                                   updates_of(optimizer).states_of_a_parameter()) *
             (halves ? 2 : sizeof(float));
  }
  const comm::World* const stages = zero::pipeline_world_of(*sharded.pages);
  if (stages != nullptr) bytes = static_cast<uint64_t>(stages->sum(static_cast<double>(bytes)));
  return plan.bytes() + bytes;
}

}  // namespace

void check_can_save(const std::filesystem::path& folder, const TrainedModule& trained,
                    ShardedOptimizer& optimizer, const SaveOptions& options) {
  const ModelRef model = trained.with(optimizer);
  const comm::World texts = model->all_ranks().beside("state", options.deadline);
  const saving::StatePlan plan = saving::plan_state(texts, model, &optimizer, {}, options);
  const uint64_t needed = bytes_of_a_state(plan, model, optimizer);
  const std::string topic = "whether " + folder.string() + " takes states";
  std::unique_ptr<state::FolderProbe> probe;  // rank 0's
  const auto begin = [&](const auto&) -> nlohmann::json {
    probe = std::make_unique<state::FolderProbe>(folder);
    probe->check_room(needed);
    return probe->file().string();
  };
  const nlohmann::json file = saving::settle(texts, topic, nullptr, nullptr, begin);
  saving::throw_alike(texts, topic,
                      saving::error_of([&] { state::write_to_probe(file.get<std::string>()); }));
}

}  // namespace zeropage
