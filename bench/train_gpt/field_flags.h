// A command line and JSON made of tables of fields (zeropage/fields.h).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "examples/command_line/command_line.h"
#include "zeropage/check.h"
#include "zeropage/fields.h"
#include "zeropage/option_fields.h"

namespace train_gpt {

namespace detail {

using zeropage::memory::Bounds;
// Those of enums of LibTorch, and of folders below zeropage.
using zeropage::memory::text_of;
using zeropage::memory::words_of;

// ---- Words ----

std::vector<std::string> split(std::string_view words);

template <zeropage::memory::HasWords Enum>
std::vector<std::string> all_words() {
  std::vector<std::string> words;
  for (const auto& known : words_of(std::type_identity<Enum>())) words.emplace_back(known.word);
  return words;
}

template <zeropage::memory::HasWords Enum>
Enum value_of(const std::string& word) {
  for (const auto& known : words_of(std::type_identity<Enum>())) {
    if (known.word == word) return known.value;
  }
  ZP_THROW("no value is called ", word);
}

// Shows `values` of a Flag behind its name, with the words and the default.
void show_values(CLI::Option& option, std::string_view values,
                 const std::vector<std::string>& words, const std::string& default_text);

// Accepts one of the words; "nvme:DIR" among them stands for any folder.
CLI::Validator one_of(const std::vector<std::string>& words);

void check_bounds(CLI::Option& option, const Bounds& bounds);

// ---- An option of each type ----

using Text = zeropage::memory::FieldText;

inline std::string dashed(const Text& text) {
  return "--" + std::string(text.flag.name);
}

// The flag's values, or what its type is called.
constexpr std::string_view values_of(const Text& text, std::string_view type) {
  return text.flag.values.empty() ? type : text.flag.values;
}

// Takes the words of an enum, or others that `set` understands.
template <typename Set>
void add_words(CLI::App& app, const Text& text, const std::string& help,
               const std::vector<std::string>& words, const std::string& default_word,
               const Set& set) {
  CLI::Option* option = app.add_option_function<std::string>(dashed(text), set, help);
  option->check(one_of(words))->default_str(default_word);
  show_values(*option, values_of(text, "{}="), words, default_word);
}

inline void add(CLI::App& app, const Text& text, const std::string& help, bool& value) {
  if (text.words.empty()) {
    app.add_flag(dashed(text), value, help);
    return;
  }
  const std::vector<std::string> words = split(text.words);
  add_words(app, text, help, words, value ? words.front() : words.back(),
            [&value, on = words.front()](const std::string& word) { value = word == on; });
}

template <zeropage::memory::HasWords Enum>
void add(CLI::App& app, const Text& text, const std::string& help, Enum& value) {
  add_words(app, text, help, all_words<Enum>(), text_of(value),
            [&value](const std::string& word) { value = value_of<Enum>(word); });
}

// The model is fp32 unless it is cast.
inline void add(CLI::App& app, const Text& text, const std::string& help,
                std::optional<c10::ScalarType>& dtype) {
  add_words(app, text, help, all_words<c10::ScalarType>(), text_of(dtype.value_or(c10::kFloat)),
            [&dtype](const std::string& word) {
              dtype = value_of<c10::ScalarType>(word);
              if (*dtype == c10::kFloat) dtype.reset();
            });
}

inline void add(CLI::App& app, const Text& text, const std::string& help, zeropage::Stage& stage) {
  app.add_option_function<int>(
         dashed(text),
         [&stage](const int& number) {
           try {
             stage = zeropage::stage_of(number);
           } catch (const std::exception& error) {
             throw CLI::ValidationError("--" + zeropage::memory::message_of(error));
           }
         },
         help)
      ->default_str(text_of(stage))
      ->option_text("{0,1,2,3}=" + text_of(stage));
}

// 0 is unset.
inline void add(CLI::App& app, const Text& text, const std::string& help,
                std::optional<double>& value) {
  CLI::Option* option = app.add_option_function<double>(
      dashed(text),
      [&value](const double& number) {
        value.reset();
        if (number != 0) value = number;
      },
      help);
  show_values(*option, values_of(text, "X"), {}, "");
}

inline void add(CLI::App& app, const Text& text, const std::string& help, std::string& value) {
  CLI::Option* option = app.add_option(dashed(text), value, help);
  if (!text.words.empty()) option->check(one_of(split(text.words)));
  show_values(*option, values_of(text, "TEXT"), split(text.words), value);
}

template <typename T>
void add(CLI::App& app, const Text& text, const std::string& help, T& value) {
  if constexpr (std::is_same_v<T, int64_t>) {
    if (text.unit == zeropage::memory::kBytes) {
      CLI::Option* option = examples::add_bytes(app, dashed(text), value, text.bounds.least, help);
      show_values(*option, values_of(text, "BYTES="), {}, std::string(text.default_word));
      return;
    }
  }
  CLI::Option* option = app.add_option(dashed(text), value, help);
  check_bounds(*option, text.bounds);
  constexpr std::string_view kType = std::is_integral_v<T> ? "N=" : "X=";
  show_values(*option, values_of(text, kType), {}, option->get_default_str());
}

template <typename T>
inline constexpr bool kIsOneOfThese =
    std::is_arithmetic_v<T> || zeropage::memory::HasWords<T> || std::is_same_v<T, std::string> ||
    std::is_same_v<T, zeropage::Stage> || std::is_same_v<T, std::optional<double>> ||
    std::is_same_v<T, std::optional<c10::ScalarType>> ||
    std::is_same_v<T, std::pair<double, double>>;

// ---- A value of each type ----

template <typename F>
nlohmann::json json_of(const F& field, const typename F::Struct& options) {
  using Value = typename F::Value;
  const auto& value = options.*F::kMember;
  if constexpr (std::is_same_v<Value, bool>) {
    const auto words = split(field.text.words);
    return words.empty() ? nlohmann::json(value)
                         : nlohmann::json(value ? words.front() : words.back());
  } else if constexpr (std::is_same_v<Value, zeropage::Stage>) {
    return std::stoi(text_of(value));
  } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
    return value.value_or(0.0);
  } else if constexpr (std::is_same_v<Value, std::optional<c10::ScalarType>>) {
    return text_of(value.value_or(c10::kFloat));
  } else if constexpr (zeropage::memory::HasWords<Value>) {
    return text_of(value);
  } else if constexpr (std::is_same_v<Value, int64_t>) {
    // Bytes that nobody asked for are 0.
    const bool unset =
        field.text.unit == zeropage::memory::kBytes && value == typename F::Struct().*F::kMember;
    return unset ? 0 : value;
  } else {
    return value;
  }
}

}  // namespace detail

// Visits each field that is a flag, with the struct it is in: visit(field, options). Of optional structs,
// with the defaults.
template <typename Fields, typename S, typename Visit>
void for_each_flag(const Fields& fields, S& options, const Visit& visit) {
  zeropage::memory::for_each_field(fields, [&](const auto& field) {
    using F = std::remove_cvref_t<decltype(field)>;
    using Value = typename F::Value;
    if constexpr (zeropage::memory::HasTable<Value>) {
      zeropage::memory::for_each_section<Value>(
          [&](const auto& inner) { for_each_flag(inner, options.*F::kMember, visit); });
    } else if constexpr (zeropage::memory::IsOptionalTable<Value>) {
      typename Value::value_type defaults;
      zeropage::memory::for_each_section<typename Value::value_type>(
          [&](const auto& inner) { for_each_flag(inner, defaults, visit); });
    } else {
      if (!field.text.flag.name.empty()) visit(field, options);
    }
  });
}

// help: the field's, or more.
template <typename F>
void add_flag(CLI::App& app, const F& field, const std::string& help, typename F::Struct& options) {
  if constexpr (detail::kIsOneOfThese<typename F::Value>) {
    detail::add(app, field.text, help, options.*F::kMember);
  } else {
    TORCH_INTERNAL_ASSERT(false, "no flag has the type of ", F::name());
  }
}

template <typename F>
nlohmann::json flag_json(const F& field, const typename F::Struct& options) {
  if constexpr (detail::kIsOneOfThese<typename F::Value>) {
    return detail::json_of(field, options);
  } else {
    TORCH_INTERNAL_ASSERT(false, "no flag has the type of ", F::name());
  }
}

}  // namespace train_gpt
