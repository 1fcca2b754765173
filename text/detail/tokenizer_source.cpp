#include "text/detail/tokenizer_source.h"

#include <algorithm>
#include <utility>

#include "text/detail/byte_alphabet.h"
#include "zeropage/text/gguf_file.h"
#include "zeropage/text/text_error.h"

namespace zeropage::text::detail {
namespace {

// Vocabularies have their numbers without large holes.
size_t most_for(size_t count) {
  return std::min<size_t>(2 * count + 1024, size_t{1} << 30);
}

// The types of tokens in GGUF.
constexpr int64_t kNormalToken = 1;
constexpr int64_t kControlToken = 3;
constexpr int64_t kUserToken = 4;

// How llama.cpp names the ways in which text is cut.
void add_cuts(PreTokenizer& words, std::string_view pre, const std::string& file) {
  const auto add = [&](const char* expression) {
    words.add(Pattern(expression, Pattern::Kind::kExpression, file));
  };
  if (pre == "gpt-2") {
    add(kGpt2Words);
  } else if (pre == "smollm" || pre == "starcoder") {
    add(kSingleDigits);
    add(kGpt2Words);
  } else if (pre == "llama-bpe" || pre == "llama3") {
    add(kLlama3Words);
  } else if (pre == "qwen2") {
    add(kQwen2Words);
  } else {
    throw TextError(file,
                    "metadata \"tokenizer.ggml.pre\": expected gpt-2, smollm, starcoder, "
                    "llama-bpe, llama3 or qwen2, got " +
                        shown(pre) + "; take the model's tokenizer.json");
  }
}

}  // namespace

std::string shown(std::string_view token) {
  constexpr size_t kMost = 40;
  std::string text = "\"";
  for (const char byte : token.substr(0, kMost)) text += byte >= 0 && byte < ' ' ? '?' : byte;
  return text + (token.size() > kMost ? "...\"" : "\"");
}

VocabularyReader::VocabularyReader(std::string file, size_t count)
    : file_(std::move(file)), most_(most_for(count)) {}

size_t VocabularyReader::place(std::string_view token, int64_t id) {
  if (id < 0 || static_cast<uint64_t>(id) >= most_) {
    throw TextError(file_, "token " + shown(token) + ": expected a number from 0 to " +
                               std::to_string(most_ - 1) + ", got " + std::to_string(id));
  }
  if (token.empty()) {
    throw TextError(file_, "token " + std::to_string(id) + ": expected its text, got nothing");
  }
  const auto at = static_cast<size_t>(id);
  if (at >= tokens_.size()) {
    tokens_.resize(at + 1);
    is_word_.resize(at + 1);
  }
  return at;
}

void VocabularyReader::add(std::string_view token, int64_t id) {
  const size_t at = place(token, id);
  std::string& bytes = tokens_[at];
  if (!bytes.empty()) {
    throw TextError(file_, "number " + std::to_string(id) + ": expected one token, got " +
                               shown(token) + " too");
  }
  if (!ids_.emplace(token, static_cast<int32_t>(id)).second) {
    throw TextError(file_, "expected each token once, got " + shown(token) + " twice");
  }
  // A token that was added to a vocabulary, such as "<|im start|>", may stand in it as it is written.
  const auto read = bytes_of_alphabet(token);
  bytes = read.value_or(std::string(token));
  is_word_[at] = read.has_value();
}

void VocabularyReader::add_written(std::string_view token, int64_t id) {
  const size_t at = place(token, id);
  std::string& bytes = tokens_[at];
  const auto known = ids_.find(std::string(token));
  const bool agrees = known == ids_.end() ? bytes.empty() : known->second == id;
  if (!agrees) {
    throw TextError(file_, "added token " + shown(token) + " with number " + std::to_string(id) +
                               ": expected it to agree with the vocabulary, which has " +
                               (known == ids_.end() ? "another token under that number"
                                                    : "it under " + std::to_string(known->second)));
  }
  is_word_[at] = is_word_[at] && bytes == token;
  bytes = token;
}

int32_t VocabularyReader::number_of(const std::string& token, std::string_view pair) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) {
    throw TextError(file_, "merge " + std::to_string(merges_.size()) + ", " + shown(pair) +
                               ": expected tokens of the vocabulary, got " + shown(token));
  }
  return found->second;
}

void VocabularyReader::merge(std::string_view left, std::string_view right) {
  const std::string pair = std::string(left) + " " + std::string(right);
  Merge made;
  made.left = number_of(std::string(left), pair);
  made.right = number_of(std::string(right), pair);
  made.merged = number_of(std::string(left) + std::string(right), pair);
  merges_.push_back(made);
}

void VocabularyReader::merge(std::string_view pair) {
  const size_t space = pair.find(' ');
  if (space == std::string_view::npos || pair.find(' ', space + 1) != std::string_view::npos) {
    throw TextError(file_, "merge " + std::to_string(merges_.size()) +
                               ": expected two tokens with a space between them, got " +
                               shown(pair));
  }
  merge(pair.substr(0, space), pair.substr(space + 1));
}

void VocabularyReader::move_to(TokenizerSource& source) {
  source.tokens = std::move(tokens_);
  source.is_word = std::move(is_word_);
  source.merges = std::move(merges_);
}

TokenizerSource read_gguf_tokenizer(const GgufFile& file) {
  TokenizerSource source;
  source.name = file.name();
  const std::string_view model = file.string("tokenizer.ggml.model");
  if (model != "gpt2") {
    throw TextError(file.name(),
                    "metadata \"tokenizer.ggml.model\": expected gpt2, a byte-level BPE, got " +
                        shown(model) + ", which is not read here");
  }
  const std::string_view pre = file.string("tokenizer.ggml.pre");
  add_cuts(source.words, pre, file.name());
  // Metadata of GGUF does not have these two of a tokenizer.json; models of that family were trained so.
  source.whole_words = pre == "llama-bpe" || pre == "llama3";
  source.composes = pre == "qwen2";
  const std::vector<std::string_view> tokens = file.strings("tokenizer.ggml.tokens");
  std::vector<int64_t> types(tokens.size(), kNormalToken);
  if (file.has("tokenizer.ggml.token_type")) types = file.integers("tokenizer.ggml.token_type");
  if (types.size() != tokens.size()) {
    throw TextError(file.name(), "metadata \"tokenizer.ggml.token_type\": expected " +
                                     std::to_string(tokens.size()) + " types, one a token, got " +
                                     std::to_string(types.size()));
  }
  VocabularyReader reader(file.name(), tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto id = static_cast<int64_t>(i);
    if (types[i] == kNormalToken) {
      reader.add(tokens[i], id);
      continue;
    }
    reader.add_written(tokens[i], id);
    // The others are numbers that nothing uses.
    if (types[i] == kControlToken || types[i] == kUserToken) {
      source.added.push_back({.id = static_cast<int32_t>(i),
                              .content = std::string(tokens[i]),
                              .special = types[i] == kControlToken});
    }
  }
  for (const std::string_view pair : file.strings("tokenizer.ggml.merges")) reader.merge(pair);
  reader.move_to(source);
  return source;
}

}  // namespace zeropage::text::detail
