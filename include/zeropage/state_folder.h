// A run's folder of states, in which a state appears whole or not at all.
//
//   run/step-20/   weights.safetensors  optimizer.safetensors  manifest.json
//   run/step-40/
//   run/latest  -> step-40
//   run/.step-60.writing/     being written, or left by a run that died: never loaded
//   run/.run-token            which run the folder belongs to (state/run_token.h)
//
// NewState puts a state together in a folder of another name. Its files are on the disk before the
// manifest is, and the manifest before the folder gets its name; `latest` is replaced in one piece.
// A kill, or a power cut, at any moment leaves the state before, or the new one.
//
// Threads: one; of a job's ranks, one. Throws StateError. Free of torch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "zeropage/saved_state.h"

namespace zeropage::state {

inline constexpr const char* kLatest = "latest";

// "step-20".
std::string name_of_step(int64_t step);

// Makes that folder and those above it, unless they are there.
void make_folders(const std::filesystem::path& folder);

class NewState {
 public:
  // target: where the state is to be. A state that is there is replaced, and kept until the new one
  // is whole. Throws where something else is there. What runs before this one were writing under that name is
  // removed. writer: has a folder of its own to write to, .step-20.writing-WRITER; "": .step-20.writing.
  explicit NewState(const std::filesystem::path& target, const std::string& writer = "");
  // Without commit() nothing stays.
  ~NewState();
  NewState(const NewState&) = delete;
  NewState& operator=(const NewState&) = delete;

  // Where its files are until commit().
  const std::filesystem::path& directory() const { return writing_; }
  // Creates the file with that size, so that a full disk is found at once.
  void create_file(const std::string& name, uint64_t bytes);
  // All files are on the disk. update_latest: `latest` beside it names it.
  void commit(const Manifest& manifest, bool update_latest);

  // Notes on what else was found and done, in sentences.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void clear_target_name();
  void remove_leftovers();
  void put_in_place();
  void point_latest() const;

  const std::filesystem::path target_;
  const std::filesystem::path writing_;
  std::vector<std::string> notes_;
  bool replaces_ = false;
  bool committed_ = false;
};

// Which states of a folder stay; only folders step-N count, ordered by N.
struct Keep {
  int64_t last = 0;   // the newest ones; 0: all
  int64_t every = 0;  // and those whose step is a multiple; 0: none
};

// Removes the others, but not the one that `latest` names, nor what is no whole state. Returns what was
// done, in sentences.
std::vector<std::string> remove_old_states(const std::filesystem::path& folder, const Keep& keep);

// The folders step-N of a run's folder, the newest first.
std::vector<std::filesystem::path> states_in(const std::filesystem::path& folder);

// The step of the newest of them; none where there is no state, or no folder.
std::optional<int64_t> newest_step_in(const std::filesystem::path& folder);

// The state that `path` means: itself, what its `latest` names, or its newest step-N.
std::filesystem::path find_state(const std::filesystem::path& path);

struct FoundState {
  std::filesystem::path directory = {};
  std::vector<std::string> refused = {};  // newer ones, and why
};
// The same, but only one whose every block is as it was written; if it is not, the next older one of its
// folder. Throws where there is none, with all reasons.
FoundState find_valid_state(const std::filesystem::path& path);
// The step of that state; none where there is none.
std::optional<int64_t> newest_valid_step_in(const std::filesystem::path& folder);

}  // namespace zeropage::state
