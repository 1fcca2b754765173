#include "language_model/weights/tokenizer_files.h"

#include <array>
#include <utility>
#include <vector>

#include <zeropage/text/text_error.h>
#include <zeropage/text/tokenizer.h>

#include "language_model/weights/export.h"

namespace language_model {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using zeropage::text::GgufFile;

constexpr const char* kTokenizer = "tokenizer.json";
constexpr std::array kFiles = {kTokenizer,
                               "tokenizer_config.json",
                               "vocab.json",
                               "merges.txt",
                               "encoder.json",
                               "vocab.bpe",
                               "added_tokens.json",
                               "special_tokens_map.json",
                               "generation_config.json"};

// Types of tokens in GGUF.
constexpr int64_t kControlToken = 3;
constexpr int64_t kUserToken = 4;

// Llama 3's words; Qwen2 takes digits one by one.
json words(const std::string& digits) {
  return {{"type", "Split"},
          {"pattern",
           {{"Regex", R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|)" + digits +
                          R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}}},
          {"behavior", "Isolated"},
          {"invert", false}};
}

json bytes(bool into_words) {
  return {{"type", "ByteLevel"},
          {"add_prefix_space", false},
          {"trim_offsets", true},
          {"use_regex", into_words}};
}

json sequence(const json& first, const json& second) {
  return {{"type", "Sequence"}, {"pretokenizers", {first, second}}};
}

// pre: llama.cpp's name of it, of those that Tokenizer reads.
json pre_tokenizer_of(const std::string& pre) {
  if (pre == "smollm" || pre == "starcoder") {
    return sequence({{"type", "Digits"}, {"individual_digits", true}}, bytes(true));
  }
  if (pre == "llama-bpe" || pre == "llama3") return sequence(words(R"(\p{N}{1,3})"), bytes(false));
  if (pre == "qwen2") return sequence(words(R"(\p{N})"), bytes(false));
  return bytes(true);
}

}  // namespace

json tokenizer_json_of(const GgufFile& file) {
  // Refuses what is not read here, with a sentence.
  zeropage::text::Tokenizer::from_gguf(file);
  const std::string pre(file.string("tokenizer.ggml.pre"));
  const auto tokens = file.strings("tokenizer.ggml.tokens");
  std::vector<int64_t> types(tokens.size(), 0);
  if (file.has("tokenizer.ggml.token_type")) types = file.integers("tokenizer.ggml.token_type");
  json vocabulary = json::object(), added = json::array(), merges = json::array();
  for (size_t id = 0; id < tokens.size(); ++id) {
    vocabulary[std::string(tokens[id])] = id;
    if (types[id] != kControlToken && types[id] != kUserToken) continue;
    added.push_back({{"id", id},
                     {"content", tokens[id]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", types[id] == kControlToken}});
  }
  for (const std::string_view pair : file.strings("tokenizer.ggml.merges")) merges.push_back(pair);
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", pre == "qwen2" ? json({{"type", "NFC"}}) : json()},
          {"pre_tokenizer", pre_tokenizer_of(pre)},
          {"post_processor", nullptr},
          {"decoder", bytes(true)},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", pre == "llama-bpe" || pre == "llama3"},
            {"vocab", vocabulary},
            {"merges", merges}}}};
}

json tokenizer_config_of(const GgufFile& file) {
  const auto tokens = file.strings("tokenizer.ggml.tokens");
  json config = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"clean_up_tokenization_spaces", false}};
  for (const auto& [key, name] :
       std::vector<std::pair<std::string, std::string>>{{"bos_token_id", "bos_token"},
                                                        {"eos_token_id", "eos_token"},
                                                        {"unknown_token_id", "unk_token"},
                                                        {"padding_token_id", "pad_token"}}) {
    if (!file.has("tokenizer.ggml." + key)) continue;
    const auto id = static_cast<size_t>(file.integer("tokenizer.ggml." + key));
    if (id < tokens.size()) config[name] = tokens[id];
  }
  if (file.has("tokenizer.chat_template")) {
    config["chat_template"] = file.string("tokenizer.chat_template");
  }
  return config;
}

std::string write_tokenizer(const fs::path& from, const fs::path& to) {
  if (from.empty()) return "";
  if (from.extension() == ".gguf") {
    const GgufFile file(from);
    try {
      write_json(to / kTokenizer, tokenizer_json_of(file));
      write_json(to / "tokenizer_config.json", tokenizer_config_of(file));
      return "";
    } catch (const zeropage::text::TextError& error) {
      return std::string(error.what()) + ", so " + to.string() +
             " has no tokenizer; take tokenizer.json from the page of the model in safetensors";
    }
  }
  if (!fs::is_directory(from)) {
    fs::copy_file(from, to / kTokenizer, fs::copy_options::overwrite_existing);
    return "";
  }
  bool has_any = false;
  for (const char* file : kFiles) {
    if (!fs::exists(from / file)) continue;
    has_any = true;
    if (fs::equivalent(from, to)) continue;
    fs::copy_file(from / file, to / file, fs::copy_options::overwrite_existing);
  }
  return has_any ? ""
                 : from.string() + ": has no tokenizer's file, so " + to.string() + " has none";
}

}  // namespace language_model
