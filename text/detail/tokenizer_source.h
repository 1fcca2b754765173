// What a tokenizer is made of, and the files that have it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/detail/added_tokens.h"
#include "text/detail/byte_pairs.h"
#include "text/detail/pre_tokenizer.h"

namespace zeropage::text {
class GgufFile;
}

namespace zeropage::text::detail {

struct TokenizerSource {
  std::string name;                 // for errors
  std::vector<std::string> tokens;  // bytes by number; "": no such token
  std::vector<bool> is_word;        // whether pairs may lead to it
  std::vector<Merge> merges;
  std::vector<AddedToken> added;
  PreTokenizer words;
  bool whole_words = false;  // ignore_merges
  bool composes = false;     // normal form C
};

// Collects tokens that are written in GPT-2's alphabet of bytes.
class VocabularyReader {
 public:
  // count: how many tokens are expected, which bounds their numbers.
  VocabularyReader(std::string file, size_t count);

  // Throws TextError for a number that is taken or too large, and for a token that comes twice.
  void add(std::string_view token, int64_t id);
  // A token that is no word, written as it is. It may have been added as a word before.
  void add_written(std::string_view token, int64_t id);
  // Both must be tokens, and so must be what they become.
  void merge(std::string_view left, std::string_view right);
  // "left right"
  void merge(std::string_view pair);

  // Gives what was read away.
  void move_to(TokenizerSource& source);

 private:
  size_t place(std::string_view token, int64_t id);
  int32_t number_of(const std::string& token, std::string_view pair) const;

  const std::string file_;
  const size_t most_;
  std::unordered_map<std::string, int32_t> ids_;  // by what is written
  std::vector<std::string> tokens_;
  std::vector<bool> is_word_;
  std::vector<Merge> merges_;
};

TokenizerSource read_gpt2_tokenizer(const std::filesystem::path& encoder_json,
                                    const std::filesystem::path& vocab_bpe);
TokenizerSource read_tokenizer_json(const std::filesystem::path& file);
TokenizerSource read_gguf_tokenizer(const GgufFile& file);

// For errors: what is shown of a token in a file.
std::string shown(std::string_view token);

}  // namespace zeropage::text::detail
