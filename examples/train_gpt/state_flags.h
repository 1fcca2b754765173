// --save, --resume and what goes with them: training state on disk.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "zero/saving/state_saver.h"

namespace CLI {
class App;
}

namespace train_gpt {

struct StateFlags {
  std::string folder;  // of the run; "": nothing is saved
  int64_t every = 0;   // steps; 0: at the end alone
  int64_t keep_last = 0;
  int64_t keep_every = 0;
  bool asynchronous = true;
  bool on_sigterm = false;

  std::string resume;  // a state or a run's folder; "": from the beginning
  bool fall_back = false;

  bool saves() const { return !folder.empty(); }
  zeropage::StateSaverOptions saver_options() const;
  // Throws where one flag is nothing without another.
  void check() const;
};

void add_state(CLI::App& app, StateFlags& flags);
// By their names on the command line.
void write_state(const StateFlags& flags, nlohmann::json& json);

}  // namespace train_gpt
