#include "profile/report/profile_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>

#include <nlohmann/json.hpp>

namespace zeropage::profile {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "zeropage-profile";

template <typename Record, typename Get>
Json column(const std::vector<Record>& records, Get get) {
  Json values = Json::array();
  for (const Record& record : records) values.push_back(get(record));
  return values;
}

Json changes_json(const std::vector<Change>& changes) {
  return {{"time_ns", column(changes, [](const Change& c) { return c.time_ns; })},
          {"bytes", column(changes, [](const Change& c) { return c.bytes; })},
          {"account", column(changes, [](const Change& c) { return c.account; })},
          {"kind", column(changes, [](const Change& c) { return c.kind; })},
          {"kind_before", column(changes, [](const Change& c) { return c.kind_before; })},
          {"phase", column(changes, [](const Change& c) { return static_cast<int>(c.phase); })},
          {"owner", column(changes, [](const Change& c) { return c.owner; })},
          {"page", column(changes, [](const Change& c) { return c.page; })},
          {"block", column(changes, [](const Change& c) { return c.block; })}};
}

Json pages_json(const std::vector<PageRecord>& pages) {
  return {{"time_ns", column(pages, [](const PageRecord& p) { return p.time_ns; })},
          {"what", column(pages, [](const PageRecord& p) { return static_cast<int>(p.what); })},
          {"page", column(pages, [](const PageRecord& p) { return p.page; })},
          {"pages", column(pages, [](const PageRecord& p) { return p.pages; })},
          {"bytes", column(pages, [](const PageRecord& p) { return p.bytes; })}};
}

Json spans_json(const std::vector<SpanRecord>& spans) {
  return {{"begin_ns", column(spans, [](const SpanRecord& s) { return s.begin_ns; })},
          {"end_ns", column(spans, [](const SpanRecord& s) { return s.end_ns; })},
          {"what", column(spans, [](const SpanRecord& s) { return static_cast<int>(s.what); })},
          {"name", column(spans, [](const SpanRecord& s) { return s.name; })},
          {"of", column(spans, [](const SpanRecord& s) { return s.of; })},
          {"bytes", column(spans, [](const SpanRecord& s) { return s.bytes; })},
          {"on_training_thread",
           column(spans, [](const SpanRecord& s) { return s.on_training_thread ? 1 : 0; })}};
}

Json held_json(const std::vector<Holding>& held) {
  return {{"account", column(held, [](const Holding& h) { return h.account; })},
          {"kind", column(held, [](const Holding& h) { return h.kind; })},
          {"owner", column(held, [](const Holding& h) { return h.owner; })},
          {"page", column(held, [](const Holding& h) { return h.page; })},
          {"bytes", column(held, [](const Holding& h) { return h.bytes; })},
          {"blocks", column(held, [](const Holding& h) { return h.blocks; })}};
}

// Reads what it is asked for, and says where in the file a value makes no sense.
class Reader {
 public:
  explicit Reader(std::string name) : name_(std::move(name)) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw ProfileError(name_ + ": " + what + "; write the profile anew");
  }

  const Json& at(const Json& object, const char* key) const {
    if (!object.is_object() || !object.contains(key)) {
      fail(std::string("expected a field \"") + key + "\", and there is none");
    }
    return object[key];
  }

  int64_t number(const Json& value, const char* what, int64_t least, int64_t most) const {
    if (!value.is_number_integer()) {
      fail(std::string("\"") + what + "\": expected a whole number, got " +
           value.dump().substr(0, 40));
    }
    const auto got = value.get<int64_t>();
    if (got < least || got > most) {
      fail(std::string("\"") + what + "\": expected a number from " + std::to_string(least) +
           " to " + std::to_string(most) + ", got " + std::to_string(got));
    }
    return got;
  }

  std::string text(const Json& value, const char* what) const {
    if (!value.is_string()) fail(std::string("\"") + what + "\": expected text");
    return value.get<std::string>();
  }

  const Json& list(const Json& object, const char* key) const {
    const Json& value = at(object, key);
    if (!value.is_array()) fail(std::string("\"") + key + "\": expected a list");
    return value;
  }

  std::vector<std::string> texts(const Json& object, const char* key) const {
    std::vector<std::string> result;
    for (const Json& value : list(object, key)) result.push_back(text(value, key));
    return result;
  }

 private:
  const std::string name_;
};

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();

// The columns of one table, which are equally long.
template <typename Record>
class Columns {
 public:
  Columns(const Reader& reader, const Json& table, const char* first)
      : reader_(reader), table_(table), records_(reader.list(table, first).size()) {}

  template <typename Set>
  void read(const char* key, int64_t least, int64_t most, Set set) {
    const Json& values = reader_.list(table_, key);
    if (values.size() != records_.size()) {
      reader_.fail(std::string("\"") + key + "\" has " + std::to_string(values.size()) +
                   " values, but its table has " + std::to_string(records_.size()) + " rows");
    }
    for (size_t row = 0; row < records_.size(); ++row) {
      set(records_[row], reader_.number(values[row], key, least, most));
    }
  }

  std::vector<Record> take() { return std::move(records_); }

 private:
  const Reader& reader_;
  const Json& table_;
  std::vector<Record> records_;
};

struct Limits {
  int64_t kinds;
  int64_t accounts;
  int64_t names;
};

std::vector<Change> read_changes(const Reader& reader, const Json& table, const Limits& most) {
  Columns<Change> columns(reader, table, "time_ns");
  columns.read("time_ns", kLeast, kMost, [](Change& c, int64_t v) { c.time_ns = v; });
  columns.read("bytes", kLeast, kMost, [](Change& c, int64_t v) { c.bytes = v; });
  columns.read("account", 0, most.accounts - 1,
               [](Change& c, int64_t v) { c.account = static_cast<uint8_t>(v); });
  columns.read("kind", 0, most.kinds - 1,
               [](Change& c, int64_t v) { c.kind = static_cast<uint8_t>(v); });
  columns.read("kind_before", 0, most.kinds - 1,
               [](Change& c, int64_t v) { c.kind_before = static_cast<uint8_t>(v); });
  columns.read("phase", 0, Change::kPhaseCount - 1,
               [](Change& c, int64_t v) { c.phase = static_cast<Change::Phase>(v); });
  columns.read("owner", 0, most.names - 1,
               [](Change& c, int64_t v) { c.owner = static_cast<NameIndex>(v); });
  columns.read("page", 0, most.names - 1,
               [](Change& c, int64_t v) { c.page = static_cast<NameIndex>(v); });
  columns.read("block", 0, kMost, [](Change& c, int64_t v) { c.block = static_cast<uint64_t>(v); });
  return columns.take();
}

std::vector<PageRecord> read_pages(const Reader& reader, const Json& table, const Limits& most) {
  Columns<PageRecord> columns(reader, table, "time_ns");
  columns.read("time_ns", kLeast, kMost, [](PageRecord& p, int64_t v) { p.time_ns = v; });
  columns.read("what", 0, PageRecord::kWhatCount - 1,
               [](PageRecord& p, int64_t v) { p.what = static_cast<PageRecord::What>(v); });
  columns.read("page", 0, most.names - 1,
               [](PageRecord& p, int64_t v) { p.page = static_cast<NameIndex>(v); });
  columns.read("pages", 0, most.names - 1,
               [](PageRecord& p, int64_t v) { p.pages = static_cast<NameIndex>(v); });
  columns.read("bytes", 0, kMost, [](PageRecord& p, int64_t v) { p.bytes = v; });
  return columns.take();
}

std::vector<SpanRecord> read_spans(const Reader& reader, const Json& table, const Limits& most) {
  Columns<SpanRecord> columns(reader, table, "begin_ns");
  columns.read("begin_ns", kLeast, kMost, [](SpanRecord& s, int64_t v) { s.begin_ns = v; });
  columns.read("end_ns", kLeast, kMost, [](SpanRecord& s, int64_t v) { s.end_ns = v; });
  columns.read("what", 0, SpanRecord::kWhatCount - 1,
               [](SpanRecord& s, int64_t v) { s.what = static_cast<SpanRecord::What>(v); });
  columns.read("name", 0, most.names - 1,
               [](SpanRecord& s, int64_t v) { s.name = static_cast<NameIndex>(v); });
  columns.read("of", 0, most.names - 1,
               [](SpanRecord& s, int64_t v) { s.of = static_cast<NameIndex>(v); });
  columns.read("bytes", 0, kMost, [](SpanRecord& s, int64_t v) { s.bytes = v; });
  columns.read("on_training_thread", 0, 1,
               [](SpanRecord& s, int64_t v) { s.on_training_thread = v == 1; });
  return columns.take();
}

std::vector<Holding> read_held(const Reader& reader, const Json& table, const Limits& most) {
  Columns<Holding> columns(reader, table, "account");
  columns.read("account", 0, most.accounts - 1,
               [](Holding& h, int64_t v) { h.account = static_cast<uint8_t>(v); });
  columns.read("kind", 0, most.kinds - 1,
               [](Holding& h, int64_t v) { h.kind = static_cast<uint8_t>(v); });
  columns.read("owner", 0, most.names - 1,
               [](Holding& h, int64_t v) { h.owner = static_cast<NameIndex>(v); });
  columns.read("page", 0, most.names - 1,
               [](Holding& h, int64_t v) { h.page = static_cast<NameIndex>(v); });
  columns.read("bytes", 0, kMost, [](Holding& h, int64_t v) { h.bytes = v; });
  columns.read("blocks", 0, kMost, [](Holding& h, int64_t v) { h.blocks = v; });
  return columns.take();
}

std::vector<int64_t> read_bytes_by_kind(const Reader& reader, const Json& values, const char* what,
                                        size_t kinds) {
  if (!values.is_array() || values.size() != kinds) {
    reader.fail(std::string("\"") + what + "\": expected " + std::to_string(kinds) +
                " numbers, one a kind");
  }
  std::vector<int64_t> bytes;
  for (const Json& value : values) bytes.push_back(reader.number(value, what, kLeast, kMost));
  return bytes;
}

StepProfile read_step(const Reader& reader, const Json& json, const Limits& most) {
  StepProfile step;
  step.step = reader.number(reader.at(json, "step"), "step", 0, kMost);
  step.label = reader.text(reader.at(json, "label"), "label");
  step.duration_ns = reader.number(reader.at(json, "duration_ns"), "duration_ns", 0, kMost);
  const Json& before = reader.list(json, "before");
  if (before.size() != static_cast<size_t>(most.accounts)) {
    reader.fail("\"before\": expected a row for each account");
  }
  for (const Json& row : before) {
    step.before.push_back(
        read_bytes_by_kind(reader, row, "before", static_cast<size_t>(most.kinds)));
  }
  step.changes = read_changes(reader, reader.at(json, "changes"), most);
  step.pages = read_pages(reader, reader.at(json, "pages"), most);
  step.spans = read_spans(reader, reader.at(json, "spans"), most);
  step.held = read_held(reader, reader.at(json, "held"), most);
  for (const Json& value : reader.list(json, "resident")) {
    step.resident.push_back(
        static_cast<NameIndex>(reader.number(value, "resident", 0, most.names - 1)));
  }
  return step;
}

RankProfile read_rank(const Reader& reader, const Json& json, Limits most) {
  RankProfile rank;
  rank.rank = static_cast<int>(reader.number(reader.at(json, "rank"), "rank", 0, 1 << 30));
  rank.names = reader.texts(json, "names");
  if (rank.names.empty() || !rank.names[0].empty()) {
    reader.fail("\"names\": expected the first to be empty");
  }
  most.names = static_cast<int64_t>(rank.names.size());
  const Json& formula = reader.at(json, "formula");
  if (!formula.is_null()) {
    rank.formula = read_bytes_by_kind(reader, formula, "formula", static_cast<size_t>(most.kinds));
  }
  for (const Json& step : reader.list(json, "steps")) {
    rank.steps.push_back(read_step(reader, step, most));
  }
  return rank;
}

Json step_json(const StepProfile& step) {
  return {{"step", step.step},
          {"label", step.label},
          {"duration_ns", step.duration_ns},
          {"before", step.before},
          {"changes", changes_json(step.changes)},
          {"pages", pages_json(step.pages)},
          {"spans", spans_json(step.spans)},
          {"held", held_json(step.held)},
          {"resident", step.resident}};
}

Json parse(const Reader& reader, std::string_view text) {
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    if (error.byte > text.size()) {
      reader.fail("the file ends in the middle, after " + std::to_string(text.size()) +
                  " bytes: it was cut off, or is still being written");
    }
    reader.fail("not a profile: no JSON from byte " + std::to_string(error.byte) + " on");
  }
}

}  // namespace

std::string to_json(const Profile& profile) {
  Json facts = Json::array();
  for (const auto& [what, value] : profile.facts) facts.push_back({what, value});
  Json ranks = Json::array();
  for (const RankProfile& rank : profile.ranks) {
    Json steps = Json::array();
    for (const StepProfile& step : rank.steps) steps.push_back(step_json(step));
    ranks.push_back({{"rank", rank.rank},
                     {"names", rank.names},
                     {"formula", rank.formula.empty() ? Json() : Json(rank.formula)},
                     {"steps", std::move(steps)}});
  }
  Json file;
  file["format"] = kFormat;
  file["version"] = kFormatVersion;
  file["title"] = profile.title;
  file["facts"] = std::move(facts);
  file["kinds"] = profile.kinds;
  file["accounts"] = profile.accounts;
  file["device"] = profile.device;
  file["ranks"] = std::move(ranks);
  // Names are any bytes; what is no UTF-8 becomes a sign that stands for it.
  return file.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Profile parse_profile(std::string_view text, const std::string& name) {
  const Reader reader(name);
  const Json file = parse(reader, text);
  if (!file.is_object() || !file.contains("format") || file["format"] != kFormat) {
    reader.fail("not a profile: expected JSON whose \"format\" is \"zeropage-profile\"");
  }
  const int64_t version = reader.number(reader.at(file, "version"), "version", 0, kMost);
  if (version != kFormatVersion) {
    throw ProfileError(name + ": a profile of version " + std::to_string(version) +
                       ", but this program reads version " + std::to_string(kFormatVersion) +
                       "; use the zp of the Zeropage that wrote it");
  }
  Profile profile;
  profile.title = reader.text(reader.at(file, "title"), "title");
  for (const Json& fact : reader.list(file, "facts")) {
    if (!fact.is_array() || fact.size() != 2) reader.fail("\"facts\": expected pairs of texts");
    profile.facts.emplace_back(reader.text(fact[0], "facts"), reader.text(fact[1], "facts"));
  }
  profile.kinds = reader.texts(file, "kinds");
  profile.accounts = reader.texts(file, "accounts");
  constexpr size_t kMostOfByte = 255;
  if (profile.kinds.empty() || profile.kinds.size() > kMostOfByte || profile.accounts.empty() ||
      profile.accounts.size() > kMostOfByte) {
    reader.fail("\"kinds\" and \"accounts\": expected 1 to 255 of each");
  }
  const Limits most{.kinds = static_cast<int64_t>(profile.kinds.size()),
                    .accounts = static_cast<int64_t>(profile.accounts.size()),
                    .names = 0};
  profile.device = static_cast<uint8_t>(
      reader.number(reader.at(file, "device"), "device", 0, most.accounts - 1));
  for (const Json& rank : reader.list(file, "ranks")) {
    profile.ranks.push_back(read_rank(reader, rank, most));
  }
  if (profile.ranks.empty()) reader.fail("\"ranks\": expected one or more, got none");
  return profile;
}

Profile read_profile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw ProfileError(path.string() + ": cannot be read (" + std::strerror(errno) + ")");
  }
  std::ostringstream text;
  text << file.rdbuf();
  return parse_profile(text.str(), path.string());
}

void write_text(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::path beside = path;
  beside += ".part";
  {
    std::ofstream file(beside, std::ios::binary | std::ios::trunc);
    file.write(text.data(), static_cast<std::streamsize>(text.size()));
    file.close();
    if (!file) {
      throw ProfileError(path.string() + ": cannot be written (" + std::strerror(errno) +
                         "); give a file in a folder that exists and has room");
    }
  }
  std::error_code error;
  std::filesystem::rename(beside, path, error);
  if (error) throw ProfileError(path.string() + ": cannot be written (" + error.message() + ")");
}

}  // namespace zeropage::profile
