#include "tools/name_map.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <set>
#include <stdexcept>

#include "tools/state_words.h"

namespace zeropage::tools {
namespace {

using nlohmann::json;

constexpr size_t kMostShownBytes = 100;

bool is_digit(char character) {
  return std::isdigit(static_cast<unsigned char>(character)) != 0;
}

std::string shown(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, kMostShownBytes);
}

// A `*` beside a digit or another `*` would not say which digits are whose.
bool is_plain(std::string_view pattern) {
  const auto bad = [&](size_t i) {
    return i < pattern.size() && (is_digit(pattern[i]) || pattern[i] == '*');
  };
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '*' && (bad(i + 1) || (i > 0 && bad(i - 1)))) return false;
  }
  return !pattern.empty();
}

std::string filled(const std::string& pattern, const std::vector<std::string>& digits) {
  std::string name;
  auto next = digits.begin();
  for (const char character : pattern) {
    if (character == '*') {
      name += *next++;
    } else {
      name += character;
    }
  }
  return name;
}

// The JSON library keeps the last of two alike in silence.
class KeysOnce {
 public:
  bool operator()(int /*depth*/, json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::object_start) keys_.emplace_back();
    if (event == json::parse_event_t::object_end) keys_.pop_back();
    if (event == json::parse_event_t::key && !keys_.back().insert(parsed).second && twice.empty()) {
      twice = parsed.get<std::string>();
    }
    return true;
  }

  std::string twice;

 private:
  std::vector<std::set<std::string>> keys_;
};

}  // namespace

std::optional<std::vector<std::string>> digits_in(std::string_view name, std::string_view pattern) {
  std::vector<std::string> digits;
  size_t at = 0;
  for (const char character : pattern) {
    if (character != '*') {
      if (at == name.size() || name[at] != character) return std::nullopt;
      ++at;
      continue;
    }
    const size_t begin = at;
    while (at < name.size() && is_digit(name[at])) ++at;
    if (at == begin) return std::nullopt;
    digits.emplace_back(name.substr(begin, at - begin));
  }
  if (at != name.size()) return std::nullopt;
  return digits;
}

NameMap::NameMap(const std::filesystem::path& file) : file_(file.string()) {
  std::ifstream stream(file);
  if (!stream) refuse("a map of names", "a file that cannot be opened");
  KeysOnce keys;
  json map;
  try {
    map = json::parse(stream, std::ref(keys));
  } catch (const json::exception& error) {
    refuse("JSON", error.what());
  }
  if (!keys.twice.empty()) refuse("each name once", in_quotes(keys.twice) + " twice");
  if (!map.is_object()) refuse("an object of names", shown(map));
  for (const auto& [ours, value] : map.items()) {
    Entry entry = entry_of(ours, value);
    check_unique(entry);
    entries_.push_back(std::move(entry));
  }
}

NameMap::Entry NameMap::entry_of(const std::string& ours, const json& value) const {
  Entry entry{.ours = ours, .theirs = {}, .transpose = false};
  const json name = value.is_object() && value.contains("name") ? value["name"] : value;
  if (!name.is_string()) {
    refuse("a name, or {\"name\": ..., \"transpose\": ...}, for " + in_quotes(ours), shown(value));
  }
  entry.theirs = name;
  if (value.is_object()) {
    for (const auto& [key, member] : value.items()) {
      if (key != "name" && (key != "transpose" || !member.is_boolean())) {
        refuse("name and transpose, true or false, for " + in_quotes(ours), shown(value));
      }
    }
    entry.transpose = value.value("transpose", false);
  }
  for (const std::string& pattern : {entry.ours, entry.theirs}) {
    if (!is_plain(pattern)) {
      refuse("a name whose * stand apart from digits and each other", in_quotes(pattern));
    }
  }
  if (std::count(entry.ours.begin(), entry.ours.end(), '*') !=
      std::count(entry.theirs.begin(), entry.theirs.end(), '*')) {
    refuse("as many * as in " + in_quotes(entry.ours), in_quotes(entry.theirs));
  }
  return entry;
}

void NameMap::check_unique(const Entry& entry) const {
  for (const Entry& other : entries_) {
    if (other.theirs == entry.theirs) {
      refuse("each name once", in_quotes(entry.theirs) + " for " + in_quotes(other.ours) + " and " +
                                   in_quotes(entry.ours));
    }
  }
}

void NameMap::refuse(const std::string& expected, const std::string& got) const {
  throw std::runtime_error(file_ + ": expected " + expected + ", got " + got +
                           "; correct the map of names");
}

std::optional<NameMap::Renamed> NameMap::rename(const std::string& name,
                                                Direction direction) const {
  const bool to_theirs = direction == Direction::kToTheirs;
  const Entry* found = nullptr;
  std::vector<std::string> digits;
  for (const Entry& entry : entries_) {
    const auto fits = digits_in(name, to_theirs ? entry.ours : entry.theirs);
    if (!fits) continue;
    if (found != nullptr) {
      refuse("one entry for " + in_quotes(name),
             "those of " + in_quotes(found->ours) + " and " + in_quotes(entry.ours));
    }
    found = &entry;
    digits = *fits;
  }
  if (found == nullptr) return std::nullopt;
  return Renamed{filled(to_theirs ? found->theirs : found->ours, digits), found->transpose};
}

}  // namespace zeropage::tools
