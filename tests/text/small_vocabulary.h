// A vocabulary for tests: the 256 bytes, what some merges make of them, and special tokens; in each of the forms that a
// tokenizer is read from.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/text/gguf_bytes.h"
#include "tests/text/text_files.h"

namespace zeropage::testing {

// A byte in GPT-2's alphabet of characters.
inline std::string alphabet_of(unsigned char byte) {
  const auto is_seen = [](unsigned b) { return (b >= 33 && b <= 126) || (b >= 161 && b != 173); };
  unsigned character = byte;
  if (!is_seen(byte)) {
    character = 256;
    for (unsigned b = 0; b < byte; ++b) character += is_seen(b) ? 0 : 1;
  }
  if (character < 0x80) return {static_cast<char>(character)};
  return {static_cast<char>(0xC0 | character >> 6), static_cast<char>(0x80 | (character & 0x3F))};
}

inline std::string alphabet_of(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) text += alphabet_of(static_cast<unsigned char>(byte));
  return text;
}

struct SmallVocabulary {
  std::vector<std::string> tokens;  // as files have them, by number
  std::vector<std::pair<std::string, std::string>> merges;
  std::vector<std::string> special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};

  SmallVocabulary() {
    for (int byte = 0; byte < 256; ++byte)
      tokens.push_back(alphabet_of(std::string(1, static_cast<char>(byte))));
    merge("h", "e");        // 256
    merge(" ", "t");        // 257
    merge(" t", "he");      // 258
    merge("l", "l");        // 259
    merge("he", "ll");      // 260
    merge("1", "2");        // 261
    merge("e", "r");        // 262
    merge(" ", " ");        // 263
    merge("\xC3", "\xA9");  // 264: e with an acute accent
    merge("\n", "\n");      // 265
    merge("'", "s");        // 266
    for (const std::string& token : special) tokens.push_back(token);  // 267, 268, 269
  }

  void merge(const std::string& left, const std::string& right) {
    merges.emplace_back(alphabet_of(left), alphabet_of(right));
    tokens.push_back(alphabet_of(left + right));
  }

  nlohmann::json numbers() const {
    nlohmann::json numbers = nlohmann::json::object();
    for (size_t i = 0; i < tokens.size(); ++i) numbers[tokens[i]] = i;
    return numbers;
  }

  // encoder.json and vocab.bpe, in a folder.
  void put_gpt2(const TextScratch& scratch) const {
    scratch.put("encoder.json", numbers().dump());
    std::string lines = "#version: 0.2\n";
    for (const auto& [left, right] : merges) lines += left + " " + right + "\n";
    scratch.put("vocab.bpe", lines);
  }

  nlohmann::json tokenizer_json() const {
    nlohmann::json added = nlohmann::json::array();
    for (const std::string& token : special) {
      added.push_back({{"id", numbers()[token]},
                       {"content", token},
                       {"special", true},
                       {"normalized", false},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false}});
    }
    nlohmann::json pairs = nlohmann::json::array();
    for (const auto& [left, right] : merges) pairs.push_back(left + " " + right);
    return {{"version", "1.0"},
            {"added_tokens", added},
            {"normalizer", nullptr},
            {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
            {"decoder", {{"type", "ByteLevel"}}},
            {"model", {{"type", "BPE"}, {"vocab", numbers()}, {"merges", pairs}}}};
  }

  GgufBytes gguf(const std::string& pre = "gpt-2") const {
    GgufBytes file;
    file.words("tokenizer.ggml.model", "gpt2").words("tokenizer.ggml.pre", pre);
    file.list_of_words("tokenizer.ggml.tokens", tokens);
    std::vector<int32_t> types(tokens.size() - special.size(), 1);
    types.resize(tokens.size(), 3);
    file.list("tokenizer.ggml.token_type", 5, types);
    std::vector<std::string> pairs;
    for (const auto& [left, right] : merges) pairs.push_back(left + " " + right);
    file.list_of_words("tokenizer.ggml.merges", pairs);
    return file;
  }
};

}  // namespace zeropage::testing
