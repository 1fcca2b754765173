#include "text/detail/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <algorithm>
#include <array>
#include <cstdint>
#include <new>
#include <pcre2.h>

#include "zeropage/text/text_error.h"

namespace zeropage::text::detail {
namespace {

constexpr std::string_view kWhiteSpace =
    "\\t-\\r\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"
    "\\x{3000}";
// Letters and numbers of Unicode 15 to 16, which the references know and PCRE2 10.42 does not.
constexpr std::string_view kNewerLetters =
    "\\x{1c89}-\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}"
    "\\x{10d4a}-\\x{10d65}\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}-\\x{11240}"
    "\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}"
    "\\x{113d3}\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}\\x{11f12}-\\x{11f33}"
    "\\x{1342f}\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}"
    "\\x{16d40}-\\x{16d6c}\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}"
    "\\x{1e030}-\\x{1e06d}\\x{1e4d0}-\\x{1e4eb}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}"
    "\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}";
constexpr std::string_view kNewerNumbers =
    "\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11de0}-\\x{11de9}"
    "\\x{11f50}-\\x{11f59}\\x{16130}-\\x{16139}\\x{16d70}-\\x{16d79}\\x{16ff4}-\\x{16ff6}"
    "\\x{1ccf0}-\\x{1ccf9}\\x{1d2c0}-\\x{1d2d3}\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}";

// How much an expression may try in one match.
constexpr uint64_t kMostSteps = 1'000'000;
constexpr uint64_t kMostStepsAByte = 64;

std::string words_of(int error) {
  std::array<PCRE2_UCHAR, 256> words{};
  pcre2_get_error_message(error, words.data(), words.size());
  return reinterpret_cast<const char*>(words.data());
}

// The expression with what differs between engines written out.
std::string for_pcre2(std::string_view text, const std::string& source) {
  const auto refuse = [&](std::string_view what) {
    throw TextError(source, "the expression " + std::string(text) + " has " + std::string(what) +
                                ", which engines read in several ways; it is not read here");
  };
  std::string written;
  bool in_class = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      if (text[i] == '[' && in_class) refuse("a class in a class");
      if (text[i] == '&' && in_class && text.substr(i, 2) == "&&") refuse("&& in a class");
      if (text[i] == '[') in_class = true;
      if (text[i] == ']') in_class = false;
      written += text[i];
      continue;
    }
    const char escaped = text[++i];
    switch (escaped) {
      case 's':
        written += in_class ? std::string(kWhiteSpace) : "[" + std::string(kWhiteSpace) + "]";
        break;
      case 'S':
        if (in_class) refuse("\\S in a class");
        written += "[^" + std::string(kWhiteSpace) + "]";
        break;
      case 'p':
      case 'P': {
        const std::string_view property = text.substr(i + 1, 3);
        const bool letters = property == "{L}";
        written += '\\';
        if (!letters && property != "{N}") {
          written += escaped;
          break;
        }
        if (in_class && escaped == 'P') refuse(text.substr(i - 1, 2));
        written.pop_back();
        if (!in_class) written += escaped == 'p' ? "[" : "[^";
        written += "\\p" + std::string(property);
        written += letters ? kNewerLetters : kNewerNumbers;
        if (!in_class) written += "]";
        i += property.size();
        break;
      }
      case 'w':
      case 'W':
      case 'b':
      case 'B':
      case 'h':
      case 'H':
      case 'R':
      case 'X':
        refuse(text.substr(i - 1, 2));
        break;
      default:
        written += '\\';
        written += escaped;
    }
  }
  return written;
}

pcre2_match_data* match_of(const std::shared_ptr<void>& match) {
  return static_cast<pcre2_match_data*>(match.get());
}

}  // namespace

Pattern::Pattern(std::string_view text, Kind kind, const std::string& source) : source_(source) {
  const bool literal = kind == Kind::kLiteral;
  const std::string written = literal ? std::string(text) : for_pcre2(text, source);
  int error = 0;
  PCRE2_SIZE at = 0;
  const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
  pcre2_code* const code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(written.data()),
                                         written.size(), options, &error, &at, nullptr);
  if (code == nullptr) {
    throw TextError(source, "the expression " + std::string(text) +
                                " cannot be read: " + words_of(error) + ", at byte " +
                                std::to_string(at) + " of " + written);
  }
  code_ = std::shared_ptr<void>(
      code, [](void* held) { pcre2_code_free(static_cast<pcre2_code*>(held)); });
  // Where memory may not be made executable, expressions are interpreted.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
}

Pattern::Matcher::Matcher(const Pattern& pattern) : pattern_(&pattern) {
  pcre2_match_data* const match = pcre2_match_data_create(1, nullptr);
  if (match == nullptr) throw std::bad_alloc();
  match_ = std::shared_ptr<void>(
      match, [](void* held) { pcre2_match_data_free(static_cast<pcre2_match_data*>(held)); });
  pcre2_match_context* const limits = pcre2_match_context_create(nullptr);
  if (limits == nullptr) throw std::bad_alloc();
  limits_ = std::shared_ptr<void>(limits, [](void* held) {
    pcre2_match_context_free(static_cast<pcre2_match_context*>(held));
  });
}

std::optional<Pattern::Matcher::Span> Pattern::Matcher::next(std::string_view text, size_t from) {
  const auto* const code = static_cast<const pcre2_code*>(pattern_->code_.get());
  auto* const limits = static_cast<pcre2_match_context*>(limits_.get());
  // A run of a million spaces is a text, too. An expression that tries more than some ways a byte is no tokenizer's.
  const uint64_t most = kMostSteps + kMostStepsAByte * text.size();
  pcre2_set_match_limit(limits, static_cast<uint32_t>(std::min<uint64_t>(most, UINT32_MAX)));
  const auto find = [&](uint32_t options) {
    return pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                       options | PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match_of(match_), limits);
  };
  int found = find(0);
  // The interpreter takes its memory from the heap.
  if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = find(PCRE2_NO_JIT);
  if (found == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (found < 0) {
    throw TextError(pattern_->source_, "its expression finds no match in a text of " +
                                           std::to_string(text.size()) +
                                           " bytes: " + words_of(found));
  }
  const PCRE2_SIZE* const bounds = pcre2_get_ovector_pointer(match_of(match_));
  return Span{bounds[0], bounds[1]};
}

}  // namespace zeropage::text::detail
