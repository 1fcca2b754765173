// Which run a folder of states belongs to: the one that took it over last.
//
// A job that is started again elsewhere may not know that the ranks of its former start still live: a node's
// daemon died, say, and its processes did not. Both would save into one folder. So a run takes the folder when
// it starts: it writes a token of its own into a file there. Before a save changes anything it holds the
// folder, which throws where the token is another one by now. The older run thus ends at its next save, and
// removes nothing.
//
//   state::RunToken token("run");        // whoever had the folder has it no longer
//   ...
//   const auto held = token.hold();      // or throws
//   ...rename, remove...                 // no other run takes the folder meanwhile
//
// The file is locked (flock) while a run takes or holds the folder, so what is done under a hold is of one run
// alone. Where the file system has no locks, hold() still compares, and its note says what is not excluded.
// Threads: one at a time. Throws StateError. Free of torch.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

namespace zeropage::state {

inline constexpr const char* kRunTokenFile = ".run-token";

class RunToken {
 public:
  // Makes the folder if it is not there. longest_wait: for a run that holds it.
  explicit RunToken(const std::filesystem::path& folder,
                    std::chrono::milliseconds longest_wait = std::chrono::minutes(2));

  // The runs that took the folder so far, this one included: 1 for the first.
  int64_t number() const { return number_; }
  // "run 2 (host n1, process 4711, since 2026-01-31T12:00:00Z)"
  std::string words() const;

  class Hold;
  // Throws where another run has taken the folder since. Where the file is gone it is written again.
  std::unique_ptr<const Hold> hold() const;

 private:
  const std::filesystem::path folder_;
  const std::chrono::milliseconds longest_wait_;
  std::string text_;  // of the file
  int64_t number_ = 0;
};

// The folder is this run's while it lives.
class RunToken::Hold {
 public:
  Hold(const std::filesystem::path& file, std::chrono::milliseconds longest_wait);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  // Read and write the token's file.
  std::string read() const;
  void write(const std::string& text) const;

  // "" where the file is locked.
  const std::string& note() const { return note_; }

 private:
  void lock(std::chrono::milliseconds longest_wait);

  const std::filesystem::path file_;
  int descriptor_ = -1;
  std::string note_;
};

}  // namespace zeropage::state
