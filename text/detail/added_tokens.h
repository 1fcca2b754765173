// Tokens that are found in a text before it is cut into words: special ones, and others that were added to a vocabulary.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeropage::text::detail {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  // Whether it is looked for after the text was normalised.
  bool normalized = false;
};

class AddedTokens {
 public:
  void add(AddedToken token) {
    auto& alike = by_first_byte_[static_cast<uint8_t>(token.content[0])];
    alike.push_back(std::move(token));
    // The longest that fits is taken.
    std::stable_sort(alike.begin(), alike.end(), [](const AddedToken& a, const AddedToken& b) {
      return a.content.size() > b.content.size();
    });
    any_ = true;
  }

  // Calls take_text(piece) for the text between tokens and take_token(id) for tokens, in order. Without `with_special` a special token is
  // text; what begins within it is not looked for, as in `tokenizers`.
  template <typename TakeText, typename TakeToken>
  void split(std::string_view text, bool with_special, const TakeText& take_text,
             const TakeToken& take_token) const {
    size_t begin = 0;
    for (size_t at = 0; any_ && at < text.size();) {
      const AddedToken* const found = at_beginning(text.substr(at));
      if (found == nullptr) {
        ++at;
        continue;
      }
      const size_t end = at + found->content.size();
      if (with_special || !found->special) {
        if (at > begin) take_text(text.substr(begin, at - begin));
        take_token(found->id);
        begin = end;
      }
      at = end;
    }
    if (begin < text.size()) take_text(text.substr(begin));
  }

 private:
  const AddedToken* at_beginning(std::string_view text) const {
    for (const AddedToken& token : by_first_byte_[static_cast<uint8_t>(text[0])]) {
      if (text.starts_with(token.content)) return &token;
    }
    return nullptr;
  }

  std::array<std::vector<AddedToken>, 256> by_first_byte_;
  bool any_ = false;
};

}  // namespace zeropage::text::detail
