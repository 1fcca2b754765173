#include "train_imagenet/out_folder.h"

#include <cstdio>
#include <fstream>
#include <sstream>
#include <unistd.h>

#include <zeropage/check.h>
#include <zeropage/state_folder.h>

#include "train_imagenet/config_file.h"
#include "train_imagenet/curves.h"

namespace train_imagenet {
namespace {

namespace fs = std::filesystem;

std::string text_in(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

bool holds_state(const fs::path& states) {
  return fs::is_directory(states) && !zeropage::state::states_in(states).empty();
}

// What decides over the network and the order of samples.
bool must_stay(const std::string& key) {
  return key.starts_with("MODEL.") || key == "TRAIN.SEED" || key == "DATA.HELD_OUT";
}

}  // namespace

OutFolder::OutFolder(const Config& config, const zeropage::World& world)
    : folder_(config.out_dir), writes_(world.rank() == 0) {
  std::string error;
  if (writes_) {
    try {
      std::error_code failed;
      fs::create_directories(folder_, failed);
      ZP_CHECK(fs::is_directory(folder_), "OUT_DIR ", folder_.string(),
               ": cannot be made: ", failed.message());
      check_former_run(config);
      log_ = std::make_unique<RunLog>(file("log.txt").string());
    } catch (const std::exception& thrown) {
      error = zeropage::memory::message_of(thrown);
    }
  }
  error = world.settle("OUT_DIR", "", [&](const auto&) { return error; });
  if (!error.empty()) throw ConfigError(error);
}

OutFolder::~OutFolder() {
  if (has_progress_) std::fputc('\n', stdout);
}

bool OutFolder::has_state(const zeropage::World& world) const {
  return world.sum(writes_ && holds_state(states()) ? 1.0 : 0.0) > 0;
}

void OutFolder::check_former_run(const Config& config) const {
  if (!holds_state(states())) return;
  ZP_CHECK(config.auto_resume || config.eval_only, "OUT_DIR ", folder_.string(),
           ": has states of a run, and AUTO_RESUME is false; give another folder, or set "
           "AUTO_RESUME true to go on");
  if (!fs::exists(file("config.yaml"))) return;
  Config former = read_config(file("config.yaml"), {}), present = config;
  const auto before = keys_of(former), now = keys_of(present);
  for (size_t i = 0; i < now.size(); ++i) {
    const std::string& name = now[i].name;
    ZP_CHECK(!must_stay(name) || before[i].text() == now[i].text(), "OUT_DIR ", folder_.string(),
             ": its run has ", name, " ", before[i].text(), ", this one ", now[i].text(),
             "; give it the same, or another folder");
  }
}

void OutFolder::write(const std::string& name, const std::string& text) const {
  const fs::path unfinished = file(name + ".unfinished");
  std::ofstream out(unfinished);
  out << text;
  out.close();
  ZP_CHECK(out.good(), "OUT_DIR: ", unfinished.string(), " cannot be written; is the disk full?");
  fs::rename(unfinished, file(name));
}

void OutFolder::tell(const std::string& line) {
  if (!writes_) return;
  if (has_progress_) std::fputs("\r\033[K", stdout);
  has_progress_ = false;
  log_->to_terminal(line);
  log_->to_file(line);
}

void OutFolder::tell_progress(const std::string& line) {
  if (!writes_) return;
  if (::isatty(STDOUT_FILENO) == 0) {
    tell(line);
    return;
  }
  std::fputs(("\r\033[K" + line).c_str(), stdout);
  std::fflush(stdout);
  has_progress_ = true;
  log_->to_file(line);
}

void OutFolder::begin(const Config& config, const std::vector<std::string>& classes,
                      const std::map<std::string, std::string>& lists,
                      const zeropage::World& world) const {
  std::string error;
  if (writes_) {
    try {
      check_former_lists(config, lists);
      if (!config.eval_only) {
        write("config.yaml", config_text(config));
        write("classes.json", nlohmann::json(classes).dump() + "\n");
        write("data.json", nlohmann::json(lists).dump(2) + "\n");
      }
    } catch (const std::exception& thrown) {
      error = zeropage::memory::message_of(thrown);
    }
  }
  error = world.settle("OUT_DIR", "", [&](const auto&) { return error; });
  if (!error.empty()) throw ConfigError(error);
}

void OutFolder::check_former_lists(const Config& config,
                                   const std::map<std::string, std::string>& lists) const {
  // Weights of elsewhere have no list.
  const bool is_of_a_state = holds_state(states()) && config.load_weights.empty();
  const bool goes_on = holds_state(states()) && !config.eval_only;
  if ((!is_of_a_state && !goes_on) || !fs::exists(file("data.json"))) return;
  const auto former = nlohmann::json::parse(text_in(file("data.json")));
  // Another folder may be validated, unless samples that were trained on may be in it.
  const bool splits = config.data.held_out > 0;
  for (const auto& [name, value] : lists) {
    const bool must_be_equal = name == "classes" || !config.eval_only || splits;
    const bool is_free = name == "validation" && !splits;
    ZP_CHECK(!must_be_equal || is_free || former.value(name, value) == value, "OUT_DIR ",
             folder_.string(), ": the ",
             name == "classes" ? "names of the classes" : "files of " + name + " (data.json)",
             " are others than those of its run: ", former.value(name, ""), ", now ", value,
             "; give it the same data, or another folder");
  }
}

void OutFolder::rewind_metrics(int64_t step) {
  if (!writes_) return;
  std::string kept;
  std::istringstream lines(text_in(file("metrics.jsonl")));
  for (std::string line; std::getline(lines, line);) {
    const auto metrics = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    // A killed run may leave half a line.
    if (!metrics.is_object()) continue;
    const bool is_training = metrics.value("of", "") == "training";
    if (metrics.value("step", step + 1) <= (is_training ? step : step - 1)) kept += line + '\n';
  }
  write("metrics.jsonl", kept);
}

void OutFolder::add_metrics(const nlohmann::json& metrics) {
  if (!writes_) return;
  std::ofstream out(file("metrics.jsonl"), std::ios::app);
  out << metrics.dump() << '\n';
  out.close();
  ZP_CHECK(out.good(), "OUT_DIR: ", file("metrics.jsonl").string(),
           " cannot be written; is the disk full?");
}

void OutFolder::draw_curves() {
  if (writes_) write("curves.svg", curves(text_in(file("metrics.jsonl"))));
}

}  // namespace train_imagenet
