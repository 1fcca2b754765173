// Files of tokens, as training reads them: mapped into memory, so that a data set of any size takes none of its own. Free of
// LibTorch.
//
//   const text::TokenFile file("train.bin");
//   file.check_vocabulary(tokenizer);
//   file.read(position, 1025, tokens.data());
//
// Two forms are written and read, both little-endian:
//
//   nanoGPT's   the tokens and nothing else
//   llm.c's     256 numbers of 32 bits (a magic number, a version, how many tokens follow, zeros), then the tokens
//
// A token takes 16 bits where the vocabulary has up to 65,536 tokens, and 32 otherwise. Beside FILE lies FILE.json, which says of
// which vocabulary the tokens are and how many. A file that another program wrote has none; its tokens are then taken
// for 16 bits, or what the header of llm.c says.
//
// Documents follow each other, each with the end-of-text token at its end. llm.c's own files have that token at the beginning of each: a file that
// begins with it is taken so.
//
// Threads: a TokenFile does not change, so any may read it. A writer belongs to one thread.
// Throws TextError: the file, what was expected and what is there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace zeropage::text {

class Tokenizer;

enum class TokenFormat : uint8_t { kNanoGpt, kLlmC };

// What is kept of the vocabulary that a file's tokens are of.
struct TokenVocabulary {
  int32_t size = 0;
  uint64_t hash = 0;
  std::optional<int32_t> document_end = {};
  std::string name = {};  // where it was read from

  static TokenVocabulary of(const Tokenizer& tokenizer);
};

// Tokens [begin, end) of a file.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;

  bool operator==(const TokenRange&) const = default;
};

class TokenFile {
 public:
  // Checks the header, the file that lies beside it, and the file's size against both.
  explicit TokenFile(const std::filesystem::path& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const std::string& name() const;
  TokenFormat format() const;
  int bits() const;  // 16 or 32
  int64_t numel() const;
  // Nothing where no file lies beside it.
  const std::optional<TokenVocabulary>& vocabulary() const;

  // Tokens [first, first + count). Throws for tokens that the file does not have.
  void read(int64_t first, int64_t count, int32_t* out) const;
  void read(int64_t first, int64_t count, int64_t* out) const;  // as LibTorch wants indices

  // Throws unless the tokens are of this vocabulary, with both in words. If the file does not say of which they are, throws for a
  // token that the vocabulary does not have, which reads the whole file.
  void check_vocabulary(const Tokenizer& tokenizer) const;

  // All documents, in order, each with its end-of-text token. Reads the whole file. document_end: that token; if the file says
  // which it is, that may be left out.
  std::vector<TokenRange> documents(std::optional<int32_t> document_end = std::nullopt) const;

 private:
  class Contents;
  std::unique_ptr<const Contents> contents_;
};

// Writes a file of tokens and what lies beside it. The file gets its name in finish(); without it nothing is left.
class TokenFileWriter {
 public:
  // Creates the file under another name beside `path`, so that a folder that cannot be written to is named at once.
  TokenFileWriter(const std::filesystem::path& path, TokenFormat format,
                  TokenVocabulary vocabulary);
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  // Throws for a number that the vocabulary does not have, and for more tokens than llm.c's header can count, 2^31 - 1.
  void write(std::span<const int32_t> tokens);
  // The end-of-text token. Throws where the vocabulary has none.
  void end_document();
  void finish();

  int64_t numel() const;
  int64_t document_count() const;

 private:
  class Output;
  std::unique_ptr<Output> output_;
};

}  // namespace zeropage::text
