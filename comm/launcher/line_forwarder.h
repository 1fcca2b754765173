// Copies one stream of one rank to one of ours, a whole line at a time, each behind the rank's
// prefix.
//
// Lifetime: a LineForwarder owns the read end of the rank's pipe, and closes it at end of file; the
// target descriptor must outlive it.
// Threads: used by the launcher's event loop only.
// Units: lines, bytes.
// Throws: nothing but std::bad_alloc; a target that cannot be written any more loses the output.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "comm/launcher/file_descriptor.h"
#include "comm/launcher/rank_output.h"

namespace zeropage::comm::detail {

class LineForwarder {
 public:
  // A longer line is passed on in pieces of this size, so that a rank cannot fill our memory.
  static constexpr std::size_t kMaxLineBytes = 65536;

  LineForwarder(FileDescriptor source, int target, std::string prefix);

  bool is_open() const { return source_.is_open(); }
  int source() const { return source_.get(); }

  // One read, without blocking. Returns whether it found anything, so that a caller can drain the
  // pipe.
  bool forward_available(RankOutput& output);

  // Passes on a line that has no end yet, and closes the pipe.
  void finish(RankOutput& output);

 private:
  void split(std::string_view bytes, RankOutput& output);
  void emit(RankOutput& output);

  FileDescriptor source_;
  int target_;
  std::string prefix_;
  NativeStack stack_;
  std::string line_;           // what came since the last line end
  bool after_return_ = false;  // the last byte was '\r': a '\n' that follows belongs to it
};

}  // namespace zeropage::comm::detail
