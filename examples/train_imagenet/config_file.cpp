#include "train_imagenet/config_file.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "train_imagenet/config_keys.h"

namespace train_imagenet {
namespace {

// How many letters must be put in, taken out or exchanged (Levenshtein).
size_t distance(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= from.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t exchanged = diagonal + (from[i - 1] == to[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({exchanged, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

class Reader {
 public:
  explicit Reader(Config& config) : keys_(keys_of(config)) {}

  // A file's map: keys, and sections of keys.
  void read(const std::string& file, const YAML::Node& map, const std::string& section) {
    for (const auto& entry : map) {
      if (!entry.first.IsScalar()) throw ConfigError(at(file, entry.first) + "a key is no word");
      const std::string name = section + entry.first.Scalar();
      const std::string where = at(file, entry.first);
      if (is_section(name + ".")) {
        if (!entry.second.IsMap()) {
          throw ConfigError(where + name + " is a section: expected keys below it, such as " +
                            first_of(name + "."));
        }
        read(file, entry.second, name + ".");
      } else {
        if (!seen_.insert(name).second) throw ConfigError(where + name + " is there a second time");
        set(where, name, entry.second);
      }
    }
  }

  void set(const std::string& where, const std::string& name, const YAML::Node& value) {
    const auto key = std::find_if(keys_.begin(), keys_.end(),
                                  [&](const ConfigKey& known) { return known.name == name; });
    if (key == keys_.end()) {
      throw ConfigError(where + "there is no key " + name + "; did you mean " + nearest(name) +
                        "?");
    }
    try {
      key->set(value);
    } catch (const std::exception&) {
      YAML::Emitter given;
      given.SetMapFormat(YAML::Flow);
      given.SetSeqFormat(YAML::Flow);
      given << value;
      throw ConfigError(where + name + ": expected " + key->expected + ", got " + given.c_str());
    }
  }

  // Whether the key's value is any text.
  bool is_text(const std::string& name) const {
    return std::any_of(keys_.begin(), keys_.end(), [&](const ConfigKey& known) {
      return known.name == name && known.expected == kAnyText;
    });
  }

 private:
  static std::string at(const std::string& file, const YAML::Node& node) {
    return file + ":" + std::to_string(node.Mark().line + 1) + ": ";
  }
  bool is_section(const std::string& prefix) const {
    return std::any_of(keys_.begin(), keys_.end(),
                       [&](const ConfigKey& key) { return key.name.starts_with(prefix); });
  }
  std::string first_of(const std::string& prefix) const {
    return std::find_if(keys_.begin(), keys_.end(),
                        [&](const ConfigKey& key) { return key.name.starts_with(prefix); })
        ->name;
  }
  std::string nearest(const std::string& name) const {
    return std::min_element(keys_.begin(), keys_.end(),
                            [&](const ConfigKey& a, const ConfigKey& b) {
                              return distance(name, a.name) < distance(name, b.name);
                            })
        ->name;
  }

  std::vector<ConfigKey> keys_;
  std::set<std::string> seen_;
};

YAML::Node parsed(const std::filesystem::path& file) {
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAllFromFile(file.string());
    if (documents.size() > 1) {
      throw ConfigError(file.string() + ": expected one document, got " +
                        std::to_string(documents.size()) + "; take the lines \"---\" out");
    }
    return documents.empty() ? YAML::Node() : documents.front();
  } catch (const YAML::BadFile&) {
    throw ConfigError(file.string() + ": there is no such file, or it cannot be read");
  } catch (const YAML::Exception& error) {
    throw ConfigError(file.string() + ":" + std::to_string(error.mark.line + 1) +
                      ": is no YAML: " + error.msg);
  }
}

}  // namespace

Config read_config(const std::filesystem::path& file, const std::vector<std::string>& overrides) {
  Config config;
  Reader reader(config);
  if (!file.empty()) {
    const YAML::Node root = parsed(file);
    if (!root.IsNull() && !root.IsMap()) {
      throw ConfigError(file.string() + ": expected keys and values, such as TRAIN: {BATCH: 256}");
    }
    reader.read(file.string(), root, "");
  }
  if (overrides.size() % 2 != 0) {
    throw ConfigError("command line: expected pairs KEY VALUE, got " + overrides.back() +
                      " without a value");
  }
  for (size_t i = 0; i < overrides.size(); i += 2) {
    // Text is as it stands: YAML would take the end off a path such as "run #3".
    YAML::Node value(overrides[i + 1]);
    if (!reader.is_text(overrides[i])) {
      try {
        value = YAML::Load(overrides[i + 1]);
      } catch (const YAML::Exception&) {
        // The key says what is expected.
      }
    }
    reader.set("command line: ", overrides[i], value);
  }
  return config;
}

std::string config_text(const Config& config) {
  Config copy = config;
  std::string text, section;
  for (const ConfigKey& key : keys_of(copy)) {
    const size_t dot = key.name.find('.');
    if (dot == std::string::npos) {
      text += key.name + ": " + key.text() + "\n";
      continue;
    }
    if (key.name.substr(0, dot) != section) {
      section = key.name.substr(0, dot);
      text += section + ":\n";
    }
    text += "  " + key.name.substr(dot + 1) + ": " + key.text() + "\n";
  }
  return text;
}

}  // namespace train_imagenet
