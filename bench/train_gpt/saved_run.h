// A run's states on disk, and its copies for restarts: where it goes on, and when it saves.
#pragma once

#include <memory>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/train_gpt/flags.h"
#include "bench/train_gpt/model.h"
#include "bench/train_gpt/progress.h"
#include "bench/train_gpt/text_data.h"
#include "zeropage/survive.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

class SavedRun {
 public:
  // Resumes where the flags say so; throws where the state is of another run. Collective.
  SavedRun(const Flags& flags, const TextData& data, zeropage::DistributedDataParallelBase& model,
           zeropage::ShardedOptimizer& optimizer, zeropage::Accumulator& accumulator,
           zeropage::SurvivingRun* surviving);

  // Steps that were made before; samples that were trained on.
  int64_t steps() const { return run_.step; }
  int64_t samples() const { return run_.samples; }
  // What loading said, in a line; "" where nothing was resumed.
  const std::string& description() const { return description_; }

  // After each step. Returns the signal that asks for the end, 0 for none; all is saved then. Collective.
  int end_step(const Progress& progress);
  // After the last one. Collective.
  void finish(const Progress& progress);

  // Each save's step, bytes, seconds, and the seconds for which training stood still.
  const nlohmann::json& saves() const { return saves_; }

 private:
  void resume(const TextData& data);
  void save(const Progress& progress);
  void note_last(const Progress& progress);

  const Flags& flags_;
  zeropage::DistributedDataParallelBase& model_;
  zeropage::ShardedOptimizer& optimizer_;
  zeropage::SurvivingRun* const surviving_;  // null: the run does not go on after a rank has died
  zeropage::RunState run_;
  std::unique_ptr<zeropage::StateSaver> saver_;  // null: nothing is saved
  int64_t saved_step_ = -1;
  std::string description_;
  nlohmann::json saves_ = nlohmann::json::array();
};

}  // namespace train_gpt
