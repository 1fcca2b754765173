// What every command of zp-lm is told about ranks, precision and memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <zeropage/names.h>
#include <zeropage/options.h>
#include <zeropage/text/chat_examples.h>
#include <zeropage/text/tokenizer.h>
#include <zeropage/world.h>

#include "language_model/weights/model_files.h"

namespace CLI {
class App;
}

namespace zp_lm {

struct RunFlags {
  int ranks = 1;
  bool as_threads = false;
  std::string device = "cpu";  // or "cuda"
  int threads = 0;             // of a rank; 0: the cores shared among local ranks
  int stage = 3;
  std::string dtype = "fp32";  // or "bf16", "fp64"
  int64_t page_bytes = zeropage::Options::kPageBytesOfDevice;
  std::string parameter_tier = "device";  // or host, nvme
  std::string nvme_folder;                // for the tier nvme; "": none
  int64_t device_memory_bytes = 0;        // 0: no limit
  std::string json;                       // file; "": none
};
void add_run_flags(CLI::App& app, RunFlags& flags);
// Throws where parameters are to be on a disk, and no folder is named.
zeropage::Options sharding_of(const RunFlags& flags);

// "device", "host" or "nvme"; "fp32", "bf16", "fp16" or "fp64".
zeropage::Tier tier_of(const std::string& word);
torch::ScalarType dtype_of(const std::string& word);
// The flag for what weights are written in; "": what they are computed in.
void add_export_dtype(CLI::App& app, std::string& dtype);
std::optional<torch::ScalarType> export_dtype_of(const std::string& word);

// Runs it on as many ranks, or on those that a launcher has started. Returns its exit code. grace: what ranks get to end after
// a signal, where that is not the default.
int on_ranks(const RunFlags& flags, const std::function<int(zeropage::World&)>& run,
             std::optional<std::chrono::milliseconds> grace = std::nullopt);

// Where a model and its tokenizer are.
struct ModelFlags {
  std::string model;
  std::string tokenizer;  // "": the model's
  std::string adapters;   // folder; "": none
};
void add_model_flags(CLI::App& app, ModelFlags& flags);
// Before a model is opened, or trained for hours: throws unless the folder can be made and written to, and is not the model's
// own. "": nothing is written.
void check_out(const std::string& folder, const ModelFlags& model);
// Where the tokenizer is.
std::string tokenizer_path(const ModelFlags& flags);
zeropage::text::Tokenizer tokenizer_of(const ModelFlags& flags,
                                       const language_model::ModelFiles& files);

// ChatML where the vocabulary has its tokens.
zeropage::text::ChatTemplate chat_template_of(const zeropage::text::Tokenizer& tokenizer);

// Throws where the file cannot be read. from: the text begins where this is found first, which must be; "": at the beginning.
std::string read_text(const std::string& path, const std::string& from = "");

// "134.5 M parameters, 72.1 MiB of them on this rank; peak 431 MiB resident, 310 MiB before": what opening a model cost.
// Collective: the most of any rank.
struct OpeningCost {
  int64_t parameters = 0;
  int64_t resident_before = 0;  // bytes
  int64_t resident_peak = 0;
  std::string words() const;
};
OpeningCost opening_cost(const zeropage::World& world, int64_t parameters, int64_t resident_before);

}  // namespace zp_lm
