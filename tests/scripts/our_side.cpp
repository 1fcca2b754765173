#include "tests/scripts/our_side.h"

#include <algorithm>
#include <mutex>

#include "tests/harness/ranks.h"
#include "tests/scripts/our_rank.h"

namespace zeropage::scripts {
namespace {

std::unique_ptr<OurRank> make_rank(const Script& script, const Setting& setting, World& world) {
  std::vector<comm::MeshAxis> axes{{"pipeline", setting.pipeline}, {"data", setting.data}};
  if (setting.expert > 1) axes.push_back({"expert", setting.expert});
  axes.push_back({"context", setting.context});
  axes.push_back({"tensor", setting.tensor});
  const Mesh mesh(world, axes);
  if (setting.is_alone) return make_alone_rank(script, setting, mesh);
  return setting.pipeline > 1 ? make_pipeline_rank(script, setting, mesh)
                              : make_whole_rank(script, setting, mesh);
}

std::vector<std::string> told(const std::vector<std::exception_ptr>& errors) {
  std::vector<std::string> words;
  for (const auto& error : errors) {
    if (error) words.push_back(testing::message_of(error));
  }
  std::stable_partition(words.begin(), words.end(),
                        [](const std::string& error) { return !is_a_consequence(error); });
  return words;
}

}  // namespace

bool is_a_consequence(const std::string& error) {
  return error.find("lost rank") != std::string::npos;
}

OurRun run_ours(const Script& script, const std::string& folder) {
  OurRun run;
  Begin begin;
  begin.folder = folder;
  Setting setting = script.settings.front();
  ComposedModule::Masks masks = ComposedModule::masks_of(script.seed, 4);
  while (true) {
    Begin next;
    std::mutex mutex;
    const auto errors = testing::try_ranks(setting.ranks(), [&](World& world) {
      const auto side = make_rank(script, setting, world);
      side->begin(begin, masks);
      const size_t at = side->run(begin.action);
      const bool goes_on = at < script.actions.size();
      const std::string state = folder + "/" + std::to_string(at);
      if (goes_on) side->save(state, world);
      const std::scoped_lock lock(mutex);
      side->leave_masks(masks);
      // The first along the other axes of each stage.
      if (world.rank() % (setting.ranks() / setting.pipeline) != 0) return;
      for (Observation& seen : side->take()) run.seen.push_back(std::move(seen));
      if (world.rank() != 0) return;
      next = side->end(at + 1);
      next.state = goes_on ? state : "";
      next.folder = folder;
    });
    run.errors = told(errors);
    if (!run.errors.empty() || next.state.empty()) return run;
    const auto which = static_cast<size_t>(script.actions[next.action - 1].which);
    setting = script.settings[which % script.settings.size()];
    begin = std::move(next);
  }
}

}  // namespace zeropage::scripts
