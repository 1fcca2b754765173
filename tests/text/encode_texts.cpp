// Encodes texts for tokenizer_against_references.py:
//
//   encode_texts TOKENIZER as-text|recognised < texts > tokens
//
// A text is its number of bytes (uint32) and the bytes; its tokens are their number (uint32) and each as int32. Seconds of the
// processor, and how many texts do not come back from their tokens, go to stderr.
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>
#include <time.h>
#include <vector>

#include "zeropage/text/tokenizer.h"

namespace {

using zeropage::text::SpecialTokens;
using zeropage::text::Tokenizer;

// Seconds of this thread, whatever else the machine does.
double processor_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int encode_all(const Tokenizer& tokenizer, SpecialTokens special) {
  const std::string input(std::istreambuf_iterator<char>(std::cin), {});
  double seconds = 0;
  int lost = 0;
  for (size_t at = 0; at + sizeof(uint32_t) <= input.size();) {
    uint32_t bytes = 0;
    input.copy(reinterpret_cast<char*>(&bytes), sizeof(bytes), at);
    const std::string text = input.substr(at + sizeof(bytes), bytes);
    at += sizeof(bytes) + bytes;
    const double begin = processor_seconds();
    const std::vector<int32_t> ids = tokenizer.encode(text, special);
    seconds += processor_seconds() - begin;
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
