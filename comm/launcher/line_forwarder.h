// Copies one stream of one rank to one of ours, a whole line at a time, each behind the rank's
// prefix, and keeps the last lines for the report.
//
// Lifetime: a LineForwarder owns the read end of the rank's pipe, and closes it at end of file; the
// target descriptor must outlive it.
// Threads: used by the launcher's event loop only.
// Units: lines, bytes.
// Throws: nothing but std::bad_alloc; a target that cannot be written any more loses the output.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

#include "comm/launcher/file_descriptor.h"

namespace zeropage::comm::detail {

// The last lines of a rank, stdout and stderr in the order they were read.
class OutputTail {
 public:
  explicit OutputTail(std::size_t capacity) : capacity_(capacity) {}
  void add(std::string_view line);
  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::size_t capacity_;
  std::deque<std::string> lines_;
};

class LineForwarder {
 public:
  // A longer line is passed on in pieces of this size, so that a rank cannot fill our memory.
  static constexpr std::size_t kMaxLineBytes = 65536;

  LineForwarder(FileDescriptor source, int target, std::string prefix);

  bool is_open() const { return source_.is_open(); }
  int source() const { return source_.get(); }

  // One read, without blocking. Returns whether it found anything, so that a caller can drain the
  // pipe.
  bool forward_available(OutputTail& tail);

  // Passes on a line that has no end yet, and closes the pipe.
  void finish(OutputTail& tail);

 private:
  void split(std::string_view bytes, OutputTail& tail);
  void emit(OutputTail& tail);

  FileDescriptor source_;
  int target_;
  std::string prefix_;
  std::string line_;           // what came since the last line end
  bool after_return_ = false;  // the last byte was '\r': a '\n' that follows belongs to it
};

// Writes all of `text` with as few writes as the descriptor allows (one, normally).
void write_fully(int fd, std::string_view text) noexcept;

}  // namespace zeropage::comm::detail
