// How a text is cut into words, of which BPE makes tokens. A word is in one token or several, a token in one word.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "text/detail/pattern.h"
#include "text/detail/utf8.h"

namespace zeropage::text::detail {

// GPT-2's own (`ByteLevel` in `tokenizers`), with a look-ahead that leaves a space to the word behind it.
inline constexpr const char* kGpt2Words =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// Each digit by itself (`Digits`): char::is_numeric of Rust.
inline constexpr const char* kSingleDigits = R"(\p{N})";
inline constexpr const char* kRunsOfDigits = R"(\p{N}+)";
inline constexpr const char* kLlama3Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr const char* kQwen2Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// One cut after the other: each is applied to the pieces of the one before.
class PreTokenizer {
 public:
  // Between is what lies between two matches.
  enum class Between : unsigned char { kIsAPiece, kIsDropped };
  void add(Pattern pattern, Between between = Between::kIsAPiece) {
    cuts_.push_back({std::move(pattern), between});
  }

  // Calls take(std::string_view) for the words of any bytes, in order. Those that are no UTF-8 are words of their own.
  template <typename Take>
  void each_word(std::string_view text, const Take& take) const {
    std::vector<Pattern::Matcher> matchers;
    for (const Cut& cut : cuts_) matchers.emplace_back(cut.pattern);
    while (!text.empty()) {
      const size_t valid = characters_at_beginning(text);
      cut_on(text.substr(0, valid), 0, matchers, take);
      text.remove_prefix(valid);
      size_t invalid = 0;
      while (invalid < text.size() && characters_at_beginning(text.substr(invalid, 4)) == 0) {
        ++invalid;
      }
      if (invalid > 0) take(text.substr(0, invalid));
      text.remove_prefix(invalid);
    }
  }

 private:
  struct Cut {
    Pattern pattern;
    Between between;
  };

  template <typename Take>
  void cut_on(std::string_view piece, size_t cut, std::vector<Pattern::Matcher>& matchers,
              const Take& take) const {
    if (piece.empty()) return;
    if (cut == cuts_.size()) {
      take(piece);
      return;
    }
    size_t at = 0;
    while (at < piece.size()) {
      const auto match = matchers[cut].next(piece, at);
      const size_t begin = match ? match->begin : piece.size();
      if (cuts_[cut].between == Between::kIsAPiece) {
        cut_on(piece.substr(at, begin - at), cut + 1, matchers, take);
      }
      if (!match) return;
      cut_on(piece.substr(begin, match->end - begin), cut + 1, matchers, take);
      at = match->end;
    }
  }

  std::vector<Cut> cuts_;
};

}  // namespace zeropage::text::detail
