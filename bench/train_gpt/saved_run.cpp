#include "bench/train_gpt/saved_run.h"

#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/state_folder.h"

namespace train_gpt {
namespace {

using zeropage::memory::format_bytes;

// What the order of the samples follows from.
std::map<std::string, std::string> values_of(const Flags& flags, const TextData& data) {
  return {{"text", data.description()},
          {"seed", std::to_string(flags.seed)},
          {"sequence", std::to_string(flags.model.sequence)}};
}

}  // namespace

SavedRun::SavedRun(const Flags& flags, const TextData& data,
                   zeropage::DistributedDataParallelBase& model,
                   zeropage::ShardedOptimizer& optimizer, zeropage::Accumulator& accumulator,
                   zeropage::SurvivingRun* surviving)
    : flags_(flags), model_(model), optimizer_(optimizer), surviving_(surviving) {
  run_.accumulator = &accumulator;
  run_.values = values_of(flags, data);
  // Before a state is loaded: from here on no former start of this run saves any more.
  if (flags.state.saves()) {
    saver_ = std::make_unique<zeropage::StateSaver>(flags.state.folder, model.all_ranks(),
                                                    flags.state.saver);
  }
  const bool is_back = surviving_ != nullptr && surviving_->resume(model_, optimizer_, run_);
  if (is_back) {
    description_ = c10::str("back at step ", run_.step, ": ", surviving_->restarts().back().why);
  } else if (!flags.state.resume.empty()) {
    resume(data);
  }
  run_.values.erase("fits");
  if (!flags.fit.description.empty()) run_.values["fits"] = flags.fit.description;
  if (!saver_) return;
  // A run of its own would be refused its first save.
  const auto newest = zeropage::state::newest_step_in(flags.state.folder);
  ZP_CHECK(!newest || *newest <= run_.step || !flags.state.resume.empty() || is_back, "--save ",
           flags.state.folder, ": has step-", newest.value_or(0), " of another run; give --resume ",
           flags.state.folder, " to go on with it, or another folder");
  zeropage::check_can_save(flags.state.folder, model, optimizer);
}

void SavedRun::resume(const TextData& data) {
  const auto expected = values_of(flags_, data);
  const zeropage::LoadReport report =
      zeropage::load_state(flags_.state.resume, model_, optimizer_, run_, flags_.state.load);
  for (const auto& [name, value] : expected) {
    ZP_CHECK(run_.values[name] == value, "--resume ", report.directory.string(), ": its run has ",
             name, " \"", run_.values[name], "\", this one \"", value,
             "\", so the samples would be others; give it the same --data, --seed and --sequence");
  }
  ZP_CHECK(run_.step < flags_.steps, "--steps ", flags_.steps, ": the state of --resume ",
           report.directory.string(), " has made ", run_.step, " of them; raise --steps");
  description_ = c10::str("resumed ", report.directory.string(), ", step ", run_.step);
  for (const std::string& note : report.notes) description_ += "\n  " + note;
  // Masks are drawn anew where the state's generators are of other ranks.
  if (flags_.model.dropout == 0 || report.random_goes_on) return;
  const auto seed = splitmix64(flags_.seed) + static_cast<uint64_t>(run_.step);
  torch::manual_seed(splitmix64(splitmix64(seed) + static_cast<uint64_t>(model_.world().rank())));
}

int SavedRun::end_step(const Progress& progress) {
  ++run_.step;
  run_.samples += flags_.samples_per_step(model_.world().size() / flags_.context);
  // What comes behind the last step trains nothing that would be lost.
  if (surviving_ != nullptr && run_.step < flags_.steps) {
    surviving_->end_step(model_, optimizer_, run_);
  }
  if (saver_ == nullptr) return 0;
  const int signal = flags_.state.saver.on_signal ? saver_->stop_signal() : 0;
  if (signal != 0 || (flags_.state.every > 0 && run_.step % flags_.state.every == 0))
    save(progress);
  return signal;
}

void SavedRun::finish(const Progress& progress) {
  if (saver_ == nullptr) return;
  if (saved_step_ != run_.step) save(progress);
  saver_->wait();
  note_last(progress);
}

void SavedRun::save(const Progress& progress) {
  saver_->wait();
  note_last(progress);
  const double stood_still = saver_->save(model_, optimizer_, run_);
  saved_step_ = run_.step;
  saves_.push_back({{"step", run_.step}, {"blocked_seconds", stood_still}});
}

void SavedRun::note_last(const Progress& progress) {
  const auto& last = saver_->last();
  if (!last || saves_.empty() || saves_.back().contains("bytes")) return;
  saves_.back()["bytes"] = last->bytes;
  saves_.back()["seconds"] = last->seconds;
  std::string line = c10::str("saved as ", last->directory.string(), ": ",
                              format_bytes(last->bytes), " in ", last->seconds, " s");
  for (const std::string& note : last->notes) line += "\n  " + note;
  progress.tell(last->step - 1, line);
}

}  // namespace train_gpt
