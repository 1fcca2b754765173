#include "comm/launcher/rank_output.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <poll.h>
#include <unistd.h>

namespace zeropage::comm::detail {
namespace {

constexpr std::string_view kDigits = "0123456789";

// The number behind the words; nothing where the line does not have both.
std::optional<int> number_behind(std::string_view line, std::string_view words) {
  const std::size_t at = line.find(words);
  if (at == std::string_view::npos) return std::nullopt;
  const char* const begin = line.data() + at + words.size();
  int number = 0;
  const auto [end, error] = std::from_chars(begin, line.data() + line.size(), number);
  if (error != std::errc()) return std::nullopt;
  return number;
}

// The number of "rank M" before the words.
std::optional<int> rank_before(std::string_view line, std::string_view words) {
  const std::size_t at = line.find(words);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view before = line.substr(0, at);
  const std::size_t end = before.find_last_not_of(kDigits);
  if (end == std::string_view::npos) return std::nullopt;
  constexpr std::string_view kRank = "rank ";
  const std::size_t begin = end + 1 - std::min(end + 1, kRank.size());
  return number_behind(line.substr(begin), kRank);
}

}  // namespace

bool NativeStack::takes(std::string_view line) {
  if (line.starts_with("Exception raised from ")) {
    is_inside_ = true;
    return true;
  }
  if (!is_inside_) return false;
  if (line.starts_with("frame #")) return true;
  // An empty line ends it.
  is_inside_ = false;
  return line.empty();
}

std::optional<int> blamed_in(std::string_view line, int speaker) {
  const std::size_t at = line.find("[rank " + std::to_string(speaker) + "/");
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view words = line.substr(at);
  std::optional<int> blamed = number_behind(words, "lost rank ");
  if (!blamed) blamed = rank_before(words, " ran out of memory: ");
  return blamed == speaker ? std::nullopt : blamed;
}

std::optional<int> accused_in(std::string_view line, int speaker) {
  if (const auto blamed = blamed_in(line, speaker)) return blamed;
  const std::size_t at = line.find("[rank " + std::to_string(speaker) + "/");
  if (at == std::string_view::npos) return std::nullopt;
  const std::optional<int> accused = rank_before(line.substr(at), " did not answer");
  return accused == speaker ? std::nullopt : accused;
}

void RankOutput::add(std::string_view line, int target, const std::string& prefix) {
  if (tail_lines_ > 0) {
    if (tail_.size() == tail_lines_) tail_.pop_front();
    tail_.emplace_back(line);
  }
  if (const auto blamed = blamed_in(line, rank_)) {
    blamed_ = blamed;
    if (!held_since_ && !was_released_) held_since_ = Clock::now();
  }
  std::string text = prefix;
  text.append(line).push_back('\n');
  if (held_since_) {
    held_.push_back({target, std::move(text)});
  } else {
    write_fully(target, text);
  }
}

void RankOutput::release() {
  if (!held_since_) return;
  held_since_.reset();
  was_released_ = true;
  for (const Held& held : held_) write_fully(held.target, held.text);
  held_.clear();
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
