#include "tools/tokens_command.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "tools/token_maker.h"
#include "zeropage/text/text_error.h"

namespace zeropage::tools {
namespace {

using nlohmann::json;
using text::TokenFile;
using text::TokenFormat;
using text::Tokenizer;

constexpr int64_t kShownTokens = 64;

// \n, \t and \\ as a shell's quotes leave them.
std::string unescaped(const std::string& text) {
  std::string read;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      read += text[i];
      continue;
    }
    const char next = i + 1 < text.size() ? text[++i] : '\0';
    if (next != 'n' && next != 't' && next != '\\') {
      throw std::invalid_argument("--split-documents-by: expected \\n, \\t or \\\\, got " + text);
    }
    read += next == 'n' ? '\n' : next == 't' ? '\t' : '\\';
  }
  return read;
}

std::string shown_form(const TokenFile& file) {
  return std::string(file.format() == TokenFormat::kLlmC ? "llm.c" : "nanoGPT") + "'s form, " +
         std::to_string(file.bits()) + " bits a token";
}

}  // namespace

TokensCommand::TokensCommand(CLI::App& zp) {
  parser_ = zp.add_subcommand("tokens", "Make a file of tokens from texts, or show one");
  parser_->require_subcommand(1);
  make_ = parser_->add_subcommand("make", "Encode texts, each of them a document");
  make_->add_option("text", texts_, "Files of text, in any bytes")->required()->type_name("TEXT");
  make_->add_option("-o,--output", file_, "The file of tokens; FILE.json is written beside it")
      ->required()
      ->type_name("FILE");
  make_
      ->add_option(
          "--tokenizer", tokenizer_,
          "A GGUF file, a tokenizer.json, or a folder with one or with GPT-2's encoder.json "
          "and vocab.bpe")
      ->required()
      ->type_name("PATH");
  make_->add_option("--form", form_, "Headerless as nanoGPT's, or with llm.c's header [nanogpt]")
      ->check(CLI::IsMember({"nanogpt", "llm.c"}))
      ->type_name("NAME");
  make_
      ->add_option(
          "--split-documents-by", separator_,
          "Cut each text into documents wherever this stands, and leave it out; \\n and \\t "
          "are a new line and a tab")
      ->type_name("TEXT");
  make_->add_flag(
      "--special-tokens", special_,
      "Special tokens such as <|endoftext|> in a text become themselves; otherwise they "
      "are text");
  show_ = parser_->add_subcommand("show", "Say what a file of tokens has");
  show_->add_option("file", file_, "A file of tokens")->required()->type_name("FILE");
  show_
      ->add_option("--tokenizer", tokenizer_,
                   "Check that the tokens are of this vocabulary, and show the first as text")
      ->type_name("PATH");
  show_->add_flag("--json", json_, "One object, for programs");
}

int TokensCommand::run(const std::vector<std::string>& after_dashes) const {
  if (!after_dashes.empty()) throw std::invalid_argument("zp tokens takes nothing behind --");
  try {
    make_->parsed() ? make() : show();
    return 0;
  } catch (const text::TextError& error) {
    std::fprintf(stderr, "zp tokens: %s\n", error.what());
    return 1;
  }
}

void TokensCommand::make() const {
  const TokenMakerOptions options{
      .format = form_ == "llm.c" ? TokenFormat::kLlmC : TokenFormat::kNanoGpt,
      .special = special_ ? text::SpecialTokens::kRecognised : text::SpecialTokens::kAsText,
      .separator = unescaped(separator_)};
  for (const std::string& text : texts_) {
    std::error_code unknown;
    if (std::filesystem::equivalent(text, file_, unknown)) {
      throw text::TextError(
          file_, "is one of the texts, and its tokens would replace it; give another -o");
    }
  }
  const Tokenizer tokenizer = Tokenizer::from_path(tokenizer_);
  const MadeTokens made = make_tokens(texts_, file_, tokenizer, options);
  const auto bytes = static_cast<double>(made.bytes);
  std::printf("%s: %lld tokens in %lld documents, %.2f bytes a token; %.1f s, %.1f MB/s\n",
              file_.c_str(), static_cast<long long>(made.tokens),
              static_cast<long long>(made.documents),
              bytes / static_cast<double>(std::max<int64_t>(made.tokens, 1)), made.seconds,
              bytes / 1e6 / std::max(made.seconds, 1e-9));
  if (made.missing_bytes > 0) {
    std::fprintf(stderr,
                 "zp tokens: %lld bytes were left out: the vocabulary has no token for them\n",
                 static_cast<long long>(made.missing_bytes));
  }
}

void TokensCommand::show() const {
  const TokenFile file(file_);
  std::optional<Tokenizer> tokenizer;
  if (!tokenizer_.empty()) {
    tokenizer.emplace(Tokenizer::from_path(tokenizer_));
    file.check_vocabulary(*tokenizer);
  }
  const auto& vocabulary = file.vocabulary();
  const auto end = vocabulary  ? vocabulary->document_end
                   : tokenizer ? tokenizer->document_end()
                               : std::nullopt;
  std::optional<size_t> documents;
  if (end) documents = file.documents(end).size();
  std::vector<int32_t> first(static_cast<size_t>(std::min(file.numel(), kShownTokens)));
  file.read(0, static_cast<int64_t>(first.size()), first.data());
  json found = {{"file", file_},
                {"form", file.format() == TokenFormat::kLlmC ? "llm.c" : "nanogpt"},
                {"bits", file.bits()},
                {"tokens", file.numel()},
                {"documents", documents ? json(*documents) : json()},
                {"first", first}};
  if (vocabulary) found["vocabulary"] = {{"size", vocabulary->size}, {"name", vocabulary->name}};
  if (tokenizer) found["text"] = tokenizer->decode(first);
  constexpr auto kReplace = json::error_handler_t::replace;
  if (json_) {
    std::printf("%s\n", found.dump(2, ' ', false, kReplace).c_str());
    return;
  }
  std::printf("%s: %lld tokens, %s\n", file_.c_str(), static_cast<long long>(file.numel()),
              shown_form(file).c_str());
  if (documents) std::printf("documents: %zu\n", *documents);
  std::printf("vocabulary: %s\n",
              vocabulary
                  ? (std::to_string(vocabulary->size) + " tokens, " + vocabulary->name).c_str()
                  : "unknown; no .json lies beside the file");
  std::printf("begins: %s\n", json(first).dump().c_str());
  // JSON escapes what a terminal would obey.
  if (tokenizer) std::printf("as text: %s\n", found["text"].dump(-1, ' ', true, kReplace).c_str());
}

}  // namespace zeropage::tools
