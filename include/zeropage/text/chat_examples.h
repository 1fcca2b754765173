// Conversations and instructions to learn from: lines of JSON become tokens, and a mask of those that are learned, which are the
// answers'. Free of LibTorch.
//
//   {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]}
//   {"prompt": "Hello", "completion": "Hi!"}
//
// Throws TextError for a line that is something else, or has no answer: the file and the line.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace zeropage::text {

class Tokenizer;

// How messages become one text.
enum class ChatTemplate : uint8_t {
  // SmolLM2's and Qwen2's: <|im_start|>ROLE, a new line, the content, <|im_end|> and a new line for each message. An
  // answer's content and its <|im_end|> are learned.
  kChatMl,
  // For a vocabulary without these tokens: "User: ", "Assistant: " or "System: ", the content, and a new line; behind an answer the
  // end-of-text token instead. An answer's content and that token are learned. A prompt and its completion follow each other as they are.
  kPlain,
};

struct ChatOptions {
  ChatTemplate format = ChatTemplate::kChatMl;
  // The system's message where a conversation does not begin with one; "": none. SmolLM2 was trained with "You are a helpful AI
  // assistant named SmolLM, trained by Hugging Face".
  std::string system = {};
};

struct ChatMessage {
  std::string role = {};  // system, user, assistant or tool
  std::string content = {};
};

struct ChatExample {
  std::vector<int32_t> tokens = {};
  // For each token whether the model learns to say it, 1 or 0. The first token is never learned: nothing stands before it.
  std::vector<uint8_t> learned = {};
  int64_t line = 0;  // where it stands in its file, from 1

  int64_t learned_count() const;
};

// All examples of a file, in order; empty lines are passed over. Special tokens in a content are text. Throws for an example of which
// no token is learned, and for a vocabulary that lacks the template's tokens.
std::vector<ChatExample> read_chat_examples(const std::filesystem::path& file,
                                            const Tokenizer& tokenizer, const ChatOptions& options);

// A conversation up to where the assistant's next answer begins, for generation: the tokens in front of that answer in an example.
std::vector<int32_t> chat_prompt(std::span<const ChatMessage> messages, const Tokenizer& tokenizer,
                                 const ChatOptions& options);

// The token with which the template ends an answer.
int32_t answer_end(const Tokenizer& tokenizer, ChatTemplate format);

}  // namespace zeropage::text
