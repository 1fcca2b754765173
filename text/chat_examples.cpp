#include "zeropage/text/chat_examples.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include <nlohmann/json.hpp>

#include "text/mapped_file.h"
#include "zeropage/text/text_error.h"
#include "zeropage/text/tokenizer.h"

namespace zeropage::text {
namespace {

using nlohmann::json;

constexpr const char* kAssistant = "assistant";

struct Role {
  const char* name;
  const char* plain;  // in the plain template
};
constexpr std::array<Role, 4> kRoles = {
    {{"system", "System: "}, {"user", "User: "}, {kAssistant, "Assistant: "}, {"tool", "Tool: "}}};

const Role* role_of(std::string_view name) {
  const auto* const found = std::find_if(kRoles.begin(), kRoles.end(),
                                         [&](const Role& role) { return role.name == name; });
  return found == kRoles.end() ? nullptr : found;
}

int32_t required(const Tokenizer& tokenizer, const char* token) {
  const auto id = tokenizer.id_of(token);
  if (!id || !tokenizer.is_special(*id)) {
    throw TextError(tokenizer.name(), std::string("expected the special token ") + token +
                                          " of ChatML, got a vocabulary without it; take the plain "
                                          "template");
  }
  return *id;
}

// Adds texts and tokens to an example by a template.
class Writer {
 public:
  Writer(const Tokenizer& tokenizer, const ChatOptions& options)
      : tokenizer_(tokenizer),
        options_(options),
        end_(answer_end(tokenizer, options.format)),
        is_chat_ml_(options.format == ChatTemplate::kChatMl),
        start_(is_chat_ml_ ? required(tokenizer, "<|im_start|>") : 0) {}

  // All messages; the last one may be an answer's head.
  void messages(std::span<const ChatMessage> all) {
    const bool has_system = !all.empty() && all.front().role == "system";
    if (!has_system && !options_.system.empty()) message({"system", options_.system});
    for (const ChatMessage& one : all) message(one);
  }

  void message(const ChatMessage& one) {
    if (one.role == kAssistant) {
      answer_head();
      text(one.content, true);
      token(end_, true);
      if (is_chat_ml_) text("\n", false);
      return;
    }
    // What is not learned is one text, as the reference's templates make it.
    if (is_chat_ml_) token(start_, false);
    text(head_of(one.role) + one.content + (is_chat_ml_ ? "" : "\n"), false);
    if (!is_chat_ml_) return;
    token(end_, false);
    text("\n", false);
  }

  // The tokens in front of an answer, which generation begins with, too.
  void answer_head() {
    if (is_chat_ml_) token(start_, false);
    text(head_of(kAssistant), false);
  }

  void completion(const std::string& prompt, const std::string& answer) {
    if (is_chat_ml_) {
      messages(std::array<ChatMessage, 2>{{{"user", prompt}, {kAssistant, answer}}});
      return;
    }
    text(prompt, false);
    text(answer, true);
    token(end_, true);
  }

  ChatExample take() {
    if (!example_.learned.empty()) example_.learned.front() = 0;
    return std::move(example_);
  }

 private:
  std::string head_of(const std::string& role) const {
    return is_chat_ml_ ? role + "\n" : role_of(role)->plain;
  }
  void text(const std::string& added, bool learned) {
    for (const int32_t id : tokenizer_.encode(added)) token(id, learned);
  }
  void token(int32_t id, bool learned) {
    example_.tokens.push_back(id);
    example_.learned.push_back(learned ? 1 : 0);
  }

  const Tokenizer& tokenizer_;
  const ChatOptions& options_;
  const int32_t end_;
  const bool is_chat_ml_;
  const int32_t start_;
  ChatExample example_;
};

// A line of the file, with errors that name it.
class Line {
 public:
  Line(const std::string& file, int64_t number, std::string_view text)
      : file_(file), number_(number) {
    try {
      content_ = json::parse(text);
    } catch (const json::parse_error& error) {
      refuse("expected JSON, got something else at byte " + std::to_string(error.byte));
    } catch (const json::out_of_range&) {
      refuse("expected JSON whose numbers a double holds, got a larger one");
    }
    if (!content_.is_object()) refuse("expected an object, got " + shown(content_));
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw TextError(file_, "line " + std::to_string(number_) + ": " + what);
  }

  void write(Writer& writer) const {
    if (content_.contains("messages")) {
      writer.messages(messages());
    } else if (content_.contains("prompt") && content_.contains("completion")) {
      writer.completion(text_of(content_, "prompt"), text_of(content_, "completion"));
    } else {
      refuse("expected \"messages\", or \"prompt\" and \"completion\", got " + shown(content_));
    }
  }

 private:
  static std::string shown(const json& value) {
    constexpr size_t kMost = 80;
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > kMost) text = text.substr(0, kMost) + "...";
    return text;
  }

  const std::string& text_of(const json& value, const char* key) const {
    if (!value.is_object() || !value.contains(key) || !value[key].is_string()) {
      refuse("expected text as \"" + std::string(key) + "\", got " + shown(value));
    }
    return value[key].get_ref<const std::string&>();
  }

  std::vector<ChatMessage> messages() const {
    const json& all = content_["messages"];
    if (!all.is_array()) refuse("expected a list of messages, got " + shown(all));
    std::vector<ChatMessage> read;
    for (const json& one : all) {
      read.push_back({text_of(one, "role"), text_of(one, "content")});
      if (role_of(read.back().role) == nullptr) {
        refuse("expected the role system, user, assistant or tool, got " + shown(one["role"]));
      }
    }
    return read;
  }

  const std::string& file_;
  const int64_t number_;
  json content_;
};

}  // namespace

int64_t ChatExample::learned_count() const {
  return std::count(learned.begin(), learned.end(), 1);
}

std::vector<ChatExample> read_chat_examples(const std::filesystem::path& file,
                                            const Tokenizer& tokenizer,
                                            const ChatOptions& options) {
  const MappedFile mapped(file);
  std::string_view left = mapped.bytes();
  std::vector<ChatExample> examples;
  for (int64_t number = 1; !left.empty(); ++number) {
    const std::string_view text = left.substr(0, left.find('\n'));
    left.remove_prefix(std::min(text.size() + 1, left.size()));
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Line line(mapped.name(), number, text);
    Writer writer(tokenizer, options);
    line.write(writer);
    ChatExample example = writer.take();
    example.line = number;
    if (example.learned_count() == 0) {
      line.refuse("expected an answer of the assistant to learn from, got none");
    }
    examples.push_back(std::move(example));
  }
  if (examples.empty()) throw TextError(mapped.name(), "expected examples, a line each, got none");
  return examples;
}

std::vector<int32_t> chat_prompt(std::span<const ChatMessage> messages, const Tokenizer& tokenizer,
                                 const ChatOptions& options) {
  for (const ChatMessage& message : messages) {
    if (role_of(message.role) == nullptr) {
      throw TextError("a message",
                      "expected the role system, user, assistant or tool, got " + message.role);
    }
  }
  Writer writer(tokenizer, options);
  writer.messages(messages);
  writer.answer_head();
  return writer.take().tokens;
}

int32_t answer_end(const Tokenizer& tokenizer, ChatTemplate format) {
  if (format == ChatTemplate::kChatMl) return required(tokenizer, "<|im_end|>");
  const auto end = tokenizer.document_end();
  if (!end) {
    throw TextError(tokenizer.name(),
                    "expected a token that ends a text, such as <|endoftext|>, got a vocabulary "
                    "without one");
  }
  return *end;
}

}  // namespace zeropage::text
