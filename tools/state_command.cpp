#include "tools/state_command.h"

#include <cstdio>
#include <limits>
#include <stdexcept>
#include <utility>

#include "tools/state_contents.h"
#include "tools/state_difference.h"
#include "tools/state_words.h"
#include "zeropage/bytes.h"
#include "zeropage/state_folder.h"

namespace zeropage::tools {
namespace {

constexpr const char* kKeep = "keep";
constexpr const char* kLeaveOut = "leave-out";
constexpr const char* kRefuse = "refuse";

constexpr const char* kStateWords = "A state, or a run's folder: what its `latest` names";

int report_copy(const WeightsCopy& copy, const std::string& target) {
  std::printf("%s: %zu tensors, %s\n", target.c_str(), copy.tensors.size(),
              memory::format_bytes(static_cast<int64_t>(copy.file_bytes())).c_str());
  for (const std::string& name : copy.left_out) {
    std::printf("left out: %s\n", printable(name).c_str());
  }
  return 0;
}

}  // namespace

StateCommand::StateCommand(CLI::App& zp) {
  parser_ = zp.add_subcommand("state", "Show, check, compare and convert saved states");
  parser_->require_subcommand(1);
  parser_->footer(
      "Exit code 1: damage, a difference, or what could not be read or written.\n"
      "Examples: zp state verify run --all; zp state export run gpt2.safetensors --names "
      "gpt2.json");
  add_inspect();
  add_verify();
  add_diff();
  add_export();
  add_import();
}

CLI::App* StateCommand::add_verb(const char* name, const char* what, const char* footer,
                                 std::function<int()> run) {
  CLI::App* const verb = parser_->add_subcommand(name, what);
  verb->footer(footer);
  verbs_.push_back({verb, std::move(run)});
  return verb;
}

void StateCommand::add_json(CLI::App* verb) {
  verb->add_flag("--json", json_, "One JSON object, sizes in bytes");
}

void StateCommand::add_names(CLI::App* verb) {
  verb->add_option("--names", names_file_,
                   "Map of names: JSON, {\"ours\": \"theirs\", \"blocks.*.out.weight\": {\"name\": "
                   "\"h.*.out.weight\", \"transpose\": true}}; * is a run of digits")
      ->type_name("MAP.json");
  verb->add_option("--unmapped", unmapped_,
                   "Tensors that the map has no entry for: keep their name, leave-out, refuse")
      ->check(CLI::IsMember({kKeep, kLeaveOut, kRefuse}))
      ->capture_default_str()
      ->type_name("WHAT");
}

void StateCommand::add_inspect() {
  CLI::App* const verb = add_verb(
      "inspect", "Show step, files, tensors, tied names, optimizer and progress",
      "Reads the manifest and the headers, no tensor.\nExample: zp state inspect run --tensors",
      [this] {
        const auto contents = contents_of(state::find_state(state_));
        if (json_) {
          print_json(contents);
        } else {
          print_contents(contents, tensors_ ? TensorTable::kShown : TensorTable::kLeftOut);
        }
        return 0;
      });
  verb->add_option("DIR", state_, kStateWords)->required();
  verb->add_flag("--tensors", tensors_, "Print a line for each tensor too; --json always has them");
  add_json(verb);
}

void StateCommand::add_verify() {
  CLI::App* const verb = add_verb(
      "verify", "Read every block and compare it with its checksum",
      "Names each block that is not as it was written.\nExample: zp state verify run --all",
      [this] {
        auto states = std::vector<std::filesystem::path>();
        if (all_) {
          states = state::states_in(state_);
          if (states.empty()) {
            throw std::runtime_error(state_ + ": expected a run's folder with step-N, got none");
          }
        } else {
          states.push_back(state::find_state(state_));
        }
        const auto verification = verify(states);
        if (json_) {
          print_json(verification);
        } else {
          print_verification(verification);
        }
        return verification["whole"] == true ? 0 : 1;
      });
  verb->add_option("DIR", state_, kStateWords)->required();
  verb->add_flag("--all", all_, "Verify all states of a run's folder, the newest first");
  add_json(verb);
}

void StateCommand::add_diff() {
  CLI::App* const verb = add_verb(
      "diff", "Compare two states: what the manifests say, and every element's bits",
      "Exit code 1 if anything differs.\nExample: zp state diff run/step-20 other/step-20", [this] {
        const auto difference = difference_of(state_, other_state_);
        if (json_) {
          print_json(difference);
        } else {
          print_difference(difference);
        }
        return difference["same"] == true ? 0 : 1;
      });
  verb->add_option("A", state_, kStateWords)->required();
  verb->add_option("B", other_state_, "The same")->required();
  add_json(verb);
}

void StateCommand::add_export() {
  CLI::App* const verb = add_verb(
      "export", "Write the weights as a plain safetensors file",
      "FILE gets its name when all of it is on the disk.\n"
      "Example: zp state export run model.safetensors --names tools/names/gpt2.json",
      [this] { return report_copy(export_weights(state_, file_, names(), unmapped()), file_); });
  verb->add_option("DIR", state_, kStateWords)->required();
  verb->add_option("FILE", file_, "File to write; one that is there is replaced")->required();
  add_names(verb);
}

void StateCommand::add_import() {
  CLI::App* const verb = add_verb(
      "import", "Make a state of weights alone from a plain safetensors file",
      "Example: zp state import model.safetensors run/step-0 --names tools/names/gpt2.json",
      [this] {
        const NameMap map = names();
        return report_copy(
            import_weights(file_, state_, {map, NameMap::Direction::kToOurs, unmapped()}, step_),
            state_);
      });
  verb->add_option("FILE", file_, "A file of safetensors")->required();
  verb->add_option("DIR", state_, "The state's folder, such as run/step-0; must not be there")
      ->required();
  verb->add_option("--step", step_, "Step number of the state [0]")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()))
      ->type_name("N");
  add_names(verb);
}

Unmapped StateCommand::unmapped() const {
  if (unmapped_ == kLeaveOut) return Unmapped::kLeaveOut;
  return unmapped_ == kRefuse ? Unmapped::kRefuse : Unmapped::kKeep;
}

NameMap StateCommand::names() const {
  if (names_file_.empty() && unmapped_ != kKeep) {
    throw std::invalid_argument("--unmapped needs --names");
  }
  return names_file_.empty() ? NameMap() : NameMap(names_file_);
}

int StateCommand::run(const std::vector<std::string>& after_dashes) const {
  if (!after_dashes.empty()) throw std::invalid_argument("state takes no program");
  for (const Verb& verb : verbs_) {
    if (verb.parser->parsed()) return verb.run();
  }
  throw std::invalid_argument("state needs a subcommand");
}

}  // namespace zeropage::tools
