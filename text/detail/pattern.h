// A regular expression over UTF-8, as tokenizers have it, by PCRE2.
//
// PCRE2 differs from the engines of the references in what \s is, so it is written out as Unicode's White_Space. Letters and
// numbers that are newer than PCRE2 10.42 are added to \p{L} and \p{N}, up to Unicode 16. \w and \b are refused.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace zeropage::text::detail {

class Pattern {
 public:
  enum class Kind : unsigned char { kExpression, kLiteral };

  // source: where it stands, for errors. Throws TextError for an expression that is none, or has what is refused.
  Pattern(std::string_view text, Kind kind, const std::string& source);

  // Finds matches; each thread has its own. The pattern must outlive it.
  class Matcher {
   public:
    explicit Matcher(const Pattern& pattern);
    struct Span {
      size_t begin;
      size_t end;
    };
    // The first match in valid UTF-8 that begins at `from` or behind, and is not empty. Throws TextError for an expression that
    // tries too much.
    std::optional<Span> next(std::string_view text, size_t from);

   private:
    const Pattern* pattern_;
    std::shared_ptr<void> match_;
    std::shared_ptr<void> limits_;
  };

 private:
  std::string source_;
  std::shared_ptr<void> code_;
};

}  // namespace zeropage::text::detail
