#include "zeropage/text/token_file.h"

#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/text/small_vocabulary.h"
#include "zeropage/text/tokenizer.h"

namespace zeropage::text::token_file_test {
namespace {

using namespace zeropage::testing;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename T>
std::string packed(const std::vector<T>& values) {
  std::string bytes;
  for (const T value : values) bytes += bytes_of(value);
  return bytes;
}

std::string llm_c_header(int32_t magic, int32_t version, int32_t count) {
  std::vector<int32_t> numbers(256);
  numbers[0] = magic;
  numbers[1] = version;
  numbers[2] = count;
  return packed(numbers);
}

std::vector<int32_t> tokens_in(const TokenFile& file) {
  std::vector<int32_t> tokens(static_cast<size_t>(file.numel()));
  file.read(0, file.numel(), tokens.data());
  return tokens;
}

class TokenFileTest : public ::testing::Test {
 protected:
  std::filesystem::path path() const { return scratch_ / "train.bin"; }
  std::filesystem::path beside() const { return scratch_ / "train.bin.json"; }
  Tokenizer tokenizer() const {
    return Tokenizer::from_json(
        scratch_.put("tokenizer.json", vocabulary_.tokenizer_json().dump()));
  }
  // Two documents, "he" and "ll".
  void write(TokenFormat format, const TokenVocabulary& vocabulary) const {
    TokenFileWriter writer(path(), format, vocabulary);
    writer.write(std::vector<int32_t>{256});
    writer.end_document();
    writer.write(std::vector<int32_t>{259});
    writer.end_document();
    EXPECT_EQ(writer.numel(), 4);
    EXPECT_EQ(writer.document_count(), 2);
    writer.finish();
  }
  std::string error_of_opening() const {
    return text_error_of([&] { const TokenFile file(path()); });
  }
  std::vector<std::string> names_in_folder() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(scratch_.path())) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  const TextScratch scratch_;
  SmallVocabulary vocabulary_;
  const TokenVocabulary wide_{.size = 128'256, .hash = 5, .document_end = 128'001, .name = "llama"};
};

TEST_F(TokenFileTest, NanoGptsFormIsNothingButTokens) {
  write(TokenFormat::kNanoGpt, TokenVocabulary::of(tokenizer()));
  EXPECT_EQ(text_in(path()), packed<uint16_t>({256, 267, 259, 267}));
  const TokenFile file(path());
  EXPECT_EQ(file.format(), TokenFormat::kNanoGpt);
  EXPECT_EQ(file.bits(), 16);
  EXPECT_THAT(tokens_in(file), ElementsAre(256, 267, 259, 267));
  EXPECT_EQ(file.vocabulary()->size, 270);
  file.check_vocabulary(tokenizer());
}

TEST_F(TokenFileTest, LlmCsFormHasItsHeader) {
  write(TokenFormat::kLlmC, TokenVocabulary::of(tokenizer()));
  EXPECT_EQ(text_in(path()), llm_c_header(20240520, 1, 4) + packed<uint16_t>({256, 267, 259, 267}));
  const TokenFile file(path());
  EXPECT_EQ(file.format(), TokenFormat::kLlmC);
  EXPECT_THAT(tokens_in(file), ElementsAre(256, 267, 259, 267));
}

TEST_F(TokenFileTest, LargerVocabulariesTake32Bits) {
  for (const TokenFormat format : {TokenFormat::kNanoGpt, TokenFormat::kLlmC}) {
    write(format, wide_);
    const std::string tokens = packed<uint32_t>({256, 128'001, 259, 128'001});
    EXPECT_EQ(text_in(path()),
              format == TokenFormat::kLlmC ? llm_c_header(20240801, 7, 4) + tokens : tokens);
    const TokenFile file(path());
    EXPECT_EQ(file.bits(), 32);
    int64_t second = 0;
    file.read(1, 1, &second);
    EXPECT_EQ(second, 128'001);
    EXPECT_EQ(file.documents(), (std::vector<TokenRange>{{0, 2}, {2, 4}}));
  }
}

TEST_F(TokenFileTest, FilesOfOtherProgramsAreRead) {
  scratch_.put("train.bin", packed<uint16_t>({1, 2, 65535}));
  EXPECT_THAT(tokens_in(TokenFile(path())), ElementsAre(1, 2, 65535));
  EXPECT_EQ(TokenFile(path()).vocabulary(), std::nullopt);
  scratch_.put("train.bin", llm_c_header(20240801, 7, 1) + packed<uint32_t>({100'000}));
  EXPECT_THAT(tokens_in(TokenFile(path())), ElementsAre(100'000));
  // llm.c has the end-of-text token in front of documents, nanoGPT behind them.
  scratch_.put("train.bin", packed<uint16_t>({9, 1, 2, 9, 3}));
  EXPECT_EQ(TokenFile(path()).documents(9), (std::vector<TokenRange>{{0, 3}, {3, 5}}));
  scratch_.put("train.bin", packed<uint16_t>({1, 2, 9, 3, 9, 4}));
  EXPECT_EQ(TokenFile(path()).documents(9), (std::vector<TokenRange>{{0, 3}, {3, 5}, {5, 6}}));
  EXPECT_EQ(TokenFile(path()).documents(7), (std::vector<TokenRange>{{0, 6}}));
  EXPECT_THAT(text_error_of([&] { TokenFile(path()).documents(); }), HasSubstr("name the token"));
}

TEST_F(TokenFileTest, TokensThatBeginAsAHeaderDoesAreTokensWhereTheFileBesideSaysSo) {
  TokenVocabulary vocabulary = wide_;
  vocabulary.size = 65'536;
  vocabulary.document_end = 3;
  TokenFileWriter writer(path(), TokenFormat::kNanoGpt, vocabulary);
  const std::vector<int32_t> tokens = {20240520 % 65536, 20240520 / 65536, 1, 0, 5, 6};
  writer.write(tokens);
  writer.finish();
  EXPECT_EQ(tokens_in(TokenFile(path())), tokens);
}

TEST_F(TokenFileTest, TokensOfAnotherVocabularyAreRefusedWithBothInWords) {
  write(TokenFormat::kNanoGpt, TokenVocabulary::of(tokenizer()));
  vocabulary_.merge("o", "o");
  const Tokenizer other =
      Tokenizer::from_json(scratch_.put("other.json", vocabulary_.tokenizer_json().dump()));
  EXPECT_THAT(text_error_of([&] { TokenFile(path()).check_vocabulary(other); }),
              AllOf(HasSubstr("train.bin: expected tokens of the vocabulary with 271 tokens, hash"),
                    HasSubstr("other.json"), HasSubstr("got those of 270 tokens"),
                    HasSubstr("tokenizer.json)"), HasSubstr("make them again")));
  // The same number of tokens, one of which differs.
  SmallVocabulary alike;
  alike.tokens.back() = alike.special.back() = "<|other|>";
  const Tokenizer of_that_size =
      Tokenizer::from_json(scratch_.put("alike.json", alike.tokenizer_json().dump()));
  EXPECT_THAT(text_error_of([&] { TokenFile(path()).check_vocabulary(of_that_size); }),
              HasSubstr("got those of 270 tokens"));
  std::filesystem::remove(beside());
  scratch_.put("train.bin", packed<uint16_t>({1, 2, 271}));
  EXPECT_THAT(text_error_of([&] { TokenFile(path()).check_vocabulary(tokenizer()); }),
              HasSubstr("token 2: expected one of the vocabulary with 271 tokens"));
  scratch_.put("train.bin", packed<uint16_t>({1, 2, 270}));
  TokenFile(path()).check_vocabulary(tokenizer());
}

TEST_F(TokenFileTest, RangesPastTheEndAreRefused) {
  write(TokenFormat::kNanoGpt, TokenVocabulary::of(tokenizer()));
  const TokenFile file(path());
  int32_t token = 0;
  EXPECT_THAT(text_error_of([&] { file.read(4, 1, &token); }),
              HasSubstr("expected tokens from 0 to 4, got 1 from 4 on"));
  EXPECT_THAT(text_error_of([&] { file.read(-1, 1, &token); }), HasSubstr("from -1 on"));
  EXPECT_EQ(text_error_of([&] { file.read(4, 0, &token); }), "");
}

TEST_F(TokenFileTest, DamagedHeadersAndCutFilesAreNamed) {
  scratch_.put("train.bin", llm_c_header(20240520, 2, 1) + "ab");
  EXPECT_THAT(error_of_opening(), HasSubstr("expected version 1 of llm.c's files of tokens"));
  scratch_.put("train.bin", llm_c_header(20240520, 1, 3) + "abcd");
  EXPECT_THAT(error_of_opening(), HasSubstr("expected 3 tokens, as its header says, got 2"));
  scratch_.put("train.bin", llm_c_header(20240520, 1, -1) + "abcd");
  EXPECT_THAT(error_of_opening(), HasSubstr("and a count, got version 1 and -1"));
  scratch_.put("train.bin", llm_c_header(20240520, 1, 3).substr(0, 500));
  EXPECT_THAT(error_of_opening(), HasSubstr("expected llm.c's header of 1024 bytes, got 500"));
  scratch_.put("train.bin", "abc");
  EXPECT_THAT(error_of_opening(), HasSubstr("expected tokens of 2 bytes each, got 3 bytes"));
  scratch_.put("train.bin", "");
  EXPECT_EQ(TokenFile(path()).numel(), 0);
}

TEST_F(TokenFileTest, WhatLiesBesideIsComparedWithTheFile) {
  write(TokenFormat::kNanoGpt, TokenVocabulary::of(tokenizer()));
  const json whole = json::parse(text_in(beside()));
  scratch_.put("train.bin", packed<uint16_t>({1, 2}));
  EXPECT_THAT(error_of_opening(),
              AllOf(HasSubstr("expected 4 tokens of 16 bits, as"),
                    HasSubstr("train.bin.json says, got 2"), HasSubstr("remove the .json")));
  const auto with = [&](const char* key, const json& value) {
    json content = whole;
    content[json::json_pointer(key)] = value;
    scratch_.put("train.bin.json", content.dump());
    return error_of_opening();
  };
  EXPECT_THAT(with("/format", "x"), HasSubstr("train.bin.json: expected \"format\""));
  EXPECT_THAT(with("/bits", 8), HasSubstr("bits: expected 16 or 32, got 8"));
  EXPECT_THAT(with("/form", "x"), HasSubstr("form: expected nanoGPT or llm.c"));
  EXPECT_THAT(with("/tokens", "four"), HasSubstr("expected what zp tokens writes"));
  EXPECT_THAT(with("/vocabulary", 3), HasSubstr("expected what zp tokens writes"));
  EXPECT_THAT(with("/vocabulary/hash", "xyz"), HasSubstr("vocabulary.hash: expected 16 digits"));
  scratch_.put("train.bin.json", "{");
  EXPECT_THAT(error_of_opening(), HasSubstr("train.bin.json: expected JSON"));
}

TEST_F(TokenFileTest, AFileThatIsNotFinishedLeavesNothingAndReplacesNothing) {
  write(TokenFormat::kNanoGpt, wide_);
  const std::string before = text_in(path());
  {
    TokenFileWriter writer(path(), TokenFormat::kNanoGpt, wide_);
    writer.write(std::vector<int32_t>{1, 2, 3});
  }
  EXPECT_EQ(text_in(path()), before);
  EXPECT_THAT(names_in_folder(), ::testing::UnorderedElementsAre("train.bin", "train.bin.json"));
  EXPECT_THAT(text_error_of([&] {
                TokenFileWriter writer(scratch_ / "none/train.bin", TokenFormat::kNanoGpt, wide_);
              }),
              HasSubstr("none/train.bin: cannot be written: No such file or directory"));
  EXPECT_THAT(
      text_error_of([&] { TokenFileWriter writer(scratch_.path(), TokenFormat::kNanoGpt, wide_); }),
      HasSubstr("expected the name of a file, got a folder"));
}

TEST_F(TokenFileTest, TokensThatAreNoneAreNotWritten) {
  TokenFileWriter writer(path(), TokenFormat::kNanoGpt, wide_);
  EXPECT_THAT(text_error_of([&] {
                writer.write(std::vector<int32_t>{1, 128'256});
              }),
              HasSubstr("expected tokens of the vocabulary with 128256 tokens"));
  EXPECT_THAT(text_error_of([&] { writer.write(std::vector<int32_t>{-1}); }), HasSubstr("got -1"));
  TokenVocabulary endless = wide_;
  endless.document_end.reset();
  TokenFileWriter without(scratch_ / "other.bin", TokenFormat::kNanoGpt, endless);
  EXPECT_THAT(text_error_of([&] { without.end_document(); }),
              HasSubstr("expected a vocabulary with a token that ends a document"));
}

}  // namespace
}  // namespace zeropage::text::token_file_test
