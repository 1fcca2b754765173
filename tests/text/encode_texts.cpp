// Encodes texts for tokenizer_against_references.py:
//
//   encode_texts TOKENIZER as-text|recognised < texts > tokens
//
// A text is its number of bytes (uint32) and the bytes; its tokens are their number (uint32) and each as int32. The time goes to
// stderr, in seconds. Exit code 1: text that does not come back from its tokens, though the tokenizer has all bytes.
#include <chrono>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "zeropage/text/tokenizer.h"

namespace {

using zeropage::text::SpecialTokens;
using zeropage::text::Tokenizer;

int encode_all(const Tokenizer& tokenizer, SpecialTokens special) {
  const std::string input(std::istreambuf_iterator<char>(std::cin), {});
  double seconds = 0;
  int lost = 0;
  for (size_t at = 0; at + sizeof(uint32_t) <= input.size();) {
    uint32_t bytes = 0;
    input.copy(reinterpret_cast<char*>(&bytes), sizeof(bytes), at);
    const std::string text = input.substr(at + sizeof(bytes), bytes);
    at += sizeof(bytes) + bytes;
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<int32_t> ids = tokenizer.encode(text, special);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    lost += tokenizer.decode(ids) != text ? 1 : 0;
    const auto count = static_cast<uint32_t>(ids.size());
    std::fwrite(&count, sizeof(count), 1, stdout);
    std::fwrite(ids.data(), sizeof(int32_t), ids.size(), stdout);
  }
  std::fprintf(stderr, "%.6f %d\n", seconds, lost);
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::fprintf(stderr, "usage: encode_texts TOKENIZER as-text|recognised\n");
    return 2;
  }
  const bool recognised = std::string(argv[2]) == "recognised";
  return encode_all(Tokenizer::from_path(argv[1]),
                    recognised ? SpecialTokens::kRecognised : SpecialTokens::kAsText);
} catch (const std::exception& error) {
  std::fprintf(stderr, "encode_texts: %s\n", error.what());
  return 1;
}
