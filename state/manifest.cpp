#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "state/block_checksums.h"
#include "zeropage/saved_state.h"

namespace zeropage::state {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "zeropage-state";
constexpr uint64_t kMostBytes = uint64_t{1} << 30;
constexpr int kMostDepth = 32;
constexpr size_t kHexDigits = 8;
// Behind the object without its last brace.
const std::string kBeforeCrc = ",\n \"crc32c_of_the_above\": \"";
const std::string kAfterCrc = "\"\n}\n";
const size_t kTailBytes = kBeforeCrc.size() + kHexDigits + kAfterCrc.size();

std::string hex(uint32_t value) {
  std::array<char, kHexDigits> digits{};
  const auto end = std::to_chars(digits.begin(), digits.end(), value, 16).ptr;
  const auto length = static_cast<size_t>(end - digits.begin());
  return std::string(kHexDigits - length, '0') + std::string(digits.begin(), end);
}

bool parse_hex(std::string_view digits, uint32_t& value) {
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), value, 16);
  return error == std::errc() && end == digits.end();
}

std::string checked_text(const ByteSource& file) {
  const uint64_t bytes = file.size();
  if (bytes <= kTailBytes || bytes > kMostBytes) {
    throw StateError(file.name(), 0,
                     "a manifest of " + std::to_string(kTailBytes + 1) + " to " +
                         std::to_string(kMostBytes) + " bytes",
                     std::to_string(bytes), "it was cut, or is no manifest");
  }
  std::string text(bytes, '\0');
  file.read(0, text.data(), bytes);
  const uint64_t end = bytes - kTailBytes;
  const std::string expected = kBeforeCrc + hex(crc32c(text.data(), end)) + kAfterCrc;
  if (std::string_view(text).substr(end) != expected) {
    throw StateError(file.name(), end, "the checksum of all before it",
                     "another one, or other text", "the manifest is damaged");
  }
  return text;
}

class ManifestReader {
 public:
  ManifestReader(const ByteSource& file, const json& whole) : file_(file), whole_(whole) {}

  Manifest read() const {
    if (!whole_.is_object() || !whole_.contains("format") || whole_["format"] != kFormat) {
      refuse(std::string("\"format\": \"") + kFormat + "\"", "another format");
    }
    if (!whole_.contains("version") || whole_["version"] != kFormatVersion) {
      refuse("version " + std::to_string(kFormatVersion),
             whole_.contains("version") ? whole_["version"].dump() : "none",
             "read it with the version of Zeropage that wrote it");
    }
    Manifest manifest;
    manifest.step = whole_number(member(whole_, "step"), "a step");
    const json& files = member(whole_, "files");
    if (!files.is_object()) refuse("an object of files", files.type_name());
    for (const auto& [name, entry] : files.items()) manifest.files.push_back(read(name, entry));
    manifest.content = member(whole_, "content");
    if (!manifest.content.is_object()) refuse("an object of content", "something else");
    return manifest;
  }

 private:
  [[noreturn]] void refuse(const std::string& expected, const std::string& got,
                           const std::string& what_to_do = "it is no manifest of a state") const {
    throw StateError(file_.name(), 0, expected, got, what_to_do);
  }

  const json& member(const json& object, const char* key) const {
    if (!object.is_object() || !object.contains(key))
      refuse(std::string("\"") + key + "\"", "none");
    return object[key];
  }

  int64_t whole_number(const json& value, const std::string& what) const {
    if (!value.is_number_unsigned() ||
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      refuse(what + " from 0 on", value.dump().substr(0, 64));
    }
    return value.get<int64_t>();
  }

  FileEntry read(const std::string& name, const json& value) const {
    // So no path leads out of the folder.
    if (name != kWeightsFile && name != kOptimizerFile) {
      refuse(std::string(kWeightsFile) + " or " + kOptimizerFile, "a file \"" + name + "\"");
    }
    FileEntry entry{.name = name, .bytes = 0, .blocks = {}};
    entry.bytes = static_cast<uint64_t>(whole_number(member(value, "bytes"), "bytes of " + name));
    if (member(value, "block_bytes") != kBlockBytes) {
      refuse("block_bytes " + std::to_string(kBlockBytes), value["block_bytes"].dump());
    }
    const json& digits = member(value, "crc32c");
    const uint64_t blocks = blocks_of_file(entry.bytes);
    if (!digits.is_string() || digits.get_ref<const std::string&>().size() != blocks * kHexDigits) {
      refuse(std::to_string(blocks) + " checksums of " + name, "others");
    }
    const std::string_view text = digits.get_ref<const std::string&>();
    for (uint64_t block = 0; block < blocks; ++block) {
      entry.blocks.push_back(0);
      if (!parse_hex(text.substr(block * kHexDigits, kHexDigits), entry.blocks.back())) {
        refuse("checksums of " + name + " in hexadecimal digits", "others");
      }
    }
    return entry;
  }

  const ByteSource& file_;
  const json& whole_;
};

}  // namespace

const FileEntry* Manifest::file(const std::string& name) const {
  const auto found = std::find_if(files.begin(), files.end(),
                                  [&](const FileEntry& entry) { return entry.name == name; });
  return found == files.end() ? nullptr : &*found;
}

std::string to_text(const Manifest& manifest) {
  json files = json::object();
  for (const FileEntry& entry : manifest.files) {
    std::string digits;
    digits.reserve(entry.blocks.size() * kHexDigits);
    for (const uint32_t crc : entry.blocks) digits += hex(crc);
    files[entry.name] = {
        {"block_bytes", kBlockBytes}, {"bytes", entry.bytes}, {"crc32c", std::move(digits)}};
  }
  const json whole = {{"content", manifest.content},
                      {"files", std::move(files)},
                      {"format", kFormat},
                      {"step", manifest.step},
                      {"version", kFormatVersion}};
  std::string text = whole.dump(1);
  // Without the last "\n}".
  text.resize(text.size() - 2);
  return text + kBeforeCrc + hex(crc32c(text.data(), text.size())) + kAfterCrc;
}

Manifest read_manifest(const ByteSource& file) {
  const std::string text = checked_text(file);
  const auto within_depth = [&](int depth, json::parse_event_t /*event*/, json& /*parsed*/) {
    if (depth <= kMostDepth) return true;
    throw StateError(file.name(), 0, "no more than " + std::to_string(kMostDepth) + " levels",
                     "more", "it is no manifest of a state");
  };
  json whole;
  try {
    whole = json::parse(text, within_depth);
  } catch (const json::exception& error) {
    throw StateError(file.name(), 0, "JSON", error.what(), "it is no manifest of a state");
  }
  return ManifestReader(file, whole).read();
}

}  // namespace zeropage::state
