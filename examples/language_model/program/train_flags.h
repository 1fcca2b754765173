// What the commands that train are told.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "language_model/program/run_flags.h"
#include "language_model/train/trainer.h"

namespace zp_lm {

enum class Training : uint8_t { kAllWeights, kAdapters, kFromTheBeginning };

struct TrainFlags {
  Training training = Training::kAllWeights;
  ModelFlags model;
  RunFlags run;
  language_model::TrainingOptions options;

  // One of these kinds.
  std::vector<std::string> texts;
  std::string tokens;            // a file of `zp tokens make`, nanoGPT or llm.c
  std::string chat;              // lines of JSON
  std::string system;            // of conversations that do not begin with one
  double held_out_share = 0.05;  // of the rows, from the end
  int64_t held_out_rows = 64;    // the most of them that are looked at
  int64_t length = 0;            // of a row, in tokens; 0: up to kLength, as the model can
  bool joins_documents = false;

  int context = 1;                    // ranks that have some of each row's tokens
  std::string context_form = "ring";  // or "ulysses"

  int expert_parallel = 1;  // ranks that have a layer's experts between them

  std::string states = "fp32";  // of the optimizer; or bf16, 8bit
  bool recomputes_layers = false;
  std::string optimizer_tier = "device";  // or host, nvme

  language_model::AdapterOptions adapter;
  std::vector<std::string> layers;  // of adapters; none: all projections

  std::string out;           // folder of the trained weights, or of the adapters; "": none
  std::string merged;        // folder of the model with its adapters merged; "": none
  std::string export_dtype;  // of both; "": what is computed in
  bool goes_on = false;
  int64_t report_every = 10;
  uint64_t seed = 1;
};

void add_train_flags(CLI::App& app, TrainFlags& flags);
zeropage::Options sharding_of(const TrainFlags& flags);
// Those that were asked for, or all kinds of layers that the model has.
std::vector<std::string> adapter_layers(const TrainFlags& flags,
                                        const language_model::ModelConfig& config);

}  // namespace zp_lm
