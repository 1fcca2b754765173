// A trained model as a folder that Hugging Face's programs load.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "language_model/model/wrapped_model.h"

namespace language_model {

struct ExportOptions {
  // float32, bfloat16 or half; unset: that of the parameters. float32 writes the fp32 values of what is trained in bf16, and
  // gathers them as visit_exact_values() does.
  std::optional<torch::ScalarType> dtype;
  // What write_tokenizer() takes; "": none.
  std::filesystem::path tokenizer_from = {};
};

// Writes config.json and model.safetensors: a tied head once, adapters merged into the layers that they change. Rank 0 writes,
// and parameters are gathered a page at a time.
// folder: made where it is not there; a model that is there is replaced. Returns on rank 0 what write_tokenizer() says. Throws on all
// ranks alike. Collective.
std::string export_model(const std::filesystem::path& folder, WrappedModel& model,
                         const ExportOptions& options = {});

// Indented; bytes that are no UTF-8 become marks. Throws c10::Error where it cannot be written.
void write_json(const std::filesystem::path& file, const nlohmann::json& content);

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
