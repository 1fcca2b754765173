#include "saving/detail/run_json.h"

#include "zero/update/archive_values.h"
#include "zeropage/accumulator.h"
#include "zeropage/check.h"

namespace zeropage::saving {
namespace {

using nlohmann::json;

// LibTorch's schedulers keep their position to themselves and their heirs.
struct OpenScheduler : torch::optim::LRScheduler {
  static unsigned& step_count(torch::optim::LRScheduler& scheduler) {
    return scheduler.*(&OpenScheduler::step_count_);
  }
};

std::string said_by(const std::string& name) {
  return "RunState::extras[\"" + name + "\"]";
}

std::string saved_text(const std::string& name, const RunExtra& extra) {
  ZP_CHECK(extra.save && extra.load, said_by(name), ": expected both functions, save and load");
  std::string text = extra.save();
  try {
    static_cast<void>(json(text).dump());
  } catch (const json::exception&) {
    ZP_THROW(said_by(name), ": saves text that is no UTF-8; write bytes as hexadecimal digits");
  }
  return text;
}

}  // namespace

json progress_json(const RunState& run) {
  json progress = {{"samples", run.samples}, {"values", run.values}};
  if (run.accumulator != nullptr) {
    const auto& scaler = run.accumulator->loss_scaler();
    progress["loss_scaler"] = zero::saved_json("LossScaler", [&](auto& to) { scaler.save(to); });
    if (const auto* const spikes = run.accumulator->norm_spikes()) {
      progress["norm_spikes"] = zero::saved_json("NormSpikes", [&](auto& to) { spikes->save(to); });
    }
  }
  if (run.scheduler != nullptr) {
    progress["scheduler"] = {{"step_count", OpenScheduler::step_count(*run.scheduler)}};
  }
  for (const auto& [name, extra] : run.extras) progress["extras"][name] = saved_text(name, extra);
  return progress;
}

void take_over(const json& progress, RunState& run) {
  run.samples = progress.at("samples");
  run.values = progress.at("values").get<std::map<std::string, std::string>>();
  if (run.accumulator != nullptr && progress.contains("loss_scaler")) {
    auto& scaler = run.accumulator->loss_scaler();
    zero::load_json(progress["loss_scaler"], [&](auto& from) { scaler.load(from); });
  }
  if (run.accumulator != nullptr && run.accumulator->norm_spikes() != nullptr &&
      progress.contains("norm_spikes")) {
    auto& spikes = *run.accumulator->norm_spikes();
    zero::load_json(progress["norm_spikes"], [&](auto& from) { spikes.load(from); });
  }
  if (run.scheduler != nullptr && progress.contains("scheduler")) {
    OpenScheduler::step_count(*run.scheduler) = progress["scheduler"].at("step_count");
  }
  if (!progress.contains("extras")) return;
  for (const auto& [name, extra] : run.extras) {
    if (!progress["extras"].contains(name)) continue;
    try {
      extra.load(progress["extras"][name].get<std::string>());
    } catch (const std::exception& error) {
      ZP_THROW(said_by(name), ": does not take back what it saved: ", memory::message_of(error));
    }
  }
}

void match_extras(const json& progress, const RunState& run, LoadReport& report) {
  const json saved = progress.value("extras", json::object());
  for (const auto& [name, extra] : run.extras) {
    ZP_CHECK(extra.save && extra.load, said_by(name), ": expected both functions, save and load");
    if (!saved.contains(name)) report.missing.push_back(said_by(name));
  }
  for (const auto& [name, text] : saved.items()) {
    if (!run.extras.contains(name)) report.unexpected.push_back(said_by(name));
  }
}

}  // namespace zeropage::saving
