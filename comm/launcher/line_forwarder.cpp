#include "comm/launcher/line_forwarder.h"

#include <algorithm>
#include <array>
#include <poll.h>
#include <utility>

namespace zeropage::comm::detail {

void OutputTail::add(std::string_view line) {
  if (capacity_ == 0) return;
  if (lines_.size() == capacity_) lines_.pop_front();
  lines_.emplace_back(line);
}

LineForwarder::LineForwarder(FileDescriptor source, int target, std::string prefix)
    : source_(std::move(source)), target_(target), prefix_(std::move(prefix)) {
  set_nonblocking(source_);
}

bool LineForwarder::forward_available(OutputTail& tail) {
  std::array<char, 16384> buffer;
  const ssize_t count = ::read(source_.get(), buffer.data(), buffer.size());
  if (count > 0) {
    split(std::string_view(buffer.data(), static_cast<std::size_t>(count)), tail);
    return true;
  }
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  finish(tail);
  return false;
}

void LineForwarder::finish(OutputTail& tail) {
  if (!line_.empty()) emit(tail);
  source_.reset();
}

void LineForwarder::split(std::string_view bytes, OutputTail& tail) {
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
      emit(tail);
    } else if (taken == room) {
      emit(tail);
    }
  }
}

void LineForwarder::emit(OutputTail& tail) {
  tail.add(line_);
  write_fully(target_, prefix_ + line_ + '\n');
  line_.clear();
}

void write_fully(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count >= 0) {
      text.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno == EAGAIN) {
      // Whoever shares our terminal or pipe may have made it non-blocking.
      pollfd writable{fd, POLLOUT, 0};
      ::poll(&writable, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace zeropage::comm::detail
