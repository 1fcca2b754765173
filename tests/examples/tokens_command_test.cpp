// `zp tokens` as users type it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/shell.h"
#include "tests/text/small_vocabulary.h"
#include "zeropage/text/token_file.h"

namespace tokens_command_test {
namespace {

using namespace zeropage::testing;
using namespace zeropage::text;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class TokensCommandTest : public ::testing::Test {
 protected:
  TokensCommandTest() {
    scratch_.put("tokenizer.json", vocabulary_.tokenizer_json().dump());
    scratch_.put("a.txt", "the hell");
    scratch_.put("b.txt", "he<|endoftext|>12");
  }
  std::string path(const std::string& name) const { return (scratch_ / name).string(); }
  Outcome make(const std::string& arguments) const {
    return shell(ZP " tokens make " + arguments + " -o " + path("out.bin") + " --tokenizer " +
                 path("tokenizer.json"));
  }
  static Outcome show(const std::string& arguments) {
    return shell(ZP " tokens show " + arguments);
  }
  std::vector<int32_t> made() const {
    const TokenFile file(path("out.bin"));
    std::vector<int32_t> tokens(static_cast<size_t>(file.numel()));
    file.read(0, file.numel(), tokens.data());
    return tokens;
  }
  // An exit code and one line with the words.
  static void expect_failed(const Outcome& outcome, int exit_code, const std::string& words) {
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(words));
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
  }

  const TextScratch scratch_;
  const SmallVocabulary vocabulary_;
};

TEST_F(TokensCommandTest, EachTextIsADocument) {
  const Outcome outcome = make(path("a.txt") + " " + path("b.txt"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("out.bin: 21 tokens in 2 documents, 1.19 bytes a token"));
  EXPECT_THAT(TokenFile(path("out.bin")).documents(),
              ElementsAre(TokenRange{0, 5}, TokenRange{5, 21}));
}

TEST_F(TokensCommandTest, SpecialTokensAndSeparatorsAreUsedWhereTheyAreAskedFor) {
  EXPECT_EQ(make(path("b.txt") + " --special-tokens").exit_code, 0);
  EXPECT_THAT(made(), ElementsAre(256, 267, 261, 267));
  EXPECT_EQ(make(path("b.txt") + " --split-documents-by '<|endoftext|>'").exit_code, 0);
  EXPECT_THAT(made(), ElementsAre(256, 267, 261, 267));
  scratch_.put("lines.txt", "he\n\n\n12\n\n");
  EXPECT_EQ(make(path("lines.txt") + " --split-documents-by '\\n\\n'").exit_code, 0);
  EXPECT_THAT(made(), ElementsAre(256, 267, '\n', 261, 267));
}

TEST_F(TokensCommandTest, BothFormsAreWrittenAndShown) {
  EXPECT_EQ(make(path("a.txt") + " --form llm.c").exit_code, 0);
  const Outcome words = show(path("out.bin"));
  EXPECT_THAT(words.output,
              AllOf(HasSubstr("5 tokens, llm.c's form, 16 bits a token\n"),
                    HasSubstr("documents: 1\n"), HasSubstr("vocabulary: 270 tokens, "),
                    HasSubstr("begins: [116,256,32,260,267]\n"), Not(HasSubstr("as text"))));
  const Outcome checked = show(path("out.bin") + " --tokenizer " + path("tokenizer.json"));
  EXPECT_THAT(checked.output, HasSubstr("as text: \"the hell<|endoftext|>\"\n"));
  const Json found = Json::parse(show("--json " + path("out.bin")).output);
  EXPECT_EQ(found["tokens"], 5);
  EXPECT_EQ(found["form"], "llm.c");
  EXPECT_EQ(found["vocabulary"]["size"], 270);
}

TEST_F(TokensCommandTest, FilesOfOtherProgramsAreShownAsFarAsTheySay) {
  scratch_.put("plain.bin", bytes_of(uint16_t{256}) + bytes_of(uint16_t{27}));
  EXPECT_THAT(show(path("plain.bin")).output,
              AllOf(HasSubstr("2 tokens, nanoGPT's form"), Not(HasSubstr("documents")),
                    HasSubstr("vocabulary: unknown; no .json lies beside the file")));
  // A terminal obeys nothing of what tokens say.
  const Outcome text = show(path("plain.bin") + " --tokenizer " + path("tokenizer.json"));
  EXPECT_THAT(text.output, AllOf(HasSubstr("as text: \"he\\u001b\""), HasSubstr("documents: 1\n")));
}

TEST_F(TokensCommandTest, WhatCannotBeReadOrWrittenIsNamedAndNothingIsLeft) {
  expect_failed(make(path("a.txt") + " " + path("none.txt")), 1,
                "none.txt: cannot be opened: No such file or directory");
  EXPECT_FALSE(std::filesystem::exists(path("out.bin")));
  scratch_.put("empty.txt", "");
  expect_failed(make(path("empty.txt")), 1, "expected text, got none in any of the files");
  expect_failed(shell(ZP " tokens make " + path("a.txt") + " -o " + path("no/out.bin") +
                      " --tokenizer " + path("tokenizer.json")),
                1, "no/out.bin: cannot be written");
  expect_failed(shell(ZP " tokens make " + path("a.txt") + " -o " + path("out.bin") +
                      " --tokenizer " + path("none")),
                1, "none: there is no such file");
  expect_failed(show(path("none.bin")), 1, "none.bin: cannot be opened");
  expect_failed(make(path("a.txt") + " --split-documents-by '\\q'"), 2, "expected \\n, \\t or");
  expect_failed(make(path("a.txt") + " --form x"), 2, "--form");
  expect_failed(shell(ZP " tokens"), 2, "subcommand");
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(scratch_.path()))
    files += entry.exists();
  EXPECT_EQ(files, 4U) << "tokenizer.json and three texts";
}

TEST_F(TokensCommandTest, TokensOfAnotherVocabularyAreNotShownAsText) {
  EXPECT_EQ(make(path("a.txt")).exit_code, 0);
  SmallVocabulary other;
  other.merge("o", "o");
  scratch_.put("other.json", other.tokenizer_json().dump());
  expect_failed(show(path("out.bin") + " --tokenizer " + path("other.json")), 1,
                "expected tokens of the vocabulary with 271 tokens");
}

TEST_F(TokensCommandTest, BytesThatTheVocabularyLacksAreCounted) {
  Json content = vocabulary_.tokenizer_json();
  content["model"]["vocab"].erase(alphabet_of(std::string("\x04")));
  scratch_.put("tokenizer.json", content.dump());
  scratch_.put("odd.txt", "he\x04\x04");
  const Outcome outcome = make(path("odd.txt"));
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output,
              HasSubstr("2 bytes were left out: the vocabulary has no token for them"));
}

}  // namespace
}  // namespace tokens_command_test
