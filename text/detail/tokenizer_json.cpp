#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "text/detail/json_file.h"
#include "text/detail/tokenizer_source.h"
#include "text/mapped_file.h"
#include "zeropage/text/text_error.h"

namespace zeropage::text::detail {
namespace {

using nlohmann::json;

// A part of a JSON file, and where it stands.
class Part {
 public:
  Part(const std::string& file, std::string where, const json* value)
      : file_(file), where_(std::move(where)), value_(value) {}

  bool is_there() const { return value_ != nullptr && !value_->is_null(); }

  Part member(const std::string& key) const {
    if (!is_there()) return {file_, where_ + "." + key, nullptr};
    if (!value_->is_object()) refuse("an object");
    const auto found = value_->find(key);
    return {file_, where_.empty() ? key : where_ + "." + key,
            found == value_->end() ? nullptr : &*found};
  }
  std::vector<Part> elements() const {
    if (!is_there() || !value_->is_array()) refuse("a list");
    std::vector<Part> parts;
    for (const json& value : *value_) {
      parts.emplace_back(file_, where_ + "[" + std::to_string(parts.size()) + "]", &value);
    }
    return parts;
  }

  const std::string& text() const {
    if (!is_there() || !value_->is_string()) refuse("text");
    return value_->get_ref<const std::string&>();
  }
  std::string text_or(const std::string& otherwise) const {
    return is_there() ? text() : otherwise;
  }
  int64_t integer() const {
    if (!is_there() || !value_->is_number_integer()) refuse("an integer");
    // What is 2^63 or more becomes negative, which no number of a token is.
    return value_->get<int64_t>();
  }
  bool flag_or(bool otherwise) const {
    if (!is_there()) return otherwise;
    if (!value_->is_boolean()) refuse("true or false");
    return value_->get<bool>();
  }
  const json& object() const {
    if (!is_there() || !value_->is_object()) refuse("an object");
    return *value_;
  }
  bool is_list() const { return is_there() && value_->is_array(); }

  [[noreturn]] void refuse(const std::string& expected) const {
    constexpr size_t kShown = 60;
    std::string got = "nothing";
    if (value_ != nullptr) {
      const bool large = value_->is_structured() && value_->size() > 8;
      got = large ? std::string(value_->type_name())
                  : value_->dump(-1, ' ', true, json::error_handler_t::replace);
    }
    if (got.size() > kShown) got = got.substr(0, kShown) + "...";
    throw TextError(
        file_, (where_.empty() ? "the file" : where_) + ": expected " + expected + ", got " + got);
  }
  const std::string& file() const { return file_; }

 private:
  const std::string& file_;
  std::string where_;
  const json* value_;
};

void add_split(TokenizerSource& source, const Part& split) {
  const Part pattern = split.member("pattern");
  const Part expression = pattern.member("Regex");
  const bool is_expression = expression.is_there();
  const std::string& text = is_expression ? expression.text() : pattern.member("String").text();
  const std::string& behavior = split.member("behavior").text();
  const bool invert = split.member("invert").flag_or(false);
  const bool isolated = behavior == "Isolated" && !invert;
  // The words are what the expression matches, and the rest goes.
  const bool matches = behavior == "Removed" && invert;
  if (!isolated && !matches) {
    split.refuse("the behavior Isolated, or Removed with invert");
  }
  source.words.add(
      Pattern(text, is_expression ? Pattern::Kind::kExpression : Pattern::Kind::kLiteral,
              split.file()),
      isolated ? PreTokenizer::Between::kIsAPiece : PreTokenizer::Between::kIsDropped);
}

void add_cut(TokenizerSource& source, const Part& cut) {
  const auto add = [&](const char* expression) {
    source.words.add(Pattern(expression, Pattern::Kind::kExpression, cut.file()));
  };
  const std::string& type = cut.member("type").text();
  if (type == "Split") {
    add_split(source, cut);
  } else if (type == "Digits") {
    add(cut.member("individual_digits").flag_or(false) ? kSingleDigits : kRunsOfDigits);
  } else if (type == "ByteLevel") {
    if (cut.member("add_prefix_space").flag_or(true)) {
      cut.member("add_prefix_space").refuse("false");
    }
    if (cut.member("use_regex").flag_or(true)) add(kGpt2Words);
  } else {
    cut.refuse("a pre-tokenizer of type Split, Digits or ByteLevel");
  }
}

void read_pre_tokenizer(TokenizerSource& source, const Part& part) {
  if (!part.is_there()) part.refuse("one with ByteLevel, which a byte-level BPE has");
  std::vector<Part> cuts = {part};
  if (part.member("type").text() == "Sequence") cuts = part.member("pretokenizers").elements();
  for (size_t i = 0; i < cuts.size(); ++i) {
    add_cut(source, cuts[i]);
    // What comes behind would see GPT-2's alphabet instead of the text.
    const bool is_bytes = cuts[i].member("type").text() == "ByteLevel";
    if (is_bytes != (i + 1 == cuts.size())) part.refuse("ByteLevel, as the last of a sequence");
  }
  if (cuts.empty()) part.refuse("ByteLevel");
}

void read_normalizer(TokenizerSource& source, const Part& part) {
  if (!part.is_there()) return;
  const std::string& type = part.member("type").text();
  if (type == "Sequence") {
    for (const Part& step : part.member("normalizers").elements()) read_normalizer(source, step);
  } else if (type == "NFC") {
    source.composes = true;
  } else {
    part.refuse("no normalizer, or NFC");
  }
}

void read_model(TokenizerSource& source, const Part& model, const std::vector<Part>& added) {
  if (model.member("type").text_or("BPE") != "BPE") {
    model.member("type").refuse("a byte-level BPE");
  }
  if (model.member("dropout").is_there()) model.member("dropout").refuse("none");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.member(affix).text_or("").empty()) model.member(affix).refuse("none");
  }
  if (model.member("byte_fallback").flag_or(false)) model.member("byte_fallback").refuse("false");
  source.whole_words = model.member("ignore_merges").flag_or(false);
  const json& vocabulary = model.member("vocab").object();
  VocabularyReader reader(source.name, vocabulary.size() + added.size());
  for (const auto& [token, id] : vocabulary.items()) {
    reader.add(token, Part(source.name, "model.vocab." + shown(token), &id).integer());
  }
  for (const Part& token : added) {
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      if (token.member(flag).flag_or(false)) token.member(flag).refuse("false");
    }
    const int64_t id = token.member("id").integer();
    reader.add_written(token.member("content").text(), id);
    source.added.push_back({.id = static_cast<int32_t>(id),
                            .content = token.member("content").text(),
                            .special = token.member("special").flag_or(false),
                            .normalized = token.member("normalized").flag_or(true)});
  }
  for (const Part& pair : model.member("merges").elements()) {
    if (!pair.is_list()) {
      reader.merge(pair.text());
      continue;
    }
    const std::vector<Part> both = pair.elements();
    if (both.size() != 2) pair.refuse("two tokens");
    reader.merge(both[0].text(), both[1].text());
  }
  reader.move_to(source);
}

}  // namespace

TokenizerSource read_tokenizer_json(const std::filesystem::path& file) {
  TokenizerSource source;
  source.name = file.string();
  const json content = read_json(file);
  const Part root(source.name, "", &content);
  const Part added = root.member("added_tokens");
  read_normalizer(source, root.member("normalizer"));
  read_pre_tokenizer(source, root.member("pre_tokenizer"));
  read_model(source, root.member("model"),
             added.is_there() ? added.elements() : std::vector<Part>{});
  return source;
}

TokenizerSource read_gpt2_tokenizer(const std::filesystem::path& encoder_json,
                                    const std::filesystem::path& vocab_bpe) {
  TokenizerSource source;
  source.name = encoder_json.string();
  const json content = read_json(encoder_json);
  const json& vocabulary = Part(source.name, "", &content).object();
  VocabularyReader reader(source.name, vocabulary.size());
  for (const auto& [token, id] : vocabulary.items()) {
    reader.add(token, Part(source.name, shown(token), &id).integer());
  }
  constexpr const char* kEnd = "<|endoftext|>";
  const auto end = vocabulary.find(kEnd);
  if (end != vocabulary.end()) {
    const auto id = Part(source.name, kEnd, &*end).integer();
    reader.add_written(kEnd, id);
    source.added.push_back({.id = static_cast<int32_t>(id), .content = kEnd, .special = true});
  }
  const MappedFile merges(vocab_bpe);
  std::string_view lines = merges.bytes();
  while (!lines.empty()) {
    std::string_view line = lines.substr(0, lines.find('\n'));
    lines.remove_prefix(std::min(line.size() + 1, lines.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with("#version")) continue;
    try {
      reader.merge(line);
    } catch (const TextError& error) {
      throw TextError(merges.name(), std::string("does not fit its vocabulary: ") + error.what());
    }
  }
  source.words.add(Pattern(kGpt2Words, Pattern::Kind::kExpression, source.name));
  reader.move_to(source);
  return source;
}

}  // namespace zeropage::text::detail
