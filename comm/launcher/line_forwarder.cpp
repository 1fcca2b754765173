#include "comm/launcher/line_forwarder.h"

#include <algorithm>
#include <array>
#include <utility>

namespace zeropage::comm::detail {

LineForwarder::LineForwarder(FileDescriptor source, int target, std::string prefix)
    : source_(std::move(source)), target_(target), prefix_(std::move(prefix)) {
  set_nonblocking(source_);
}

bool LineForwarder::forward_available(RankOutput& output) {
  std::array<char, 16384> buffer;
  const ssize_t count = ::read(source_.get(), buffer.data(), buffer.size());
  if (count > 0) {
    split(std::string_view(buffer.data(), static_cast<std::size_t>(count)), output);
    return true;
  }
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  finish(output);
  return false;
}

void LineForwarder::finish(RankOutput& output) {
  if (!line_.empty()) emit(output);
  source_.reset();
}

void LineForwarder::split(std::string_view bytes, RankOutput& output) {
  while (!bytes.empty()) {
    if (std::exchange(after_return_, false) && bytes.front() == '\n') {
      bytes.remove_prefix(1);
      continue;
    }
    const std::size_t end = bytes.find_first_of("\r\n");
    const std::size_t room = kMaxLineBytes - line_.size();
    const std::size_t taken = std::min({end, room, bytes.size()});
    line_.append(bytes.substr(0, taken));
    bytes.remove_prefix(taken);
    if (taken == end) {
      after_return_ = bytes.front() == '\r';
      bytes.remove_prefix(1);
      // Progress bars begin with '\r': no empty lines for them.
      if (after_return_ && line_.empty()) {
        after_return_ = false;
        continue;
      }
      emit(output);
    } else if (taken == room) {
      emit(output);
    }
  }
}

void LineForwarder::emit(RankOutput& output) {
  if (stack_.takes(line_) && !output.shows_stacks()) {
    output.leave_out();
  } else {
    output.add(line_, target_, prefix_);
  }
  line_.clear();
}

}  // namespace zeropage::comm::detail
