// What was recorded of some steps of a run: values, as they lie in a file (profile/report/profile_file.h).
//
// Needs no LibTorch: names of kinds, accounts and phases come with the values.
// Units: bytes; nanoseconds, within a step from its begin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace zeropage::profile {

// An index into RankProfile::names, of which the first is "": not known.
using NameIndex = uint32_t;

// Bytes that one total gained or lost.
struct Change {
  enum class Phase : uint8_t { kOther, kForward, kBackward, kStep };
  static constexpr size_t kPhaseCount = 4;

  int64_t time_ns = 0;
  int64_t bytes = 0;        // what the total changes by; of a rename what changes its kind
  uint8_t account = 0;      // of Profile::accounts
  uint8_t kind = 0;         // of Profile::kinds, from here on
  uint8_t kind_before = 0;  // another one than `kind`: renamed
  Phase phase = Phase::kOther;
  NameIndex owner = 0;  // the part of the code, or the operator, that allocated
  NameIndex page = 0;
  uint64_t block = 0;  // an allocation and its end have the same; 0: not known

  bool is_rename() const { return kind != kind_before; }
  friend bool operator==(const Change&, const Change&) = default;
};

// "forward".
const char* name(Change::Phase phase);

struct PageRecord {
  enum class What : uint8_t { kFetching, kResident, kEvicted, kReducing, kReduced };
  static constexpr size_t kWhatCount = 5;

  int64_t time_ns = 0;
  What what = What::kFetching;
  NameIndex page = 0;
  NameIndex pages = 0;  // of what: "parameter", "gradient"
  int64_t bytes = 0;    // of the whole page; 0: not known

  friend bool operator==(const PageRecord&, const PageRecord&) = default;
};

struct SpanRecord {
  enum class What : uint8_t { kRange, kCollective, kCopy, kWait };
  static constexpr size_t kWhatCount = 4;

  int64_t begin_ns = 0;
  int64_t end_ns = 0;
  What what = What::kRange;
  NameIndex name = 0;  // "all_gather"
  NameIndex of = 0;    // "page \"blocks.7\""
  int64_t bytes = 0;
  bool on_training_thread = false;  // which calls Profiler::step()

  friend bool operator==(const SpanRecord&, const SpanRecord&) = default;
};

// What one owner holds of one kind.
struct Holding {
  uint8_t account = 0;
  uint8_t kind = 0;
  NameIndex owner = 0;
  NameIndex page = 0;
  int64_t bytes = 0;
  int64_t blocks = 0;

  friend bool operator==(const Holding&, const Holding&) = default;
};

struct StepProfile {
  int64_t step = 0;
  std::string label;  // "": none beside its number
  int64_t duration_ns = 0;
  std::vector<std::vector<int64_t>> before;  // bytes at the step's begin, by account and kind
  std::vector<Change> changes;               // in the order in which the totals changed
  std::vector<PageRecord> pages;
  std::vector<SpanRecord> spans;    // in the order of their ends
  std::vector<Holding> held;        // at its end, of what was allocated since the profile began
  std::vector<NameIndex> resident;  // parameter pages that are whole at its begin

  friend bool operator==(const StepProfile&, const StepProfile&) = default;
};

struct RankProfile {
  int rank = 0;
  std::vector<std::string> names;  // names[0] is ""
  std::vector<int64_t> formula;    // held from step to step by the plan, by kind; none: not told
  std::vector<StepProfile> steps;  // in order

  friend bool operator==(const RankProfile&, const RankProfile&) = default;
};

struct Profile {
  std::string title;
  std::vector<std::pair<std::string, std::string>> facts;  // such as {"stage", "3"}, in order
  std::vector<std::string> kinds;
  std::vector<std::string> accounts;
  uint8_t device = 0;              // the account of the device that trains
  std::vector<RankProfile> ranks;  // in order

  friend bool operator==(const Profile&, const Profile&) = default;
};

}  // namespace zeropage::profile
