// A safetensors header as characters, one after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "zeropage/saved_state.h"

namespace zeropage::state::detail {

// Refuses strings and numbers without an end, which the
// JSON library would keep; depth its caller refuses.
class HeaderText {
 public:
  HeaderText(const ByteSource& file, uint64_t begin, uint64_t end)
      : file_(file), at_(begin), end_(end) {
    fill();
  }

  bool at_end() const { return at_ == end_; }
  char current() const { return chunk_[at_ - chunk_begin_]; }
  void advance() {
    check(current());
    ++at_;
    if (at_ < end_ && at_ == chunk_begin_ + chunk_.size()) fill();
  }

  // The character that was read last.
  uint64_t offset() const { return at_ - 1; }
  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw StateError(file_.name(), offset(), expected, got, "the header is not of safetensors");
  }

 private:
  static constexpr uint64_t kChunkBytes = 16384;
  static constexpr uint64_t kMostStringBytes = 4096;
  static constexpr uint64_t kMostNumberBytes = 32;

  void fill() {
    chunk_begin_ = at_;
    chunk_.resize(std::min(kChunkBytes, end_ - at_));
    file_.read(at_, chunk_.data(), chunk_.size());
  }

  void check(char character) {
    if (in_string_) {
      if (++token_bytes_ > kMostStringBytes) {
        ++at_;
        refuse("a string of " + std::to_string(kMostStringBytes) + " bytes or fewer", "more");
      }
      const bool ends = !escaped_ && character == '"';
      escaped_ = !escaped_ && character == '\\';
      if (ends) in_string_ = false;
      return;
    }
    const bool in_number = std::string_view("+-.0123456789eE").find(character) != std::string::npos;
    token_bytes_ = in_number ? token_bytes_ + 1 : 0;
    if (character == '"') in_string_ = true;
    if (token_bytes_ <= kMostNumberBytes) return;
    ++at_;
    refuse("a number of " + std::to_string(kMostNumberBytes) + " digits or fewer", "more");
  }

  const ByteSource& file_;
  uint64_t at_;
  const uint64_t end_;
  uint64_t chunk_begin_ = 0;
  std::string chunk_;
  bool in_string_ = false;
  bool escaped_ = false;
  uint64_t token_bytes_ = 0;
};

// Iterates over the header's text for the JSON library.
class HeaderIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  HeaderIterator() = default;  // the end
  explicit HeaderIterator(HeaderText& text) : text_(&text) {}

  char operator*() const { return text_->current(); }
  HeaderIterator& operator++() {
    text_->advance();
    return *this;
  }
  bool operator==(const HeaderIterator& other) const { return at_end() == other.at_end(); }

 private:
  bool at_end() const { return text_ == nullptr || text_->at_end(); }

  HeaderText* text_ = nullptr;
};

}  // namespace zeropage::state::detail
