#include "zeropage/state_folder.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <fcntl.h>
#include <map>
#include <optional>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "state/folder_probe.h"
#include "zeropage/saved_state.h"

namespace zeropage::state {
namespace {

namespace fs = std::filesystem;

const std::string kStepPrefix = "step-";
const std::string kWriting = ".writing";

// What is there, itself and not what a link leads to. The library's own would throw its own error where a
// folder may not be read.
fs::file_status status_of(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::status_known(status)) throw_call_failed(path, "lstat", error.value());
  return status;
}

fs::file_status status_behind_links(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::status_known(status)) throw_call_failed(path, "stat", error.value());
  return status;
}

fs::path hidden(const fs::path& target, const char* suffix) {
  std::string name = ".";
  name += target.filename().string();
  name += suffix;
  return target.parent_path() / name;
}

// Absolute, without a slash at the end.
fs::path as_target(const fs::path& path) {
  fs::path absolute = fs::absolute(path).lexically_normal();
  if (!absolute.has_filename()) absolute = absolute.parent_path();
  const std::string name = absolute.filename().string();
  if (name.empty() || name == kLatest || name.starts_with('.')) {
    throw StateError(
        path.string(), 0,
        "expected the name of a folder for a state, such as run/step-20, got \"" + name + "\"");
  }
  return absolute;
}

// The step in a name that is step-N.
std::optional<int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::string_view digits = std::string_view(name).substr(kStepPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), step);
  if (error != std::errc() || end != digits.end() || name != name_of_step(step)) {
    return std::nullopt;
  }
  return step;
}

void make_directory(const fs::path& path) {
  if (::mkdir(path.c_str(), 0755) != 0) throw_call_failed(path, "mkdir", errno);
}

void move_to(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    throw_call_failed(from, "rename to " + to.string(), errno);
  }
}

void remove_file(const fs::path& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw_call_failed(path, "unlink", errno);
}

// Ours alone, the manifest first: what is left is then no state. Returns whether the folder is gone.
bool remove_state(const fs::path& directory) {
  for (const char* name : {kManifestFile, kWeightsFile, kOptimizerFile}) {
    remove_file(directory / name);
  }
  if (::rmdir(directory.c_str()) == 0 || errno == ENOENT) return true;
  if (errno != ENOTEMPTY && errno != EEXIST) throw_call_failed(directory, "rmdir", errno);
  return false;
}

void remove_leftover(const fs::path& directory, const char* why, std::vector<std::string>& notes) {
  if (!fs::exists(status_of(directory))) return;
  if (!fs::is_directory(status_of(directory)) || !remove_state(directory)) {
    throw StateError(directory.string(), 0,
                     "has files that are not of a state; move it away, its name is needed");
  }
  notes.push_back("removed " + directory.string() + ", " + why);
}

// Why it is no whole state; "" if it is, as far as its manifest and headers tell.
std::string obstacle_in(const fs::path& directory) {
  try {
    const SavedState saved(directory);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// What `latest` of the folder names; empty if there is none.
fs::path target_of_latest(const fs::path& folder) {
  std::error_code error;
  const fs::path named = fs::read_symlink(folder / kLatest, error);
  return error ? fs::path() : folder / named;
}

bool has_manifest(const fs::path& directory) {
  return fs::exists(status_behind_links(directory / kManifestFile));
}

}  // namespace

std::string name_of_step(int64_t step) {
  return kStepPrefix + std::to_string(step);
}

void make_folders(const fs::path& folder) {
  if (folder.empty() || fs::is_directory(status_behind_links(folder))) return;
  if (fs::exists(status_of(folder))) {
    throw StateError(folder.string(), 0,
                     "expected a folder, got something else; move it away, or give another folder");
  }
  make_folders(folder.parent_path());
  // Another run may make it at this moment.
  if (::mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST)
    throw_call_failed(folder, "mkdir", errno);
  sync_directory(folder.parent_path());
}

NewState::NewState(const fs::path& target, const std::string& writer)
    : target_(as_target(target)),
      writing_(hidden(target_, (writer.empty() ? kWriting : kWriting + "-" + writer).c_str())) {
  make_folders(target_.parent_path());
  check_latest(target_.parent_path());
  clear_target_name();
  remove_leftovers();
  make_directory(writing_);
}

// Also of other writers, which may be alive: what they open there is then not found, and their save fails.
void NewState::remove_leftovers() {
  constexpr const char* kWhy = "which a save that did not end had left";
  remove_leftover(writing_, kWhy, notes_);
  const fs::path of_none = hidden(target_, kWriting.c_str());
  std::vector<fs::path> others;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(target_.parent_path(), error)) {
    const std::string name = entry.path().filename().string();
    if (name == of_none.filename() || name.starts_with(of_none.filename().string() + "-")) {
      others.push_back(entry.path());
    }
  }
  if (error) throw_call_failed(target_.parent_path(), "opendir", error.value());
  for (const fs::path& other : others) {
    // Its name is not needed.
    if (fs::is_directory(status_of(other)) && remove_state(other)) {
      notes_.push_back("removed " + other.string() + ", " + kWhy);
    } else {
      notes_.push_back(other.string() + " has files that are not of a state, and stays");
    }
  }
}

// A whole state stays until the new one takes its place; a damaged one is kept under another name.
void NewState::clear_target_name() {
  if (!fs::exists(status_of(target_))) return;
  if (!fs::is_directory(status_of(target_)) || (!has_manifest(target_) && !fs::is_empty(target_))) {
    throw StateError(target_.string(), 0,
                     "is there and is no state; give another name, or move it away");
  }
  if (!has_manifest(target_)) {
    if (::rmdir(target_.c_str()) != 0) throw_call_failed(target_, "rmdir", errno);
    return;
  }
  const std::string obstacle = obstacle_in(target_);
  replaces_ = obstacle.empty();
  if (replaces_) return;
  fs::path aside;
  for (int number = 1; aside.empty() || fs::exists(status_of(aside)); ++number) {
    aside = hidden(target_, (".damaged-" + std::to_string(number)).c_str());
  }
  move_to(target_, aside);
  notes_.push_back("moved " + target_.string() + " to " + aside.string() + ": " + obstacle);
}

NewState::~NewState() {
  if (committed_) return;
  try {
    remove_state(writing_);
  } catch (const std::exception&) {
    // It has no name that is loaded, and the next save of that name removes it.
  }
}

void NewState::create_file(const std::string& name, uint64_t bytes) {
  File(writing_ / name, File::Access::kCreate).allocate(bytes);
}

void NewState::commit(const Manifest& manifest, bool update_latest) {
  const std::string text = to_text(manifest);
  {
    File file(writing_ / kManifestFile, File::Access::kCreate);
    file.write(0, text.data(), text.size());
    file.sync();
  }
  sync_directory(writing_);
  put_in_place();
  committed_ = true;
  sync_directory(target_.parent_path());
  if (update_latest) point_latest();
  // After an exchange the state before has this name.
  if (replaces_ && !remove_state(writing_)) {
    notes_.push_back(writing_.string() + " has what was beside the state before, and stays");
  }
}

void NewState::put_in_place() {
  if (!replaces_) {
    move_to(writing_, target_);
    return;
  }
  if (::renameat2(AT_FDCWD, writing_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) != 0) {
    throw_call_failed(target_,
                      "renameat2 (a state is there, and this file system may not be able to "
                      "exchange it in one piece; give another name)",
                      errno);
  }
}

// Another run that saves into the same folder may do the same at this moment. Either's link is whole and may become
// `latest`, so each goes on until one of its renames had a link to rename.
void NewState::point_latest() const {
  const fs::path folder = target_.parent_path();
  const fs::path link = hidden(folder / kLatest, ".writing");
  for (;;) {
    remove_file(link);
    if (::symlink(target_.filename().c_str(), link.c_str()) != 0) {
      if (errno == EEXIST) continue;
      throw_call_failed(link, "symlink", errno);
    }
    if (::rename(link.c_str(), (folder / kLatest).c_str()) == 0) break;
    if (errno != ENOENT) throw_call_failed(link, "rename to " + (folder / kLatest).string(), errno);
  }
  sync_directory(folder);
}

std::vector<fs::path> states_in(const fs::path& folder) {
  std::map<int64_t, fs::path, std::greater<>> by_step;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto step = step_of(entry.path());
    if (step && entry.is_directory() && !entry.is_symlink()) by_step.emplace(*step, entry.path());
  }
  if (error) throw_call_failed(folder, "opendir", error.value());
  std::vector<fs::path> newest_first;
  for (const auto& [step, path] : by_step) newest_first.push_back(path);
  return newest_first;
}

std::optional<int64_t> newest_step_in(const fs::path& folder) {
  if (!fs::is_directory(status_behind_links(folder))) return std::nullopt;
  const std::vector<fs::path> states = states_in(folder);
  return states.empty() ? std::nullopt : step_of(states.front());
}

std::vector<std::string> remove_old_states(const fs::path& folder, const Keep& keep) {
  std::vector<std::string> notes;
  if (keep.last <= 0) return notes;
  const fs::path latest = target_of_latest(folder).filename();
  int64_t kept = 0;
  for (const fs::path& state : states_in(folder)) {
    const fs::path removing = hidden(state, ".removing");
    // Begun by a run that died.
    remove_leftover(removing, "whose removal had begun", notes);
    if (!has_manifest(state) || ++kept <= keep.last) continue;
    if (keep.every > 0 && *step_of(state) % keep.every == 0) continue;
    if (state.filename() == latest) continue;
    move_to(state, removing);
    if (!remove_state(removing)) {
      notes.push_back(removing.string() + " has files that are not of a state, and stays");
    }
  }
  return notes;
}

fs::path find_state(const fs::path& path) {
  if (!fs::exists(status_behind_links(path))) {
    throw StateError(path.string(), 0, "expected a state or a folder of states, got nothing there");
  }
  if (has_manifest(path)) return path;
  const fs::path latest = target_of_latest(path);
  if (!latest.empty()) return latest;
  if (fs::is_directory(status_behind_links(path))) {
    for (const fs::path& state : states_in(path)) {
      if (has_manifest(state)) return state;
    }
  }
  throw StateError(path.string(), 0,
                   "expected a state (a folder with manifest.json) or a folder of states (latest, "
                   "step-N), got neither");
}

FoundState find_valid_state(const fs::path& path) {
  const fs::path first = fs::weakly_canonical(find_state(path));
  std::vector<fs::path> candidates = {first};
  const auto first_step = step_of(first);
  for (const fs::path& state : states_in(first.parent_path())) {
    const auto step = step_of(state);
    if (first_step && *step < *first_step) candidates.push_back(state);
  }
  std::vector<std::string> refused;
  for (const fs::path& candidate : candidates) {
    try {
      SavedState(candidate).verify();
      return {candidate, refused};
    } catch (const std::exception& error) {
      refused.push_back(error.what());
    }
  }
  std::string reasons;
  for (const std::string& reason : refused) reasons += "\n  " + reason;
  throw StateError(path.string(), 0, "expected a state that is whole, got none:" + reasons);
}

std::optional<int64_t> newest_valid_step_in(const fs::path& folder) {
  try {
    return step_of(find_valid_state(folder).directory);
  } catch (const StateError&) {
    return std::nullopt;
  }
}

}  // namespace zeropage::state
