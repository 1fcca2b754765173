// Options structs as tables: what a field means, its unit, and the words for its values are written once, and
// command lines, JSON,
// the comparison between ranks and docs/options.md are made of it.
//
//   constexpr auto table_of(std::type_identity<Options>) {  // in the namespace of Options
//     return std::tuple(section("Pages", field<&Options::page_bytes>({.help = "...", .unit = kBytes})));
//   }
//   static_assert(memory::tells_all_fields<Options>());
//
//   for_each_field<Options>([&](const auto& field) { print(field.name(), options.*field.kMember); });
//
// The words for an enum's values are a table as well:
//
//   constexpr auto words_of(std::type_identity<Reshard>) { return std::array{word<Reshard::kAfterUse>("use")}; }
//
// Names of fields and enumerators are the compiler's, so they cannot differ from the code. No public header
// includes a table: users do not compile them. LibTorch's types are in zeropage/detail/dtype_fields.h, as the launcher
// has tables too.
#pragma once

#include <array>
#include <charconv>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace zeropage::memory {

// ---- What is told of a field ----

// How a command line takes the field.
struct Flag {
  // Without dashes. Empty: it does not.
  std::string_view name = "";
  // What help shows of the values; {} becomes all words, and = at the end is followed by the default.
  // Empty: what the parser shows of the type.
  std::string_view values = "";
  // What help says of it. Empty: what is said of the field.
  std::string_view help = "";
};

// What numbers a command line takes.
struct Bounds {
  enum class Kind : uint8_t { kNone, kPositive, kNotNegative, kRange };
  Kind kind = Kind::kNone;
  int64_t least = 0;
  int64_t most = 0;

  static constexpr Bounds positive() { return {Kind::kPositive, 1, 0}; }
  static constexpr Bounds not_negative() { return {Kind::kNotNegative, 0, 0}; }
  static constexpr Bounds range(int64_t least, int64_t most) { return {Kind::kRange, least, most}; }
  static constexpr Bounds at_least(int64_t least) { return {Kind::kNone, least, 0}; }
};

inline constexpr std::string_view kBytes = "bytes";

// Whether ranks compare it.
enum class Compared : uint8_t {
  kYes,
  kNo,  // each rank may have its own
};

struct FieldText {
  // One line.
  std::string_view help = "";
  std::string_view unit = "";
  // What the default is called where its value says nothing: of -1, "two largest pages".
  std::string_view default_word = "";
  // Values of a string, or of a bool that is no mere flag, with commas between.
  std::string_view words = "";
  Flag flag = {};
  Bounds bounds = {};
  Compared compared = Compared::kYes;
};

// ---- Names ----

namespace detail {

// The last name of the template argument that the caller's signature ends with.
constexpr std::string_view last_name(std::string_view signature) {
  std::string_view name = signature.substr(0, signature.find_first_of(";]", signature.rfind('[')));
  return name.substr(name.rfind(':') + 1);
}

template <auto Value>
constexpr std::string_view name_of() {
  return last_name(__PRETTY_FUNCTION__);
}

template <typename S, typename V>
S struct_of(V S::*);
template <typename S, typename V>
V value_of(V S::*);

}  // namespace detail

// ---- Words for the values of an enum ----

template <typename Enum>
struct Word {
  Enum value;
  std::string_view name;  // the enumerator's
  std::string_view word;
};

template <auto Value>
constexpr Word<decltype(Value)> word(std::string_view word) {
  return {Value, detail::name_of<Value>(), word};
}

// Specialised for types whose namespaces are not ours: words(), as words_of(), or text(value), or both.
template <typename T>
struct Foreign;

template <typename T>
requires requires {
  Foreign<T>::words();
}
constexpr auto words_of(std::type_identity<T>) {
  return Foreign<T>::words();
}

template <typename T>
concept HasWords = requires {
  words_of(std::type_identity<T>());
};

// ---- Tables ----

template <auto Member>
struct Field {
  using Struct = decltype(detail::struct_of(Member));
  using Value = decltype(detail::value_of(Member));
  static constexpr auto kMember = Member;

  FieldText text;

  static constexpr std::string_view name() { return detail::name_of<Member>(); }
};

template <auto Member>
constexpr Field<Member> field(const FieldText& text) {
  return {text};
}

template <typename... Fields>
struct Section {
  std::string_view title;
  std::tuple<Fields...> fields;
};

template <typename... Fields>
constexpr Section<Fields...> section(std::string_view title, const Fields&... fields) {
  return {title, {fields...}};
}

template <typename T>
concept HasTable = requires {
  table_of(std::type_identity<T>());
};

template <HasTable S, typename Visit>
constexpr void for_each_section(const Visit& visit) {
  std::apply([&](const auto&... sections) { (visit(sections), ...); },
             table_of(std::type_identity<S>()));
}

template <typename... Fields, typename Visit>
constexpr void for_each_field(const Section<Fields...>& section, const Visit& visit) {
  std::apply([&](const auto&... fields) { (visit(fields), ...); }, section.fields);
}

template <HasTable S, typename Visit>
constexpr void for_each_field(const Visit& visit) {
  for_each_section<S>([&](const auto& section) { for_each_field(section, visit); });
}

// What is told of one field, for a command line that takes it in a form of its own.
template <auto Member>
constexpr FieldText text_of_field() {
  FieldText text;
  for_each_field<typename Field<Member>::Struct>([&](const auto& field) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(field)>, Field<Member>>) {
      text = field.text;
    }
  });
  return text;
}

namespace detail {

// What every member can be made of.
struct Anything {
  template <typename T>
  operator T() const;
};

// The number of members of an aggregate: as many values can initialise it, and no more.
template <typename S, typename... Values>
constexpr size_t member_count() {
  if constexpr (requires { S{Values()..., Anything()}; }) {
    return member_count<S, Values..., Anything>();
  } else {
    return sizeof...(Values);
  }
}

}  // namespace detail

// Whether the table has a row for each member. A member that is forgotten is an error of the compiler where
// this is asserted beside the table.
template <HasTable S>
constexpr bool tells_all_fields() {
  size_t rows = 0;
  for_each_field<S>([&](const auto&) { ++rows; });
  return rows == detail::member_count<S>();
}

// ---- Values as text ----

// A template, as what converts to bool is none.
template <std::same_as<bool> T>
std::string text_of(T value) {
  return value ? "true" : "false";
}
inline std::string text_of(const std::string& value) {
  return value;
}
template <typename T>
requires(std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) std::string text_of(T value) {
  // The shortest digits that are this number and no other.
  char digits[32];
  const auto written = std::to_chars(std::begin(digits), std::end(digits), value);
  return {digits, written.ptr};
}
inline std::string text_of(std::chrono::milliseconds value) {
  return std::to_string(value.count()) + " ms";
}
template <typename T>
requires(!HasWords<T> && requires(T value) { Foreign<T>::text(value); }) std::string
    text_of(T value) {
  return Foreign<T>::text(value);
}
template <HasWords Enum>
std::string text_of(Enum value) {
  for (const auto& known : words_of(std::type_identity<Enum>())) {
    if (known.value == value) return std::string(known.word);
  }
  if constexpr (requires { Foreign<Enum>::text(value); }) {
    return Foreign<Enum>::text(value);
  } else {
    return std::to_string(static_cast<int>(value));
  }
}
template <typename T>
requires requires(const T& value) {
  text_of(value);
}
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : "unset";
}

// Functions and the like have none.
template <typename T>
concept HasText = requires(const T& value) {
  text_of(value);
};

namespace detail {

template <typename T>
inline constexpr bool kIsOptionalTable = false;
template <HasTable T>
inline constexpr bool kIsOptionalTable<std::optional<T>> = true;

}  // namespace detail

// An optional struct that has a table.
template <typename T>
concept IsOptionalTable = detail::kIsOptionalTable<T>;

// The field's value, in the word for its default where it has one.
template <typename F>
requires HasText<typename F::Value> std::string text_in(const F& field,
                                                        const typename F::Struct& options) {
  const auto& value = options.*F::kMember;
  const bool is_default = value == typename F::Struct().*F::kMember;
  return is_default && !field.text.default_word.empty() ? std::string(field.text.default_word)
                                                        : text_of(value);
}

// A line "name: value" for each field that ranks compare; structs in structs as "outer.inner: value". What
// has no text, such as a function, is not compared.
template <HasTable S>
void describe_fields(const std::string& prefix, const S& options, std::vector<std::string>& lines) {
  for_each_field<S>([&](const auto& field) {
    using F = std::remove_cvref_t<decltype(field)>;
    if (field.text.compared == Compared::kNo) return;
    const auto& value = options.*F::kMember;
    const std::string name = prefix + std::string(F::name());
    if constexpr (HasTable<typename F::Value>) {
      describe_fields(name + ".", value, lines);
    } else if constexpr (IsOptionalTable<typename F::Value>) {
      if (value) {
        describe_fields(name + ".", *value, lines);
      } else {
        lines.push_back(name + ": " + std::string(field.text.default_word));
      }
    } else if constexpr (HasText<typename F::Value>) {
      lines.push_back(name + ": " + text_in(field, options));
    }
  });
}

}  // namespace zeropage::memory
