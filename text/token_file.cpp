#include "zeropage/text/token_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "text/detail/json_file.h"
#include "text/detail/new_file.h"
#include "text/mapped_file.h"
#include "zeropage/text/text_error.h"
#include "zeropage/text/tokenizer.h"

namespace zeropage::text {
namespace {

using nlohmann::json;

constexpr size_t kHeaderNumbers = 256;
constexpr size_t kHeaderBytes = kHeaderNumbers * sizeof(int32_t);
constexpr int32_t kMostShortTokens = 1 << 16;
constexpr int kSidecarVersion = 1;
constexpr const char* kSidecarFormat = "zeropage tokens";
constexpr const char* kLlmCName = "llm.c";
constexpr const char* kNanoGptName = "nanoGPT";

// What llm.c has in front of tokens of either size (dev/data/data_common.py).
struct LlmCHeader {
  int bits;
  int32_t magic;
  int32_t version;
};
constexpr std::array<LlmCHeader, 2> kLlmCHeaders = {{{16, 20240520, 1}, {32, 20240801, 7}}};

std::filesystem::path sidecar_of(const std::filesystem::path& file) {
  return file.string() + ".json";
}

std::string hex_of(uint64_t number) {
  std::array<char, 16> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number, 16).ptr;
  const std::string shown(digits.data(), end);
  return std::string(digits.size() - shown.size(), '0') + shown;
}

std::string words_of(const TokenVocabulary& vocabulary) {
  return std::to_string(vocabulary.size) + " tokens, hash " + hex_of(vocabulary.hash) + " (" +
         vocabulary.name + ")";
}

struct Sidecar {
  TokenFormat format = TokenFormat::kNanoGpt;
  int bits = 0;
  int64_t numel = 0;
  TokenVocabulary vocabulary;
};

json to_json(const Sidecar& sidecar, int64_t documents) {
  const TokenVocabulary& vocabulary = sidecar.vocabulary;
  json written = {
      {"size", vocabulary.size}, {"hash", hex_of(vocabulary.hash)}, {"name", vocabulary.name}};
  if (vocabulary.document_end) written["document_end"] = *vocabulary.document_end;
  return {{"format", kSidecarFormat},
          {"version", kSidecarVersion},
          {"form", sidecar.format == TokenFormat::kLlmC ? kLlmCName : kNanoGptName},
          {"bits", sidecar.bits},
          {"tokens", sidecar.numel},
          {"documents", documents},
          {"vocabulary", written}};
}

Sidecar read_sidecar(const std::filesystem::path& path) {
  const json content = detail::read_json(path);
  try {
    if (content.at("format") != kSidecarFormat || content.at("version") != kSidecarVersion) {
      throw TextError(path.string(), "expected \"format\": \"" + std::string(kSidecarFormat) +
                                         "\", \"version\": 1, got others");
    }
    Sidecar sidecar;
    const bool has_header = content.at("form") == kLlmCName;
    if (!has_header && content.at("form") != kNanoGptName) {
      throw TextError(path.string(),
                      "form: expected nanoGPT or llm.c, got " + content["form"].dump());
    }
    sidecar.format = has_header ? TokenFormat::kLlmC : TokenFormat::kNanoGpt;
    sidecar.bits = content.at("bits").get<int>();
    sidecar.numel = content.at("tokens").get<int64_t>();
    const json& vocabulary = content.at("vocabulary");
    sidecar.vocabulary.size = vocabulary.at("size").get<int32_t>();
    sidecar.vocabulary.name = vocabulary.at("name").get<std::string>();
    const auto& hash = vocabulary.at("hash").get_ref<const std::string&>();
    const auto read =
        std::from_chars(hash.data(), hash.data() + hash.size(), sidecar.vocabulary.hash, 16);
    if (read.ec != std::errc() || read.ptr != hash.data() + hash.size()) {
      throw TextError(path.string(), "vocabulary.hash: expected 16 digits, got " + hash);
    }
    if (vocabulary.contains("document_end")) {
      sidecar.vocabulary.document_end = vocabulary.at("document_end").get<int32_t>();
    }
    if (sidecar.bits != 16 && sidecar.bits != 32) {
      throw TextError(path.string(),
                      "bits: expected 16 or 32, got " + std::to_string(sidecar.bits));
    }
    return sidecar;
  } catch (const json::exception& error) {
    throw TextError(path.string(),
                    std::string("expected what zp tokens writes beside a file of tokens, got "
                                "something else: ") +
                        error.what());
  }
}

}  // namespace

TokenVocabulary TokenVocabulary::of(const Tokenizer& tokenizer) {
  return {.size = tokenizer.vocabulary_size(),
          .hash = tokenizer.vocabulary_hash(),
          .document_end = tokenizer.document_end(),
          .name = tokenizer.name()};
}

class TokenFile::Contents {
 public:
  explicit Contents(const std::filesystem::path& path) : file(path), tokens(file.bytes()) {
    const std::filesystem::path beside = sidecar_of(path);
    std::optional<Sidecar> sidecar;
    if (std::filesystem::exists(beside)) sidecar = read_sidecar(beside);
    // Any bytes may be tokens, so what lies beside the file says first whether it has a header.
    if (!sidecar || sidecar->format == TokenFormat::kLlmC) read_header();
    if (sidecar && format == TokenFormat::kNanoGpt) bits = sidecar->bits;
    const size_t bytes = static_cast<size_t>(bits) / 8;
    if (tokens.size() % bytes != 0) {
      throw TextError(file.name(), "expected tokens of " + std::to_string(bytes) +
                                       " bytes each, got " + std::to_string(tokens.size()) +
                                       " bytes; the file was cut off, or has no tokens");
    }
    numel = static_cast<int64_t>(tokens.size() / bytes);
    if (counted && *counted != numel) {
      throw TextError(file.name(), "expected " + std::to_string(*counted) +
                                       " tokens, as its header says, got " + std::to_string(numel) +
                                       "; the file was cut off, or is damaged");
    }
    if (!sidecar) return;
    if (sidecar->format != format || sidecar->numel != numel || sidecar->bits != bits) {
      throw TextError(file.name(),
                      "expected " + std::to_string(sidecar->numel) + " tokens of " +
                          std::to_string(sidecar->bits) + " bits, as " + beside.string() +
                          " says, got " + std::to_string(numel) + " of " + std::to_string(bits) +
                          "; one of the two is of another file: make the tokens again, or "
                          "remove the .json");
    }
    vocabulary = std::move(sidecar->vocabulary);
  }

  void check_range(int64_t first, int64_t count) const {
    if (first >= 0 && count >= 0 && first <= numel && count <= numel - first) return;
    throw TextError(file.name(), "expected tokens from 0 to " + std::to_string(numel) + ", got " +
                                     std::to_string(count) + " from " + std::to_string(first) +
                                     " on");
  }

  // Calls take(index, token) for tokens of a range that is there.
  template <typename Take>
  void each(int64_t first, int64_t count, const Take& take) const {
    bits == 16 ? each_of<uint16_t>(first, count, take) : each_of<uint32_t>(first, count, take);
  }

  const MappedFile file;
  std::string_view tokens;  // as bytes
  TokenFormat format = TokenFormat::kNanoGpt;
  int bits = 16;
  int64_t numel = 0;
  std::optional<TokenVocabulary> vocabulary;

 private:
  void read_header() {
    std::array<int32_t, 3> header{};
    if (tokens.size() < sizeof(header)) return;
    std::memcpy(header.data(), tokens.data(), sizeof(header));
    for (const LlmCHeader& known : kLlmCHeaders) {
      if (header[0] != known.magic) continue;
      if (header[1] != known.version || header[2] < 0) {
        throw TextError(file.name(), "expected version " + std::to_string(known.version) +
                                         " of llm.c's files of tokens and a count, got version " +
                                         std::to_string(header[1]) + " and " +
                                         std::to_string(header[2]));
      }
      if (tokens.size() < kHeaderBytes) {
        throw TextError(file.name(), "expected llm.c's header of " + std::to_string(kHeaderBytes) +
                                         " bytes, got " + std::to_string(tokens.size()) +
                                         "; the file was cut off");
      }
      format = TokenFormat::kLlmC;
      bits = known.bits;
      counted = header[2];
      tokens.remove_prefix(kHeaderBytes);
      return;
    }
  }

  template <typename Token, typename Take>
  void each_of(int64_t first, int64_t count, const Take& take) const {
    const char* const from = tokens.data() + static_cast<size_t>(first) * sizeof(Token);
    for (int64_t i = 0; i < count; ++i) {
      Token token;
      std::memcpy(&token, from + static_cast<size_t>(i) * sizeof(Token), sizeof(Token));
      take(i, token);
    }
  }

  std::optional<int64_t> counted;  // by the header
};

TokenFile::TokenFile(const std::filesystem::path& path)
    : contents_(std::make_unique<const Contents>(path)) {}
TokenFile::~TokenFile() = default;

const std::string& TokenFile::name() const {
  return contents_->file.name();
}
TokenFormat TokenFile::format() const {
  return contents_->format;
}
int TokenFile::bits() const {
  return contents_->bits;
}
int64_t TokenFile::numel() const {
  return contents_->numel;
}
const std::optional<TokenVocabulary>& TokenFile::vocabulary() const {
  return contents_->vocabulary;
}

void TokenFile::read(int64_t first, int64_t count, int32_t* out) const {
  contents_->check_range(first, count);
  contents_->each(first, count,
                  [out](int64_t i, uint32_t token) { out[i] = static_cast<int32_t>(token); });
}

void TokenFile::read(int64_t first, int64_t count, int64_t* out) const {
  contents_->check_range(first, count);
  contents_->each(first, count, [out](int64_t i, uint32_t token) { out[i] = token; });
}

void TokenFile::check_vocabulary(const Tokenizer& tokenizer) const {
  const TokenVocabulary expected = TokenVocabulary::of(tokenizer);
  if (vocabulary()) {
    if (vocabulary()->size == expected.size && vocabulary()->hash == expected.hash) return;
    throw TextError(name(), "expected tokens of the vocabulary with " + words_of(expected) +
                                ", got those of " + words_of(*vocabulary()) +
                                "; make them again with that tokenizer");
  }
  contents_->each(0, numel(), [&](int64_t i, uint32_t token) {
    if (token < static_cast<uint32_t>(expected.size)) return;
    throw TextError(name(), "token " + std::to_string(i) +
                                ": expected one of the vocabulary with " + words_of(expected) +
                                ", got " + std::to_string(token) +
                                "; the file is of another vocabulary");
  });
}

std::vector<TokenRange> TokenFile::documents(std::optional<int32_t> document_end) const {
  if (!document_end && vocabulary()) document_end = vocabulary()->document_end;
  if (!document_end) {
    throw TextError(
        name(),
        "expected to know the token that ends a document, got a file that does not say; "
        "name the token");
  }
  const auto end = static_cast<uint32_t>(*document_end);
  std::vector<TokenRange> found;
  bool in_front = false;
  int64_t begin = 0;
  const auto add = [&](int64_t to) {
    if (to > begin) found.push_back({begin, to});
    begin = to;
  };
  contents_->each(0, numel(), [&](int64_t i, uint32_t token) {
    if (token != end) return;
    if (i == 0) in_front = true;
    add(in_front ? i : i + 1);
  });
  add(numel());
  return found;
}

class TokenFileWriter::Output {
 public:
  Output(const std::filesystem::path& path, TokenFormat form, TokenVocabulary of)
      : name(path.string()),
        format(form),
        vocabulary(std::move(of)),
        bits(vocabulary.size <= kMostShortTokens ? 16 : 32),
        beside(sidecar_of(path)),
        tokens(path),
        sidecar(beside) {
    if (format == TokenFormat::kLlmC) tokens.write(header());
  }

  void write(std::span<const int32_t> added) {
    for (const int32_t token : added) {
      if (token >= 0 && token < vocabulary.size) continue;
      throw TextError(name, "expected tokens of the vocabulary with " + words_of(vocabulary) +
                                ", got " + std::to_string(token));
    }
    numel += static_cast<int64_t>(added.size());
    if (format == TokenFormat::kLlmC && numel > std::numeric_limits<int32_t>::max()) {
      throw TextError(
          name,
          "expected 2^31 - 1 tokens or fewer, which llm.c's header can count, got more; write "
          "several files, or nanoGPT's form");
    }
    if (bits == 32) {
      tokens.write({reinterpret_cast<const char*>(added.data()), added.size_bytes()});
      return;
    }
    std::vector<uint16_t> narrow(added.begin(), added.end());
    tokens.write({reinterpret_cast<const char*>(narrow.data()), 2 * narrow.size()});
  }

  void finish() {
    if (format == TokenFormat::kLlmC) tokens.write_beginning(header());
    sidecar.write(to_json({format, bits, numel, vocabulary}, documents).dump(1) + "\n");
    tokens.sync();
    sidecar.sync();
    // A file that is killed here lies without the other, and never beside that of an earlier one.
    std::filesystem::remove(beside);
    tokens.publish();
    sidecar.publish();
  }

  const std::string name;
  const TokenFormat format;
  const TokenVocabulary vocabulary;
  const int bits;
  int64_t numel = 0;
  int64_t documents = 0;

 private:
  std::string header() const {
    const LlmCHeader& known = kLlmCHeaders[bits == 16 ? 0 : 1];
    std::array<int32_t, kHeaderNumbers> numbers{};
    numbers[0] = known.magic;
    numbers[1] = known.version;
    numbers[2] = static_cast<int32_t>(numel);
    return {reinterpret_cast<const char*>(numbers.data()), kHeaderBytes};
  }

  const std::filesystem::path beside;
  detail::NewFile tokens;
  detail::NewFile sidecar;
};

TokenFileWriter::TokenFileWriter(const std::filesystem::path& path, TokenFormat format,
                                 TokenVocabulary vocabulary)
    : output_(std::make_unique<Output>(path, format, std::move(vocabulary))) {}
TokenFileWriter::~TokenFileWriter() = default;

void TokenFileWriter::write(std::span<const int32_t> tokens) {
  output_->write(tokens);
}

void TokenFileWriter::end_document() {
  if (!output_->vocabulary.document_end) {
    throw TextError(output_->name,
                    "expected a vocabulary with a token that ends a document, got " +
                        words_of(output_->vocabulary) +
                        ", which has none of <|endoftext|>, <|end_of_text|>, <eos> and </s>");
  }
  output_->write({&*output_->vocabulary.document_end, 1});
  ++output_->documents;
}

void TokenFileWriter::finish() {
  output_->finish();
}

int64_t TokenFileWriter::numel() const {
  return output_->numel;
}
int64_t TokenFileWriter::document_count() const {
  return output_->documents;
}

}  // namespace zeropage::text
