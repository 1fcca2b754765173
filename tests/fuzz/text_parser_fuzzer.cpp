// Any bytes as a GGUF file with all that is read of one, as a tokenizer.json, as a file of tokens with what lies beside it, and as text. What is refused
// is a TextError; everything else is a finding. So is text that does not come back from its tokens.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "tests/text/small_vocabulary.h"
#include "zeropage/text/chat_examples.h"
#include "zeropage/text/gguf_file.h"
#include "zeropage/text/token_file.h"
#include "zeropage/text/tokenizer.h"

namespace {

using namespace zeropage::text;
using namespace zeropage::testing;

// A file in memory, under a path.
class MemoryFile {
 public:
  explicit MemoryFile(const std::string& bytes) : descriptor_(::memfd_create("input", 0)) {
    if (::write(descriptor_, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
      std::abort();
    }
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  const int descriptor_;
};

// Tokens of an accepted vocabulary are of it, and its own bytes come back.
void use(const Tokenizer& tokenizer, const std::string& text) {
  tokenizer.decode(tokenizer.encode(text));
  tokenizer.decode(tokenizer.encode(text, SpecialTokens::kRecognised));
}

void read_gguf(const std::string& path, const std::string& text) {
  const GgufFile file(path);
  for (const GgufTensor& tensor : file.tensors()) {
    std::vector<float> values(static_cast<size_t>(std::min<int64_t>(tensor.numel, 1 << 16)));
    if (can_read(tensor.type)) {
      file.read(tensor, 0, static_cast<int64_t>(values.size()), values.data());
    }
  }
  for (const auto& pair : file.metadata()) {
    text_error_of([&] { file.integer(pair.first); });
    text_error_of([&] { file.numbers(pair.first); });
    text_error_of([&] { file.strings(pair.first); });
  }
  use(Tokenizer::from_gguf(file), text);
}

void read_tokens(const std::string& path) {
  const TokenFile file(path);
  std::vector<int64_t> tokens(static_cast<size_t>(file.numel()));
  file.read(0, file.numel(), tokens.data());
  int64_t end = 0;
  for (const TokenRange& document : file.documents(1)) {
    if (document.begin != end || document.end <= document.begin) std::abort();
    end = document.end;
  }
  if (end != file.numel()) std::abort();
}

const Tokenizer& known_tokenizer() {
  static const Tokenizer tokenizer = [] {
    const MemoryFile file(SmallVocabulary().tokenizer_json().dump());
    return Tokenizer::from_json(file.path());
  }();
  return tokenizer;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  const std::string input(reinterpret_cast<const char*>(data), bytes);
  const MemoryFile file(input);
  text_error_of([&] { read_gguf(file.path(), input); });
  text_error_of([&] { use(Tokenizer::from_json(file.path()), input); });
  text_error_of([&] { read_tokens(file.path()); });
  text_error_of([&] { read_chat_examples(file.path(), known_tokenizer(), {}); });
  for (const SpecialTokens special : {SpecialTokens::kAsText, SpecialTokens::kRecognised}) {
    if (known_tokenizer().decode(known_tokenizer().encode(input, special)) != input) {
      std::fprintf(stderr, "text_parser_fuzzer: text does not come back from its tokens\n");
      std::abort();
    }
  }
  return 0;
}
