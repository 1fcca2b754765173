#include "train_imagenet/config_keys.h"

#include <cctype>
#include <cmath>
#include <type_traits>

#include <zeropage/bytes.h>
#include <zeropage/check.h>

#include "train_imagenet/config_fields.h"

namespace train_imagenet {
namespace {

using zeropage::memory::Bounds;
using zeropage::memory::FieldText;
using zeropage::memory::HasWords;
using zeropage::memory::kBytes;
// Those of enums of LibTorch, and of folders below zeropage.
using zeropage::memory::text_of;
using zeropage::memory::words_of;

std::string capitals(std::string_view name) {
  std::string text(name);
  for (char& letter : text) {
    letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  }
  return text;
}

// ---- Text of a value ----

std::string yaml(const std::string& value) {
  YAML::Emitter out;
  out << value;
  return value.empty() ? "\"\"" : out.c_str();
}
template <typename T>
std::string yaml(const std::vector<T>& values) {
  std::string text;
  for (const T& value : values) text += (text.empty() ? "" : ", ") + text_of(value);
  return "[" + text + "]";
}
std::string yaml(const std::optional<c10::ScalarType>& dtype) {
  return text_of(dtype.value_or(c10::kFloat));
}
template <typename T>
std::string yaml(const T& value) {
  return text_of(value);
}

// ---- Value of a text ----

// A number that is whole, and nothing behind it.
template <typename T>
requires std::is_arithmetic_v<T>
void read(const YAML::Node& node, T& value) {
  if (!node.IsScalar()) throw ConfigError("no single value");
  value = node.as<T>();
}
void read(const YAML::Node& node, double& value) {
  if (!node.IsScalar()) throw ConfigError("no single value");
  value = node.as<double>();
  if (!std::isfinite(value)) throw ConfigError("not finite");
}
void read(const YAML::Node& node, std::string& value) {
  if (node.IsNull()) {
    value.clear();
    return;
  }
  if (!node.IsScalar()) throw ConfigError("no text");
  value = node.Scalar();
}
template <typename T>
void read(const YAML::Node& node, std::vector<T>& values) {
  if (!node.IsSequence()) throw ConfigError("no list");
  std::vector<T> all;
  for (const YAML::Node& element : node) read(element, all.emplace_back());
  values = all;
}
template <HasWords Enum>
void read(const YAML::Node& node, Enum& value) {
  for (const auto& known : words_of(std::type_identity<Enum>())) {
    if (node.IsScalar() && node.Scalar() == known.word) {
      value = known.value;
      return;
    }
  }
  throw ConfigError("no such word");
}
void read(const YAML::Node& node, std::optional<c10::ScalarType>& dtype) {
  c10::ScalarType given = c10::kFloat;
  read(node, given);
  dtype.reset();
  if (given != c10::kFloat) dtype = given;
}

void check_bounds(const Bounds& bounds, int64_t value) {
  const bool has_least = bounds.kind != Bounds::Kind::kNone || bounds.least > 0;
  if (has_least && value < bounds.least) throw ConfigError("too small");
  if (bounds.kind == Bounds::Kind::kRange && value > bounds.most) throw ConfigError("too large");
}

// ---- What is expected ----

template <typename Enum>
std::string one_of() {
  std::string words;
  for (const auto& known : words_of(std::type_identity<Enum>())) {
    words += (words.empty() ? "" : ", ") + std::string(known.word);
  }
  return "one of " + words;
}

std::string whole_number(const Bounds& bounds) {
  if (bounds.kind == Bounds::Kind::kRange) {
    return "a whole number from " + std::to_string(bounds.least) + " to " +
           std::to_string(bounds.most);
  }
  const bool has_least = bounds.kind != Bounds::Kind::kNone || bounds.least > 0;
  return has_least ? "a whole number of at least " + std::to_string(bounds.least)
                   : "a whole number";
}

template <typename T>
std::string expected_of(const FieldText& text) {
  if constexpr (std::is_same_v<T, bool>) {
    return "true or false";
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return text.unit == kBytes ? "a number of bytes, such as 512MiB" : whole_number(text.bounds);
  } else if constexpr (std::is_same_v<T, double>) {
    return "a number";
  } else if constexpr (std::is_same_v<T, std::vector<double>>) {
    return "a list of numbers, such as [0.5, 0.5]";
  } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
    return "a list of whole numbers, such as [30, 60]";
  } else if constexpr (std::is_same_v<T, std::optional<c10::ScalarType>>) {
    return one_of<c10::ScalarType>();
  } else if constexpr (HasWords<T>) {
    return one_of<T>();
  } else {
    return kAnyText;
  }
}

template <typename F>
ConfigKey key_of(const std::string& prefix, const F& field, typename F::Struct& options) {
  using Value = typename F::Value;
  Value& value = options.*F::kMember;
  const FieldText text = field.text;
  ConfigKey key;
  key.name = prefix + capitals(F::name());
  key.help = text.help;
  key.expected = expected_of<Value>(text);
  const Value standard = typename F::Struct().*F::kMember;
  key.fallback = text.default_word.empty() ? yaml(standard) : std::string(text.default_word);
  key.set = [&value, text](const YAML::Node& node) {
    Value given{};
    if constexpr (std::is_same_v<Value, int64_t>) {
      if (text.unit == kBytes && node.IsScalar()) {
        given = zeropage::memory::parse_bytes(node.Scalar());
      } else {
        read(node, given);
      }
      check_bounds(text.bounds, given);
    } else {
      read(node, given);
    }
    value = given;
  };
  key.text = [&value] { return yaml(value); };
  return key;
}

template <typename S>
void add_keys(const std::string& prefix, S& options, std::vector<ConfigKey>& keys) {
  zeropage::memory::for_each_field<S>([&](const auto& field) {
    using F = std::remove_cvref_t<decltype(field)>;
    if constexpr (zeropage::memory::HasTable<typename F::Value>) {
      add_keys(prefix + capitals(F::name()) + ".", options.*F::kMember, keys);
    } else {
      keys.push_back(key_of(prefix, field, options));
    }
  });
}

}  // namespace

std::vector<ConfigKey> keys_of(Config& config) {
  std::vector<ConfigKey> keys;
  add_keys("", config, keys);
  return keys;
}

std::string keys_table() {
  Config config;
  std::string table = "| key | meaning | expected | default |\n|---|---|---|---|\n";
  for (const ConfigKey& key : keys_of(config)) {
    table += "| `" + key.name + "` | " + key.help + " | " + key.expected + " | " +
             (key.fallback == "\"\"" ? "none" : key.fallback) + " |\n";
  }
  return table;
}

}  // namespace train_imagenet
