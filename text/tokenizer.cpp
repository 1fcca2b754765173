#include "zeropage/text/tokenizer.h"

#include <algorithm>
#include <array>
#include <utility>

#include "text/detail/normal_form.h"
#include "text/detail/tokenizer_source.h"
#include "text/detail/utf8.h"
#include "zeropage/text/gguf_file.h"
#include "zeropage/text/text_error.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zeropage::text {
namespace {

constexpr size_t kTokensATurn = 1 << 16;
constexpr std::array<std::string_view, 4> kDocumentEnds = {"<|endoftext|>", "<|end_of_text|>",
                                                           "<eos>", "</s>"};

// Names, numbers and order of all tokens in one number.
uint64_t hash_of(const std::vector<std::string>& tokens) {
  std::string all;
  for (const std::string& token : tokens) all += std::to_string(token.size()) + ":" + token;
  return XXH3_64bits(all.data(), all.size());
}

}  // namespace

class Tokenizer::Parts {
 public:
  explicit Parts(detail::TokenizerSource from)
      : source(std::move(from)),
        pairs(source.tokens, source.is_word, source.merges, {.whole_words = source.whole_words}),
        hash(hash_of(source.tokens)),
        is_special(source.tokens.size()) {
    for (const detail::AddedToken& token : source.added) {
      detail::AddedToken looked_for = token;
      // Where text is composed, so is what is looked for in it.
      if (token.normalized && source.composes) looked_for.content = detail::composed(token.content);
      (token.normalized ? added_to_normal_text : added).add(std::move(looked_for));
      if (token.special) is_special[static_cast<size_t>(token.id)] = true;
    }
  }

  using Take = std::function<void(std::span<const int32_t>)>;
  void encode(std::string_view text, bool with_special, const Take& take) const {
    std::vector<int32_t> ids;
    const auto add = [&](int32_t id) { ids.push_back(id); };
    const auto words_of = [&](std::string_view piece) {
      source.words.each_word(piece, [&](std::string_view word) {
        pairs.encode(word, ids);
        if (ids.size() < kTokensATurn) return;
        take(ids);
        ids.clear();
      });
    };
    const auto normal_text = [&](std::string_view piece) {
      added_to_normal_text.split(piece, with_special, words_of, add);
    };
    added.split(
        text, with_special,
        [&](std::string_view piece) {
          source.composes ? normal_text(detail::composed(piece)) : normal_text(piece);
        },
        add);
    if (!ids.empty()) take(ids);
  }

  const detail::TokenizerSource source;
  const detail::BytePairs pairs;
  const uint64_t hash;
  detail::AddedTokens added;
  detail::AddedTokens added_to_normal_text;
  std::vector<bool> is_special;
};

Tokenizer::Tokenizer(std::unique_ptr<const Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::from_path(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) throw TextError(path.string(), "there is no such file");
  if (!std::filesystem::is_directory(path)) {
    return path.extension() == ".gguf" ? from_gguf(GgufFile(path)) : from_json(path);
  }
  if (std::filesystem::exists(path / "tokenizer.json")) return from_json(path / "tokenizer.json");
  constexpr std::array<std::pair<const char*, const char*>, 2> kPairs = {
      {{"encoder.json", "vocab.bpe"}, {"vocab.json", "merges.txt"}}};
  for (const auto& [vocabulary, merges] : kPairs) {
    if (std::filesystem::exists(path / vocabulary)) {
      return from_gpt2(path / vocabulary, path / merges);
    }
  }
  throw TextError(path.string(),
                  "expected a folder with tokenizer.json, encoder.json and vocab.bpe, or "
                  "vocab.json and merges.txt, got none of them; a GGUF file is named by itself");
}

Tokenizer Tokenizer::from_gpt2(const std::filesystem::path& encoder_json,
                               const std::filesystem::path& vocab_bpe) {
  return Tokenizer(
      std::make_unique<const Parts>(detail::read_gpt2_tokenizer(encoder_json, vocab_bpe)));
}

Tokenizer Tokenizer::from_json(const std::filesystem::path& tokenizer_json) {
  return Tokenizer(std::make_unique<const Parts>(detail::read_tokenizer_json(tokenizer_json)));
}

Tokenizer Tokenizer::from_gguf(const GgufFile& file) {
  return Tokenizer(std::make_unique<const Parts>(detail::read_gguf_tokenizer(file)));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, SpecialTokens special) const {
  std::vector<int32_t> all;
  encode(text, special,
         [&](std::span<const int32_t> ids) { all.insert(all.end(), ids.begin(), ids.end()); });
  return all;
}

void Tokenizer::encode(std::string_view text, SpecialTokens special,
                       const std::function<void(std::span<const int32_t>)>& take) const {
  parts_->encode(text, special == SpecialTokens::kRecognised, take);
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += bytes_of(id);
  return text;
}

std::string_view Tokenizer::bytes_of(int32_t id) const {
  const auto& tokens = parts_->source.tokens;
  if (id < 0 || id >= vocabulary_size() || tokens[static_cast<size_t>(id)].empty()) {
    throw TextError(name(), "expected the number of a token, from 0 to " +
                                std::to_string(vocabulary_size() - 1) + ", got " +
                                std::to_string(id));
  }
  return tokens[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::id_of(std::string_view token) const {
  for (const detail::AddedToken& added : parts_->source.added) {
    if (added.content == token) return added.id;
  }
  const int32_t id = parts_->pairs.find(token);
  return id >= 0 ? std::optional(id) : std::nullopt;
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocabulary_size() && parts_->is_special[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::document_end() const {
  for (const std::string_view token : kDocumentEnds) {
    const auto id = id_of(token);
    if (id && is_special(*id)) return id;
  }
  return std::nullopt;
}

int32_t Tokenizer::vocabulary_size() const {
  return static_cast<int32_t>(parts_->source.tokens.size());
}
uint64_t Tokenizer::vocabulary_hash() const {
  return parts_->hash;
}
const std::string& Tokenizer::missing_bytes() const {
  return parts_->pairs.missing_bytes();
}
const std::string& Tokenizer::name() const {
  return parts_->source.name;
}

std::string StreamDecoder::add(int32_t id) {
  held_ += tokenizer_.bytes_of(id);
  std::string shown = std::move(held_);
  held_ = shown.substr(shown.size() - detail::unfinished_at_end(shown));
  shown.resize(shown.size() - held_.size());
  return shown;
}

std::string StreamDecoder::finish() {
  return std::exchange(held_, {});
}

}  // namespace zeropage::text
