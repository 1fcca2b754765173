#include "bench/train_gpt/field_flags.h"

#include <algorithm>

namespace train_gpt::detail {
namespace {

constexpr std::string_view kAnyFolder = ":DIR";

std::string joined(const std::vector<std::string>& words, const std::string& between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

// Whether it is the word, or its prefix and a folder.
bool is_called(const std::string& value, const std::string& word) {
  if (!word.ends_with(kAnyFolder)) return value == word;
  const size_t prefix = word.size() - kAnyFolder.size() + 1;
  return value.size() > prefix && value.starts_with(word.substr(0, prefix));
}

}  // namespace

std::vector<std::string> split(std::string_view words) {
  std::vector<std::string> all;
  while (!words.empty()) {
    const size_t comma = std::min(words.find(','), words.size());
    all.emplace_back(words.substr(0, comma));
    words.remove_prefix(std::min(comma + 1, words.size()));
  }
  return all;
}

void show_values(CLI::Option& option, std::string_view values,
                 const std::vector<std::string>& words, const std::string& default_text) {
  std::string text(values);
  const size_t braces = text.find("{}");
  if (braces != std::string::npos) text.replace(braces, 2, "{" + joined(words, ",") + "}");
  if (text.ends_with('=')) text += default_text;
  option.option_text(text);
}

CLI::Validator one_of(const std::vector<std::string>& words) {
  const bool has_folder = std::any_of(words.begin(), words.end(), [](const std::string& word) {
    return word.ends_with(kAnyFolder);
  });
  if (!has_folder) return CLI::IsMember(words);
  return {[words](const std::string& value) -> std::string {
            for (const std::string& word : words) {
              if (is_called(value, word)) return "";
            }
            const std::vector<std::string> but_last(words.begin(), words.end() - 1);
            return value + ": expected " + joined(but_last, ", ") + " or " + words.back();
          },
          ""};
}

void check_bounds(CLI::Option& option, const Bounds& bounds) {
  switch (bounds.kind) {
    case Bounds::Kind::kNone:
      return;
    case Bounds::Kind::kPositive:
      option.check(examples::positive());
      return;
    case Bounds::Kind::kNotNegative:
      option.check(examples::non_negative());
      return;
    case Bounds::Kind::kRange:
      option.check(CLI::Range(static_cast<int>(bounds.least), static_cast<int>(bounds.most)));
      return;
  }
}

}  // namespace train_gpt::detail
