// --offload-optimizer and what goes with it: what of the training state leaves the device.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "zero/offload_options.h"

namespace CLI {
class App;
}

namespace train_gpt {

struct OffloadFlags {
  std::string optimizer = "none";   // none, host or nvme:DIR
  std::string parameters = "none";  // likewise
  std::string step = "step";
  int64_t bytes = 0;  // the most that leave; 0: all
  int threads = 0;
  int64_t link_bytes_per_second = 0;

  bool any() const { return optimizer != "none" || parameters != "none"; }
  zeropage::OffloadOptions options() const;
  // Throws where they contradict each other or the stage.
  void check(int stage) const;
};

void add_offload(CLI::App& app, OffloadFlags& flags);
// By their names on the command line.
void write_offload(const OffloadFlags& flags, nlohmann::json& json);

}  // namespace train_gpt
