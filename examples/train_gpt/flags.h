// The command line of train_gpt. A flag whose feature is not there yet is refused, never ignored.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "examples/train_gpt/checkpoint_flags.h"
#include "examples/train_gpt/gpt.h"
#include "examples/train_gpt/offload_flags.h"
#include "examples/train_gpt/state_flags.h"
#include "offload/state_format.h"

namespace train_gpt {

// Of --communicator simulated.
struct SimulationFlags {
  int ranks_per_host = 8;
  // Latency in microseconds, GB (10^9 bytes) a second.
  std::pair<double, double> within_host{1, 10};
  std::pair<double, double> between_hosts{25, 12.5};
};

// Beside --compute-dtype.
struct PrecisionFlags {
  std::string reduce_dtype = "auto";
  std::string accumulate_dtype = "auto";
  std::string update = "master";
  std::string optimizer_state = "fp32";
  std::string keep_fp32;  // pattern of module names; "": none
  std::string loss_scale = "auto";
};

// An infinity in the gradient of a block's first matrix, for tests; all counted from 0.
struct Injection {
  int rank = 0;
  int64_t layer = 0;
  int64_t micro_step = 0;
  int64_t step = 0;
};

struct Flags {
  std::string data = "auto";
  GptConfig model;
  int64_t batch = 8;         // samples of a micro-batch
  int64_t accumulate = 1;    // micro-batches a rank and step
  int64_t global_batch = 0;  // samples a step over all ranks; 0: what the others make of it
  int64_t steps = 200;
  uint64_t seed = 0;
  double lr = 1e-3;
  std::string optimizer = "adamw";
  int ranks = 1;
  int threads = 0;  // 0: the cores of this host shared among its ranks
  int stage = 1;
  std::string device = "auto";
  std::string compute_dtype = "fp32";
  PrecisionFlags precision;
  std::string reduce_micro_steps = "auto";
  int64_t gradient_budget_bytes = 0;  // 0: unset
  double clip_norm = 0;               // 0: none
  double spike_z = 0;                 // 0: spikes are not looked for
  bool world_invariant = false;
  std::optional<Injection> injection;
  bool deterministic = false;
  double peak_tflops = 0;              // 0: the device's, where it is known
  int64_t page_bytes = 0;              // 0: the device's
  int64_t parameter_budget_bytes = 0;  // 0: unset
  bool prefetch = true;
  std::string reshard = "use";
  OffloadFlags offload;
  StateFlags state;
  CheckpointFlags checkpointing;
  std::string deferred = "auto";
  std::string communicator = "auto";
  double deadline_seconds = 60;
  SimulationFlags simulation;
  int64_t sample = 0;
  std::string json_path;
  std::string memory_snapshot_path;

  // Where ranks train.
  torch::DeviceType device_type() const;
  // Of parameters and activations.
  torch::ScalarType dtype() const;
  // In what gradients travel, and in what they are kept.
  torch::ScalarType reduce_dtype() const;
  torch::ScalarType accumulate_dtype() const;
  // Beside a parameter: 4 with master weights, 2 where they are split, else 0.
  int64_t master_bytes() const;
  zeropage::offload::StateFormat optimizer_state() const;
  // Samples a step over all ranks.
  int64_t samples_per_step(int world_size) const { return batch * accumulate * world_size; }

  bool simulates() const { return communicator == "simulated"; }

  // Whether the model is constructed without memory for its parameters.
  bool constructs_deferred() const {
    return deferred == "on" || (deferred == "auto" && (stage == 3 || simulates()));
  }

  // Every flag with its value, by its name on the command line.
  nlohmann::json to_json() const;
};

// The exit code to end with at once (help, usage errors), or nothing: then `flags` is filled in.
std::optional<int> parse_flags(int argc, char** argv, Flags& flags);

}  // namespace train_gpt
