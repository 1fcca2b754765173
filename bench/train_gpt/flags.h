// The command line of train_gpt: its own flags, and those of the library's options, which their tables make
// (zeropage/option_fields.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "bench/train_gpt/checkpoint_flags.h"
#include "bench/train_gpt/own_forms.h"
#include "examples/byte_gpt/gpt.h"
#include "zero/plan/byte_plan.h"
#include "zeropage/accumulator.h"
#include "zeropage/options.h"
#include "zeropage/saving.h"
#include "zeropage/schedule.h"

namespace train_gpt {

// Options of --communicator simulated.
struct SimulationFlags {
  int ranks_per_host = 8;
  // Latency in microseconds, GB (10^9 bytes) a second.
  std::pair<double, double> within_host{1, 10};
  std::pair<double, double> between_hosts{25, 12.5};
};

// Training state on disk.
struct StateFlags {
  std::string folder;  // of the run; "": nothing is saved
  int64_t every = 0;   // steps; 0: at the end alone
  zeropage::StateSaverOptions saver;

  std::string resume;  // a state or a run's folder; "": from the beginning
  zeropage::LoadOptions load;

  bool saves() const { return !folder.empty(); }
};

// Layers of experts in the place of MLPs (zeropage/experts.h).
struct ExpertFlags {
  int64_t experts = 0;  // of a block; 0: it has an MLP
  int64_t active = 2;   // of a token
  int64_t hidden =
      0;  // features between an expert's matrices; 0 on the command line: 4 d_model / active
  double balance_loss = 0.01;
  double capacity = 0;  // ExpertsOptions::capacity_factor; 0: unset
  int parallel = 1;     // ranks that have some of the experts each
  std::string travel = "tokens";

  bool any() const { return experts > 0; }
};

// What may be chosen below --device-memory and --host-memory (bench/train_gpt/fitting.h).
struct FitFlags {
  std::string nvme_directory;
  int64_t nvme_bytes = 0;  // 0: what the disk has
  // Those that the command line says itself.
  std::optional<int> stage;
  bool has_policy = false;  // of checkpointing

  std::string description;  // what was chosen, in a line; "" for nothing
};

// An infinity in the gradient of a block's first matrix, for tests; all counted from 0.
struct Injection {
  int rank = 0;
  int64_t layer = 0;
  int64_t micro_step = 0;
  int64_t step = 0;
};

// The steps whose bytes are recorded, and where they are shown.
struct ProfileFlags {
  std::string report;  // NAME.html or NAME.json; "": none
  std::string trace;   // "": none
  std::string steps;   // "A-B", from 1 on, both included; "": the last three

  bool is_asked_for() const { return !report.empty() || !trace.empty(); }
  // The first and the last, counted from 0, of a run of so many. Throws for steps that it does not have.
  std::pair<int64_t, int64_t> range(int64_t steps_of_run) const;
};

struct Flags {
  std::string data = "auto";
  GptConfig model;
  int64_t batch = 8;         // samples of a micro-batch
  int64_t global_batch = 0;  // samples a step over all ranks; 0: what the others make of it
  int64_t steps = 200;
  double seconds = 0;  // after which the steps end, as the first ones say; 0: as many as there are
  uint64_t seed = 0;
  double lr = 1e-3;
  int64_t warmup_steps = 20;  // in which the learning rate rises to lr, in equal parts
  std::string optimizer = "adamw";
  int ranks = 1;
  int tensor = 1;    // ranks that compute a sample together
  int pipeline = 1;  // ranks that have some of the layers each
  int context = 1;   // ranks that have some of a sample's tokens each
  std::string context_form = "ring";
  ExpertFlags experts;
  // Whether ranks have some of the experts each, to which tokens travel, as --expert-travel came to.
  bool experts_are_cut = false;
  std::string schedule = "1f1b";
  int chunks = 2;  // stages a rank, with the schedule "interleaved"
  std::string timeline_path;
  int threads = 0;  // 0: the cores of this host shared among its ranks
  std::string device = "auto";
  bool deterministic = false;
  bool probe = false;  // look for slow ranks before the run
  // Steps between copies of the training state, for ranks that are started again; 0: none are made.
  int64_t buddy_every = 0;
  // How often a step that does not fit the memory is made to take less; 0: the run ends.
  int memory_rungs = 0;
  zeropage::Options options;
  zeropage::AccumulatorOptions accumulator;
  OwnForms forms;  // once they are parsed, the two above have what they come to
  std::optional<Injection> injection;
  double peak_tflops = 0;  // 0: the device's, where it is known
  StateFlags state;
  ProfileFlags profile;
  CheckpointFlags checkpointing;
  FitFlags fit;
  std::string deferred = "auto";
  std::string communicator = "auto";
  double deadline_seconds = 60;
  SimulationFlags simulation;
  int64_t sample = 0;
  std::string json_path;
  std::string memory_snapshot_path;

  // Where ranks train, or what simulated ones stand for.
  torch::DeviceType device_type() const;
  bool simulates_cuda() const { return simulates() && device == "cuda"; }
  // Dtype of parameters and activations.
  torch::ScalarType dtype() const { return options.compute_dtype.value_or(torch::kFloat32); }
  // Ranks that have a model together.
  int ranks_of_model() const { return tensor * pipeline; }
  // Ranks that train with a sample.
  int ranks_of_sample() const { return ranks_of_model() * context; }
  int chunks_of_rank() const { return schedule == "interleaved" ? chunks : 1; }
  zeropage::parallel::ScheduleKind schedule_kind() const;
  // The learning rate of a step, counted from 0 and over all starts of the run.
  double learning_rate(int64_t step) const {
    if (step >= warmup_steps) return lr;
    return lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  // Samples a step over all ranks. data_ranks: that have samples of their own.
  int64_t samples_per_step(int data_ranks) const {
    return batch * accumulator.micro_steps * data_ranks;
  }

  bool simulates() const { return communicator == "simulated"; }

  // Whether the model is constructed without memory for its parameters. On CUDA one that is moved there leaves holes.
  bool constructs_deferred() const {
    const bool is_better =
        zeropage::zero::shards_parameters(options) || device_type() == torch::kCUDA;
    const bool suits = simulates_cuda() || (tensor == 1 && is_better);
    return deferred == "on" || (deferred == "auto" && suits);
  }

  // Whether what is below limits of memory is to be chosen.
  bool has_limits() const { return !forms.device_memory.empty() || !forms.host_memory.empty(); }

  // Every flag with its value, by its name on the command line.
  nlohmann::json to_json() const;
};

// Features between an expert's matrices, where the command line leaves them open too.
int64_t hidden_of_experts(const Flags& flags);

// The exit code to end with at once (help, usage errors), or nothing: then `flags` is filled in.
std::optional<int> parse_flags(int argc, char** argv, Flags& flags);

}  // namespace train_gpt
