// The fuzzer's corpus, and mutations of it that are the same every time, for builds without a fuzzer.
#include "tests/fuzz/state_parser_fuzzer.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "tests/harness/small_states.h"

namespace state_parser_fuzzer_test {
namespace {

using zeropage::testing::bytes_in;

std::vector<std::string> corpus() {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(ZEROPAGE_FUZZ_CORPUS)) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::vector<std::string> inputs;
  for (const auto& file : files) inputs.push_back(bytes_in(file));
  return inputs;
}

void run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::string mutated(std::string input, const std::vector<std::string>& inputs,
                    std::mt19937& random) {
  static const std::vector<std::string> kTokens = {"{",
                                                   "}",
                                                   "[",
                                                   "]",
                                                   ":",
                                                   ",",
                                                   "\"",
                                                   "\\",
                                                   "\"shape\":[",
                                                   "18446744073709551615",
                                                   "-1",
                                                   "1e99",
                                                   "null",
                                                   "0",
                                                   "\xff",
                                                   "\"a\":",
                                                   "\"dtype\":\"F64\""};
  for (uint32_t edits = random() % 4 + 1; edits > 0; --edits) {
    const size_t at = random() % (input.size() + 1);
    switch (random() % 6) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ 1 << random() % 8);
        break;
      case 1:
        if (at < input.size()) input[at] = static_cast<char>(random());
        break;
      case 2:
        input.insert(at, kTokens[random() % kTokens.size()]);
        break;
      case 3:
        input.erase(at, random() % 16);
        break;
      case 4:
        input.insert(at, input.substr(at, random() % 64));
        break;
      default: {
        const std::string& other = inputs[random() % inputs.size()];
        input.replace(at, random() % 32, other.substr(random() % (other.size() + 1), 32));
      }
    }
  }
  // Half of them say how long their header is.
  if (input.size() >= 8 && random() % 2 == 0) {
    const size_t brace = input.rfind('}');
    if (brace != std::string::npos && brace >= 8) {
      uint64_t length = brace - 7;
      for (int i = 0; i < 8; ++i, length >>= 8) input[i] = static_cast<char>(length & 0xff);
    }
  }
  return input;
}

TEST(StateParserFuzzerTest, TheCorpusHarmsNoParser) {
  const auto inputs = corpus();
  ASSERT_GE(inputs.size(), 12U) << ZEROPAGE_FUZZ_CORPUS;
  for (const std::string& input : inputs) {
    for (size_t bytes = 0; bytes <= input.size(); ++bytes) run(input.substr(0, bytes));
  }
}

TEST(StateParserFuzzerTest, MutationsOfTheCorpusHarmNoParser) {
  const auto inputs = corpus();
  std::mt19937 random(1);
  for (int trial = 0; trial < 100'000; ++trial) {
    run(mutated(inputs[random() % inputs.size()], inputs, random));
  }
}

}  // namespace
}  // namespace state_parser_fuzzer_test
