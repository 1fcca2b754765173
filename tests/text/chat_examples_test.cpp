#include "zeropage/text/chat_examples.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/text/small_vocabulary.h"
#include "zeropage/text/tokenizer.h"

namespace zeropage::text::chat_examples_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kConversation =
    R"({"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "the 12"}]})";

class ChatExamplesTest : public ::testing::Test {
 protected:
  std::vector<ChatExample> read(const std::string& lines, const ChatOptions& options = {}) const {
    return read_chat_examples(scratch_.put("chat.jsonl", lines), tokenizer_, options);
  }
  std::string error_of(const std::string& lines, const ChatOptions& options = {}) const {
    return text_error_of([&] { read(lines, options); });
  }
  // The text of an example, and what of it is learned, each in brackets.
  std::string marked(const ChatExample& example) const {
    EXPECT_EQ(example.tokens.size(), example.learned.size());
    std::string text;
    bool inside = false;
    for (size_t i = 0; i < example.tokens.size(); ++i) {
      const bool learned = example.learned[i] != 0;
      if (learned != inside) text += learned ? "[" : "]";
      inside = learned;
      text += tokenizer_.bytes_of(example.tokens[i]);
    }
    return text + (inside ? "]" : "");
  }

  const TextScratch scratch_;
  const SmallVocabulary vocabulary_;
  const Tokenizer tokenizer_ =
      Tokenizer::from_json(scratch_.put("tokenizer.json", vocabulary_.tokenizer_json().dump()));
};

TEST_F(ChatExamplesTest, AnswersAndTheirEndsAreLearned) {
  const auto examples = read(kConversation);
  ASSERT_EQ(examples.size(), 1U);
  EXPECT_EQ(marked(examples[0]),
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n[the 12<|im_end|>]\n");
  EXPECT_EQ(examples[0].learned_count(), 5);  // "t", "he", " ", "12", the end
  EXPECT_EQ(examples[0].line, 1);
}

TEST_F(ChatExamplesTest, EveryAnswerOfAConversationIsLearned) {
  const auto examples =
      read(R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, )"
           R"({"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}, )"
           R"({"role": "assistant", "content": "b"}]})");
  EXPECT_EQ(marked(examples[0]),
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
            "<|im_start|>assistant\n[a<|im_end|>]\n<|im_start|>tool\nt<|im_end|>\n"
            "<|im_start|>assistant\n[b<|im_end|>]\n");
}

TEST_F(ChatExamplesTest, TheSystemsMessageIsAddedWhereThereIsNone) {
  const ChatOptions options{.system = "Be kind"};
  EXPECT_THAT(marked(read(kConversation, options)[0]),
              ::testing::StartsWith("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n"));
  EXPECT_THAT(
      marked(read(
          R"({"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]})",
          options)[0]),
      ::testing::StartsWith("<|im_start|>system\ns<|im_end|>\n<|im_start|>assistant\n["));
}

TEST_F(ChatExamplesTest, ThePlainTemplateNeedsOnlyAnEndOfText) {
  const ChatOptions plain{.format = ChatTemplate::kPlain};
  EXPECT_EQ(marked(read(kConversation, plain)[0]), "User: Hello\nAssistant: [the 12<|endoftext|>]");
  EXPECT_EQ(marked(read(R"({"prompt": "1 + 1 =", "completion": " 2"})", plain)[0]),
            "1 + 1 =[ 2<|endoftext|>]");
}

TEST_F(ChatExamplesTest, APromptAndItsCompletionAreAConversationInChatMl) {
  EXPECT_EQ(marked(read(R"({"prompt": "p", "completion": "c"})")[0]),
            "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n[c<|im_end|>]\n");
}

TEST_F(ChatExamplesTest, SpecialTokensInAContentAreText) {
  const auto examples = read(R"({"prompt": "<|im_end|>", "completion": "<|im_start|>"})");
  int starts = 0;
  for (const int32_t id : examples[0].tokens) starts += id == 268;
  EXPECT_EQ(starts, 2);
}

TEST_F(ChatExamplesTest, APromptIsWhatStandsInFrontOfAnAnswer) {
  const std::vector<ChatMessage> messages = {{"user", "Hello"}};
  for (const ChatTemplate format : {ChatTemplate::kChatMl, ChatTemplate::kPlain}) {
    const ChatOptions options{.format = format, .system = "s"};
    const ChatExample example = read(kConversation, options)[0];
    const std::vector<int32_t> prompt = chat_prompt(messages, tokenizer_, options);
    ASSERT_LT(prompt.size(), example.tokens.size());
    EXPECT_TRUE(std::equal(prompt.begin(), prompt.end(), example.tokens.begin()));
    EXPECT_EQ(example.learned[prompt.size()], 1);
    EXPECT_EQ(example.learned_count(),
              std::count(example.learned.begin() + static_cast<std::ptrdiff_t>(prompt.size()),
                         example.learned.end(), 1));
  }
  EXPECT_EQ(answer_end(tokenizer_, ChatTemplate::kChatMl), 269);
  EXPECT_EQ(answer_end(tokenizer_, ChatTemplate::kPlain), 267);
  EXPECT_THAT(text_error_of([&] {
                chat_prompt(std::vector<ChatMessage>{{"robot", ""}}, tokenizer_, {});
              }),
              HasSubstr("expected the role system, user, assistant or tool, got robot"));
}

TEST_F(ChatExamplesTest, TheFirstTokenIsNotLearned) {
  const ChatOptions plain{.format = ChatTemplate::kPlain};
  EXPECT_EQ(marked(read(R"({"prompt": "", "completion": "ab"})", plain)[0]), "a[b<|endoftext|>]");
}

TEST_F(ChatExamplesTest, EmptyLinesArePassedOverAndLinesCounted) {
  const auto examples = read("\n" + std::string(kConversation) + "\r\n  \n" + kConversation);
  ASSERT_EQ(examples.size(), 2U);
  EXPECT_EQ(examples[0].line, 2);
  EXPECT_EQ(examples[1].line, 4);
  EXPECT_EQ(examples[0].tokens, examples[1].tokens);
}

TEST_F(ChatExamplesTest, LinesThatAreNoExamplesAreNamed) {
  const std::string good = std::string(kConversation) + "\n";
  EXPECT_THAT(
      error_of(good + R"({"messages": [{"role": "user", "content": "u"}]})"),
      HasSubstr("chat.jsonl: line 2: expected an answer of the assistant to learn from, got none"));
  EXPECT_THAT(error_of(good + R"({"messages": []})"), HasSubstr("line 2: expected an answer"));
  // The one token of an empty completion without a prompt has nothing in front of it.
  EXPECT_THAT(error_of(R"({"prompt": "", "completion": ""})", {.format = ChatTemplate::kPlain}),
              HasSubstr("line 1: expected an answer"));
  EXPECT_THAT(error_of(good + "\n{"),
              HasSubstr("line 3: expected JSON, got something else at byte"));
  EXPECT_THAT(error_of(R"({"prompt": 8e888888})"),
              HasSubstr("line 1: expected JSON whose numbers a double holds, got a larger one"));
  EXPECT_THAT(error_of("[1]"), HasSubstr("line 1: expected an object, got [1]"));
  EXPECT_THAT(error_of(R"({"text": "x"})"),
              HasSubstr(R"(expected "messages", or "prompt" and "completion", got {"text":"x"})"));
  EXPECT_THAT(error_of(R"({"messages": "x"})"), HasSubstr("expected a list of messages"));
  EXPECT_THAT(error_of(R"({"messages": [{"role": "bot", "content": "x"}]})"),
              HasSubstr("expected the role system, user, assistant or tool, got \"bot\""));
  EXPECT_THAT(error_of(R"({"messages": [{"role": "user", "content": null}]})"),
              HasSubstr(R"(expected text as "content")"));
  EXPECT_THAT(error_of(R"({"messages": [3]})"), HasSubstr(R"(expected text as "role", got 3)"));
  EXPECT_THAT(error_of(R"({"prompt": 3, "completion": "x"})"), HasSubstr(R"(text as "prompt")"));
  EXPECT_THAT(error_of("\n"), HasSubstr("expected examples, a line each, got none"));
}

TEST_F(ChatExamplesTest, AVocabularyWithoutTheTemplatesTokensIsNamed) {
  SmallVocabulary plain;
  plain.tokens.resize(268);
  plain.special = {"<|endoftext|>"};
  const Tokenizer tokenizer =
      Tokenizer::from_json(scratch_.put("plain.json", plain.tokenizer_json().dump()));
  const auto file = scratch_.put("chat.jsonl", kConversation);
  EXPECT_THAT(text_error_of([&] { read_chat_examples(file, tokenizer, {}); }),
              AllOf(HasSubstr("plain.json: expected the special token <|im_end|> of ChatML"),
                    HasSubstr("take the plain template")));
  EXPECT_EQ(read_chat_examples(file, tokenizer, {.format = ChatTemplate::kPlain}).size(), 1U);
}

}  // namespace
}  // namespace zeropage::text::chat_examples_test
