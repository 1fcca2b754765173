// What a run leaves behind: the table for people and the JSON for programs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/train_gpt/expert_layers.h"
#include "bench/train_gpt/flags.h"
#include "bench/train_gpt/wire.h"
#include "offload/device_speed.h"
#include "zeropage/probe.h"
#include "zeropage/survive.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

struct RunFigures {
  int64_t parameters = 0;
  int64_t first_step = 0;                                  // that were made before a resume
  nlohmann::json saves;                                    // of each: step, bytes, seconds
  std::vector<double> loss;                                // by step, mean over ranks
  std::vector<double> gradient_norm, clipped_norm;         // by step
  std::vector<double> loss_scale;                          // by step, of its gradients
  std::vector<nlohmann::json> skipped_steps;               // each with its step and the reason
  std::vector<double> step_seconds;                        // by step, of rank 0
  std::vector<double> update_seconds;                      // of them in the optimizer's step
  std::vector<zeropage::memory::PagingStatistics> paging;  // by step, of rank 0
  zeropage::checkpointing::RecomputeStatistics recompute;  // of all steps, of rank 0
  std::optional<int64_t> forecast_activation_peak_bytes;   // by the plan for a budget, of rank 0
  int64_t offloaded_peak_bytes = 0;                        // of rank 0
  std::string offload_description;                         // of rank 0; lines
  // Speed of the disk that state is offloaded to, measured before the run, and what it predicts for a step.
  std::optional<zeropage::offload::DeviceSpeed> disk;
  zeropage::offload::StepForecast disk_forecast;
  std::string kept_activations;  // what was dropped and offloaded; "": all kept
  int64_t held_out_windows = 0;
  double held_out_loss = 0;
  double tokens_per_second = 0;  // over all ranks, at the median step
  // Model FLOPs utilisation, from 0 to 1, and the same at one token a second; none where the
  // device's peak is not known.
  std::optional<double> utilisation;
  std::optional<double> utilisation_per_token_rate;
  std::string weights_sha256;  // "": ranks have slices
  std::string communicator;    // what carried the bytes
  ExpertReport experts;
  std::optional<zeropage::ProbeReport> probe;
  std::vector<zeropage::Restart> restarts;
  int memory_rung = 0;
};

// Memory of the device that trains.
struct RankMemory {
  zeropage::memory::Breakdown now;      // after the last step, before evaluation
  zeropage::memory::Breakdown at_peak;  // over the whole training
  zeropage::memory::Breakdown on_host;  // offloaded, after the last step
  zeropage::memory::Breakdown on_nvme;  // likewise
  int64_t activation_peak_bytes = 0;    // the most that activations were in a step
  int64_t rss_base_bytes = 0;           // before the model was built
  int64_t rss_peak_bytes = 0;
  // Figures of an accelerator; 0 where the host trains.
  int64_t reserved_bytes = 0;  // that the caching allocator has from the device
  int64_t host_bytes = 0;      // on the host, at its peak
};

struct RankFigures {
  int64_t parameters = 0;  // elements that it has, of slices and of whole ones
  RankMemory memory;
  SentByAxis wire;
};

// Every rank's figures, by rank. Collective.
std::vector<RankFigures> gather_figures(const zeropage::comm::World& world, const RankFigures& own);

std::string table(const Flags& flags, const RunFigures& run, const std::vector<RankFigures>& ranks);

// The bytes of each kind by its name.
nlohmann::json kinds_json(const zeropage::memory::Breakdown& bytes);

// Throw if the file cannot be written.
// Throws where one of the files that the run writes at its end cannot be written, before it begins.
void check_outputs(const Flags& flags);
void write_json_file(const Flags& flags, const nlohmann::json& json);
void write_json(const Flags& flags, const RunFigures& run, const std::vector<RankFigures>& ranks);

}  // namespace train_gpt
