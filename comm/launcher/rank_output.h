// What a rank prints, as its launcher shows it: the last lines for the report, without LibTorch's stacks, and held back
// while the rank that it blames has not had its say.
//
// Lifetime: holds no descriptor; the target of a line outlives it.
// Threads: used by the launcher's event loop only.
// Units: lines, bytes.
// Throws: nothing but std::bad_alloc.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeropage::comm::detail {

// Writes all of `text` with as few writes as the descriptor allows (one, normally).
void write_fully(int fd, std::string_view text) noexcept;

// The stack that LibTorch appends to what its errors and warnings say: "Exception raised from ...", then "frame #0: ...".
class NativeStack {
 public:
  // Whether the line, behind those before it on the same stream, is of a stack.
  bool takes(std::string_view line);

 private:
  bool is_inside_ = false;
};

// The rank M of "[rank 1/4] ...: lost rank M", and of "... rank M ran out of memory": why rank 1 says that it ends.
std::optional<int> blamed_in(std::string_view line, int speaker);

// The same, and the rank M of "[rank 1/4] ... rank M did not answer", which may have nothing to say any more.
std::optional<int> accused_in(std::string_view line, int speaker);

// A rank's lines, stdout and stderr in the order they were read.
class RankOutput {
 public:
  using Clock = std::chrono::steady_clock;

  // shows_stacks: lines of stacks are lines like others.
  RankOutput(int rank, std::size_t tail_lines, bool shows_stacks)
      : rank_(rank), tail_lines_(tail_lines), shows_stacks_(shows_stacks) {}

  bool shows_stacks() const { return shows_stacks_; }
  // Writes `prefix` and the line to `target`, or holds them back.
  void add(std::string_view line, int target, const std::string& prefix);
  void leave_out() { ++left_out_; }

  const std::deque<std::string>& tail() const { return tail_; }
  // Lines of stacks that were not shown.
  int64_t left_out() const { return left_out_; }
  // The rank that this one blames, if it does.
  const std::optional<int>& blamed() const { return blamed_; }
  // From when on lines are held back; none are at this moment: nothing.
  const std::optional<Clock::time_point>& held_since() const { return held_since_; }
  // Writes what is held back. Nothing is from here on.
  void release();

 private:
  struct Held {
    int target;
    std::string text;
  };

  int rank_;
  std::size_t tail_lines_;
  bool shows_stacks_;
  std::deque<std::string> tail_;
  int64_t left_out_ = 0;
  std::optional<int> blamed_;
  std::optional<Clock::time_point> held_since_;
  bool was_released_ = false;
  std::vector<Held> held_;
};

}  // namespace zeropage::comm::detail
