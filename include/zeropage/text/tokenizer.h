// A byte-level BPE tokenizer (Sennrich et al. 2016, over bytes as in GPT-2): text to the numbers that a model knows, and back. Free
// of LibTorch.
//
//   const auto tokenizer = text::Tokenizer::from_path("datasets/gpt2-bpe");
//   const std::vector<int32_t> ids = tokenizer.encode("It is a truth universally acknowledged");
//   tokenizer.decode(ids);  // the same text
//
// For text in UTF-8 the numbers are those of Hugging Face's `tokenizers`, and for GPT-2's vocabulary those of tiktoken. Bytes
// that are not UTF-8 are taken one by one: encode() throws for no text. decode(encode(b)) == b holds for any bytes,
// unless the vocabulary lacks some of them (missing_bytes()) or the tokenizer normalises text (Qwen2's does).
//
// Threads: a tokenizer does not change, so any number of threads may use one.
// Throws TextError for files that are missing, damaged, or of a kind of tokenizer that is not read here, which it names.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeropage::text {

class GgufFile;

// What becomes of "<|endoftext|>" and other special tokens that stand in a text.
enum class SpecialTokens : uint8_t {
  // They are text as any other, so a document cannot end itself. `tokenizers` has encode_special_tokens for this, tiktoken
  // encode_ordinary().
  kAsText,
  // Each becomes its number, as in `tokenizers` by default: for text that a template has made.
  kRecognised,
};

class Tokenizer {
 public:
  // Takes what is there: a GGUF file, a tokenizer.json, a folder with a tokenizer.json, or one with GPT-2's pair, encoder.json and
  // vocab.bpe (also under Hugging Face's names, vocab.json and merges.txt).
  static Tokenizer from_path(const std::filesystem::path& path);
  // GPT-2's files.
  static Tokenizer from_gpt2(const std::filesystem::path& encoder_json,
                             const std::filesystem::path& vocab_bpe);
  // Hugging Face's tokenizer.json with a byte-level BPE, as GPT-2, SmolLM2, Llama 3 and Qwen2 have it.
  static Tokenizer from_json(const std::filesystem::path& tokenizer_json);
  // The vocabulary of a GGUF file whose tokenizer.ggml.model is "gpt2". The file may be closed then.
  static Tokenizer from_gguf(const GgufFile& file);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  std::vector<int32_t> encode(std::string_view text,
                              SpecialTokens special = SpecialTokens::kAsText) const;
  // The same for long texts: hands the numbers to `take` in turns of some thousands.
  void encode(std::string_view text, SpecialTokens special,
              const std::function<void(std::span<const int32_t>)>& take) const;

  // The bytes that the numbers stand for, special tokens as they are written. Throws for a number that the vocabulary does not
  // have.
  std::string decode(std::span<const int32_t> ids) const;
  // Lives as long as the tokenizer.
  std::string_view bytes_of(int32_t id) const;

  // The number of a token, by its bytes: "<|im_end|>".
  std::optional<int32_t> id_of(std::string_view token) const;
  bool is_special(int32_t id) const;
  // The token that ends a document: the special token <|endoftext|>, <|end_of_text|>, <eos> or </s>, whichever is there.
  std::optional<int32_t> document_end() const;

  // One more than the largest number.
  int32_t vocabulary_size() const;
  // Equal for the same tokens under the same numbers, wherever they were read from.
  uint64_t vocabulary_hash() const;
  // The bytes that no token has by itself, in order. encode() leaves them out, as `tokenizers` does. SmolLM2 lacks 21, most
  // of which no text has.
  const std::string& missing_bytes() const;
  // Where it came from, for errors.
  const std::string& name() const;

 private:
  class Parts;
  explicit Tokenizer(std::unique_ptr<const Parts> parts);
  std::unique_ptr<const Parts> parts_;
};

// Decodes number by number, for a terminal: a character whose bytes are in several tokens comes out whole.
//
//   text::StreamDecoder stream(tokenizer);
//   while (...) std::cout << stream.add(next_id) << std::flush;
//   std::cout << stream.finish();
//
// The tokenizer must outlive it. Threads: one.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // What can be shown now: all bytes so far but those that may yet begin a character, 3 at most.
  std::string add(int32_t id);
  // What was held back.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string held_;
};

}  // namespace zeropage::text
