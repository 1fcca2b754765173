// A recorded profile, its files, and tables of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// What was recorded of some steps of a run: values, as they lie in a file (profile/report/profile_file.h).
//
// Needs no LibTorch: names of kinds, accounts and phases come with the values.
// Units: bytes; nanoseconds, within a step from its begin.

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
  std::string label = {};  // "": none beside its number
  int64_t duration_ns = 0;
  std::vector<std::vector<int64_t>> before = {};  // bytes at the step's begin, by account and kind
  std::vector<Change> changes = {};               // in the order in which the totals changed
  std::vector<PageRecord> pages = {};
  std::vector<SpanRecord> spans = {};  // in the order of their ends
  std::vector<Holding> held = {};      // at its end, of what was allocated since the profile began
  std::vector<NameIndex> resident = {};  // parameter pages that are whole at its begin

  friend bool operator==(const StepProfile&, const StepProfile&) = default;
};

struct RankProfile {
  int rank = 0;
  std::vector<std::string> names = {};  // names[0] is ""
  std::vector<int64_t> formula = {};  // held from step to step by the plan, by kind; none: not told
  std::vector<StepProfile> steps = {};  // in order

  friend bool operator==(const RankProfile&, const RankProfile&) = default;
};

struct Profile {
  std::string title = {};
  std::vector<std::pair<std::string, std::string>> facts = {};  // such as {"stage", "3"}, in order
  std::vector<std::string> kinds = {};
  std::vector<std::string> accounts = {};
  uint8_t device = 0;                   // the account of the device that trains
  std::vector<RankProfile> ranks = {};  // in order

  friend bool operator==(const Profile&, const Profile&) = default;
};

// A profile in files: the page, the profile itself, the trace for Perfetto.
// Each empty: not written.
struct ProfileFiles {
  std::filesystem::path page = {};     // NAME.html, which needs no network
  std::filesystem::path profile = {};  // NAME.json, for `zp report`
  std::filesystem::path trace = {};    // NAME.json, for ui.perfetto.dev and chrome://tracing

  // By the end of a name: .html the page, .trace.json the trace, another .json
  // the profile. Throws ProfileError for another end.
  static ProfileFiles by_name(const std::filesystem::path& path);
};

// What is wrong with the names, in words; "": nothing.
std::string check_names(const ProfileFiles& files);

// other: a run that the page compares with; null: none. Throws ProfileError.
void write_files(const Profile& profile, const ProfileFiles& files, const Profile* other = nullptr);

// What a rank's training thread waited for in a step, and what would shorten it, in sentences.
//
// Only waits of the host are seen. What the thread computes meanwhile is no wait, even where another part
// of the step is on its way.
struct Wait {
  std::string name = {};  // what kind of wait, as "page", "reduction"
  std::string of = {};    // the page that was waited for; "": of none
  int64_t wait_ns = 0;
  int64_t times = 0;
  // How many of `times` a page was requested only when it was needed.
  int64_t faults = 0;
  int64_t page_bytes = 0;  // of the whole page; 0: not known
};

// The longest first. Waits for the same thing are one.
std::vector<Wait> waits_of(const RankProfile& rank, const StepProfile& step);
int64_t waited_ns(const std::vector<Wait>& waits);

// "142 ms of 810 ms waiting for page "blocks.7", which was on its way: one page more of prefetch needs 12.0
// MiB", for the longest waits, and how much of the step they are together.
std::vector<std::string> wait_sentences(const RankProfile& rank, const StepProfile& step);

// "142 ms", "0.81 ms".
std::string format_ns(int64_t nanoseconds);

// The figures of a profile as a table: by kind and rank, with the formula, and against another run.
// Figures of one rank, in bytes by kind, over all steps that were recorded.
struct RankRow {
  int rank = 0;
  std::vector<int64_t> held = {};     // at the end of the last step
  std::vector<int64_t> at_peak = {};  // when the total was highest
  int64_t peak = 0;
  int64_t peak_step = 0;  // in which that was
  int64_t mean_step_ns = 0;
  int64_t mean_wait_ns = 0;
};

std::vector<RankRow> rows_of(const Profile& profile);
// The one with the highest peak; ranks and steps of a profile without steps have none.
const RankProfile* rank_of_peak(const Profile& profile);
const StepProfile* step_of_peak(const RankProfile& rank, uint8_t account);
// Kinds of which any rank has bytes, in any account, by index.
std::vector<size_t> kinds_in_use(const Profile& profile);

// How one holder of the peak differs between two runs, by kind, owner and page. Blocks of both that were
// there before the steps are "before the recorded steps".
struct HolderDifference {
  std::string kind = {};
  std::string owner = {};
  std::string page = {};
  int64_t bytes = 0;
  int64_t other_bytes = 0;
};
// Differences between the ranks with the highest peaks, the largest first. Names and not numbers are compared, so the two
// need not have the same kinds.
std::vector<HolderDifference> difference(const Profile& profile, const Profile& other);

// The bytes of an account over a step, as its changes add up.
struct Moment {
  int64_t time_ns = 0;
  std::vector<int64_t> by_kind = {};
  int64_t total = 0;
  Change::Phase phase = Change::Phase::kOther;
};

// At the step's begin.
Moment begin_of(const StepProfile& step, uint8_t account);
// Calls visit(moment) at the begin and after each change of the account.
template <typename Visit>
void walk(const StepProfile& step, uint8_t account, Visit visit) {
  Moment moment = begin_of(step, account);
  visit(moment);
  for (const Change& change : step.changes) {
    if (change.account != account) continue;
    moment.time_ns = change.time_ns;
    moment.phase = change.phase;
    moment.by_kind[change.kind] += change.bytes;
    if (change.is_rename()) {
      moment.by_kind[change.kind_before] -= change.bytes;
    } else {
      moment.total += change.bytes;
    }
    visit(moment);
  }
}

// The first moment at which the total is highest.
Moment peak_of(const StepProfile& step, uint8_t account);

// At most `most` moments, in order: of each stretch of time the one whose total is highest, so that the
// peak is among them.
std::vector<Moment> sampled(const StepProfile& step, uint8_t account, size_t most);

// The owners of the bytes at the peak that were allocated within the step, the largest first.
struct Holder {
  uint8_t kind = 0;
  std::string owner = {};
  std::string page = {};
  int64_t bytes = 0;
  int64_t blocks = 0;
};
std::vector<Holder> holders_at_peak(const RankProfile& rank, const StepProfile& step,
                                    uint8_t account);

}  // namespace zeropage::profile
