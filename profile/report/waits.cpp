#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <utility>

#include "zeropage/bytes.h"
#include "zeropage/profile.h"

namespace zeropage::profile {
namespace {

constexpr size_t kMostSentences = 5;
// Shorter ones are no reason to change anything.
constexpr double kLeastShare = 0.005;
// A page that is asked for by who needs it is waited for at once.
constexpr int64_t kAtOnceNs = 1'000'000;

// When the fetch of a page began that ended last before `time_ns`, or is on its way then.
int64_t fetch_before(const StepProfile& step, NameIndex page, int64_t time_ns) {
  int64_t found = -1;
  for (const PageRecord& record : step.pages) {
    if (record.time_ns > time_ns) break;
    if (record.page == page && record.what == PageRecord::What::kFetching) found = record.time_ns;
  }
  return found;
}

int64_t bytes_of(const StepProfile& step, NameIndex page) {
  for (const PageRecord& record : step.pages) {
    if (record.page == page && record.bytes > 0) return record.bytes;
  }
  return 0;
}

std::string share_of(int64_t part, int64_t whole) {
  std::array<char, 16> text{};
  std::snprintf(
      text.data(), text.size(), "%.0f %%",
      100.0 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1)));
  return text.data();
}

std::string remedy(const Wait& wait) {
  if (wait.name == "page") {
    const std::string bytes = memory::format_bytes(wait.page_bytes);
    if (wait.faults == wait.times) {
      return "nothing had asked for it before an operator needed it, as for a step's first page, "
             "or "
             "where the order of pages changed";
    }
    return "it was on its way: one page more of prefetch (options.prefetch_bytes) needs " + bytes;
  }
  if (wait.name == "reduction") {
    return "its gradient was still travelling when its bucket was needed or backward ended; a "
           "faster link or a smaller reduce_dtype shortens that";
  }
  if (wait.name == "offloaded step") {
    return "its update away from the device had not ended; StepWhen::kInBackward begins it "
           "earlier, and more threads or a faster disk shorten it";
  }
  if (wait.name == "updated parameters") {
    return "the gather of what the ranks updated; at stage 3 pages come when they are used "
           "instead";
  }
  return {};
}

std::string sentence(const Wait& wait, int64_t step_ns) {
  std::string what = wait.name == "page"        ? "page \"" + wait.of + "\""
                     : wait.name == "reduction" ? "the gradient of page \"" + wait.of + "\""
                     : wait.name.empty()        ? std::string("other ranks or tiers")
                     : wait.of.empty()          ? wait.name
                                                : wait.name + " of page \"" + wait.of + "\"";
  std::string text = format_ns(wait.wait_ns) + " of " + format_ns(step_ns) + " waiting for " + what;
  if (wait.times > 1) text += ", " + std::to_string(wait.times) + " times";
  const std::string why = remedy(wait);
  return why.empty() ? text : text + ": " + why;
}

}  // namespace

std::string format_ns(int64_t nanoseconds) {
  std::array<char, 32> text{};
  const double milliseconds = static_cast<double>(nanoseconds) / 1e6;
  const char* format = milliseconds >= 10 ? "%.0f ms" : milliseconds >= 1 ? "%.1f ms" : "%.2f ms";
  if (milliseconds >= 10'000) {
    std::snprintf(text.data(), text.size(), "%.1f s", milliseconds / 1e3);
  } else {
    std::snprintf(text.data(), text.size(), format, milliseconds);
  }
  return text.data();
}

std::vector<Wait> waits_of(const RankProfile& rank, const StepProfile& step) {
  std::map<std::pair<NameIndex, NameIndex>, Wait> sums;
  int64_t end_ns = 0;  // of what was counted; a wait within another is part of it
  std::vector<SpanRecord> spans;
  for (const SpanRecord& span : step.spans) {
    if (span.what == SpanRecord::What::kWait && span.on_training_thread) spans.push_back(span);
  }
  std::stable_sort(spans.begin(), spans.end(), [](const SpanRecord& a, const SpanRecord& b) {
    return a.begin_ns < b.begin_ns;
  });
  for (const SpanRecord& span : spans) {
    const int64_t begin_ns = std::max(span.begin_ns, end_ns);
    if (span.end_ns <= begin_ns) continue;
    end_ns = span.end_ns;
    Wait& wait = sums[{span.name, span.of}];
    wait.name = rank.names[span.name];
    wait.of = rank.names[span.of];
    wait.wait_ns += span.end_ns - begin_ns;
    ++wait.times;
    if (wait.name != "page") continue;
    wait.page_bytes = bytes_of(step, span.of);
    const int64_t fetch_ns = fetch_before(step, span.of, span.begin_ns);
    if (fetch_ns >= 0 && span.begin_ns - fetch_ns < kAtOnceNs) ++wait.faults;
  }
  std::vector<Wait> waits;
  for (auto& [key, wait] : sums) waits.push_back(std::move(wait));
  std::stable_sort(waits.begin(), waits.end(),
                   [](const Wait& a, const Wait& b) { return a.wait_ns > b.wait_ns; });
  return waits;
}

int64_t waited_ns(const std::vector<Wait>& waits) {
  int64_t sum = 0;
  for (const Wait& wait : waits) sum += wait.wait_ns;
  return sum;
}

std::vector<std::string> wait_sentences(const RankProfile& rank, const StepProfile& step) {
  const std::vector<Wait> waits = waits_of(rank, step);
  const int64_t all_ns = waited_ns(waits);
  std::vector<std::string> sentences;
  const std::string who =
      "Step " + std::to_string(step.step) + " of rank " + std::to_string(rank.rank);
  if (all_ns == 0) {
    sentences.push_back(who + ": " + format_ns(step.duration_ns) +
                        ", in which its training thread never waited");
    return sentences;
  }
  sentences.push_back(who + ": its training thread waited for " + format_ns(all_ns) + " of " +
                      format_ns(step.duration_ns) + ", " + share_of(all_ns, step.duration_ns));
  for (const Wait& wait : waits) {
    const bool is_short =
        static_cast<double>(wait.wait_ns) < kLeastShare * static_cast<double>(step.duration_ns);
    if (is_short || sentences.size() > kMostSentences) break;
    sentences.push_back(sentence(wait, step.duration_ns));
  }
  return sentences;
}

}  // namespace zeropage::profile
