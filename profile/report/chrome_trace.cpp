#include "profile/report/chrome_trace.h"

#include <map>

#include <nlohmann/json.hpp>

#include "profile/report/page_lanes.h"
#include "zeropage/profile.h"

namespace zeropage::profile {
namespace {

using Json = nlohmann::json;

// More are no curve any more, and Perfetto takes long to read them.
constexpr size_t kMostMoments = 4000;
constexpr const char* kTracks[] = {"code", "collectives", "copies", "waits"};
constexpr int kFirstPageTrack = 16;

class Trace {
 public:
  explicit Trace(const Profile& profile) : profile_(profile) {}

  void add(const RankProfile& rank) {
    process_ = rank.rank;
    name("process_name", 0, "rank " + std::to_string(rank.rank));
    for (int track = 0; track < 4; ++track) name("thread_name", track, kTracks[track]);
    std::map<std::string, int> tracks;
    int64_t begin_ns = 0;
    for (const StepProfile& step : rank.steps) {
      slice(0, "step " + std::to_string(step.step), begin_ns, step.duration_ns, {});
      add_spans(rank, step, begin_ns);
      for (const PageLane& lane : page_lanes(rank, step)) add_lane(lane, begin_ns, tracks);
      add_counters(step, begin_ns);
      begin_ns += step.duration_ns;
    }
  }

  std::string text() const {
    const Json trace = {{"traceEvents", events_}, {"displayTimeUnit", "ms"}};
    return trace.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }

 private:
  static double microseconds(int64_t ns) { return static_cast<double>(ns) / 1e3; }

  void name(const char* what, int track, const std::string& value) {
    events_.push_back({{"ph", "M"},
                       {"name", what},
                       {"pid", process_},
                       {"tid", track},
                       {"args", {{"name", value}}}});
  }

  void slice(int track, const std::string& title, int64_t begin_ns, int64_t ns, Json arguments) {
    Json event = {{"ph", "X"},
                  {"name", title},
                  {"pid", process_},
                  {"tid", track},
                  {"ts", microseconds(begin_ns)},
                  {"dur", microseconds(ns)}};
    if (!arguments.empty()) event["args"] = std::move(arguments);
    events_.push_back(std::move(event));
  }

  void add_spans(const RankProfile& rank, const StepProfile& step, int64_t begin_ns) {
    for (const SpanRecord& span : step.spans) {
      Json arguments = Json::object();
      if (span.of != 0) arguments["of"] = rank.names[span.of];
      if (span.bytes > 0) arguments["bytes"] = span.bytes;
      const std::string title = rank.names[span.name].empty() ? "wait" : rank.names[span.name];
      slice(static_cast<int>(span.what), title, begin_ns + span.begin_ns,
            span.end_ns - span.begin_ns, std::move(arguments));
    }
  }

  void add_lane(const PageLane& lane, int64_t begin_ns, std::map<std::string, int>& tracks) {
    const auto track =
        tracks.try_emplace(lane.page, kFirstPageTrack + static_cast<int>(tracks.size()));
    if (track.second) name("thread_name", track.first->second, "page " + lane.page);
    for (const PageStretch& stretch : lane.stretches) {
      if (stretch.state == PageState::kSharded) continue;
      slice(track.first->second, profile::name(stretch.state), begin_ns + stretch.begin_ns,
            stretch.end_ns - stretch.begin_ns, {});
    }
  }

  void add_counters(const StepProfile& step, int64_t begin_ns) {
    for (size_t account = 0; account < profile_.accounts.size(); ++account) {
      const auto moments = sampled(step, static_cast<uint8_t>(account), kMostMoments);
      if (moments.size() == 1 && moments.front().total == 0) continue;
      for (const Moment& moment : moments) {
        Json bytes = Json::object();
        for (size_t kind = 0; kind < moment.by_kind.size(); ++kind) {
          if (moment.by_kind[kind] != 0) bytes[profile_.kinds[kind]] = moment.by_kind[kind];
        }
        events_.push_back({{"ph", "C"},
                           {"name", "bytes on the " + profile_.accounts[account]},
                           {"pid", process_},
                           {"ts", microseconds(begin_ns + moment.time_ns)},
                           {"args", std::move(bytes)}});
      }
    }
  }

  const Profile& profile_;
  int process_ = 0;
  Json events_ = Json::array();
};

}  // namespace

std::string chrome_trace(const Profile& profile) {
  Trace trace(profile);
  for (const RankProfile& rank : profile.ranks) trace.add(rank);
  return trace.text();
}

}  // namespace zeropage::profile
