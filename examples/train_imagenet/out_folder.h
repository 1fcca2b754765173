// OUT_DIR: what a run leaves.
//
//   config.yaml     the configuration, as the last start had it
//   classes.json    the classes' names, in the order of the network's scores
//   data.json       what resuming compares (ImageData::lists)
//   log.txt         every line that was told
//   metrics.jsonl   a JSON object a line: of training and of each validation
//   curves.svg      loss and accuracy over epochs, drawn anew after each validation
//   states/         from which the run goes on
//   weights/, average/   safetensors, at the end
//
// Rank 0 writes; of the others the methods do nothing. Throws c10::Error where a file cannot be written. Threads: one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <zeropage/names.h>

#include "train_imagenet/config.h"
#include "train_imagenet/run_log.h"

namespace train_imagenet {

class OutFolder {
 public:
  // Collective. Makes the folder. Throws on all ranks where it holds states that the run is not to go on from, and where they are of a run
  // whose network, seed or data are others.
  OutFolder(const Config& config, const zeropage::World& world);
  ~OutFolder();
  OutFolder(const OutFolder&) = delete;
  OutFolder& operator=(const OutFolder&) = delete;

  std::filesystem::path states() const { return folder_ / "states"; }
  std::filesystem::path file(const std::string& name) const { return folder_ / name; }
  // Whether there is a state, as rank 0 sees it. Collective.
  bool has_state(const zeropage::World& world) const;

  // A line for people, in the log and on the terminal.
  void tell(const std::string& line);
  // One that the next may replace, where a terminal can.
  void tell_progress(const std::string& line);

  // Collective. Throws on all ranks where OUT_DIR has a state of other classes or files than `lists`
  // (ImageData::lists); then writes the configuration, the classes and the lists, unless EVAL_ONLY.
  void begin(const Config& config, const std::vector<std::string>& classes,
             const std::map<std::string, std::string>& lists, const zeropage::World& world) const;

  // Forgets what was measured after that step, and validations of it: the run goes on from there, and makes them again.
  void rewind_metrics(int64_t step);
  void add_metrics(const nlohmann::json& metrics);
  void draw_curves();

 private:
  void check_former_run(const Config& config) const;
  void check_former_lists(const Config& config,
                          const std::map<std::string, std::string>& lists) const;
  void write(const std::string& name, const std::string& text) const;

  const std::filesystem::path folder_;
  const bool writes_;
  bool has_progress_ = false;    // a line that the next may replace
  std::unique_ptr<RunLog> log_;  // null: this rank does not write
};

}  // namespace train_imagenet
