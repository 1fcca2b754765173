// A trained model as a folder that Hugging Face's programs load.
#pragma once

#include <filesystem>
#include <optional>

#include "language_model/model/wrapped_model.h"

namespace language_model {

struct ExportOptions {
  // float32, bfloat16 or half; unset: that of the parameters.
  std::optional<torch::ScalarType> dtype;
  // A model's folder of which tokenizer files are copied; "": none.
  std::filesystem::path tokenizer_from = {};
};

// Writes config.json and model.safetensors: a tied head once, adapters merged into the layers that they change. Rank 0 writes,
// and parameters are gathered a page at a time.
// folder: made where it is not there; a model that is there is replaced. Throws on all ranks alike. Collective.
void export_model(const std::filesystem::path& folder, WrappedModel& model,
                  const ExportOptions& options = {});

// The word of config.json: "bfloat16".
const char* name_of(torch::ScalarType dtype);

// Runs what rank 0 alone does, which may throw, in pieces between collective calls. What it throws, all ranks throw in the end.
class RankZero {
 public:
  explicit RankZero(const zeropage::comm::World& world) : world_(world) {}

  // After an error nothing more is done.
  template <typename Action>
  void run(const Action& action) {
    if (world_.rank() != 0 || !error_.empty()) return;
    try {
      action();
    } catch (const std::exception& error) {
      error_ = zeropage::memory::message_of(error);
    }
  }
  // Collective.
  void settle(const std::string& topic) const;

 private:
  const zeropage::comm::World& world_;
  std::string error_;
};

}  // namespace language_model
