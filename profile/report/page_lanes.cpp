#include "profile/report/page_lanes.h"

#include <algorithm>
#include <map>
#include <utility>

namespace zeropage::profile {
namespace {

struct Building {
  PageLane lane;
  PageState state = PageState::kResident;
  int64_t since_ns = 0;
  bool has_moved = false;  // its parameters came or went
  int64_t reducing_since_ns = -1;

  void close(int64_t now_ns) {
    if (now_ns > since_ns) lane.stretches.push_back({state, since_ns, now_ns});
    since_ns = now_ns;
  }
  void enter(PageState next, int64_t now_ns) {
    close(now_ns);
    state = next;
  }
};

class Lanes {
 public:
  Lanes(const RankProfile& rank, const StepProfile& step) : rank_(rank), step_(step) {}

  std::vector<PageLane> build() {
    for (const PageRecord& record : step_.pages) follow(record);
    std::vector<PageLane> lanes;
    for (Building& building : lanes_) {
      building.close(step_.duration_ns);
      end_reduction(building, step_.duration_ns);
      lanes.push_back(std::move(building.lane));
    }
    return lanes;
  }

 private:
  Building& at(NameIndex page) {
    const auto known = index_.find(page);
    if (known != index_.end()) return lanes_[known->second];
    index_[page] = lanes_.size();
    lanes_.push_back({});
    lanes_.back().lane.page = rank_.names[page];
    return lanes_.back();
  }

  // Before the first change of its parameters the page was what that change left behind.
  PageState before(const PageRecord& record) const {
    const auto& resident = step_.resident;
    if (std::find(resident.begin(), resident.end(), record.page) != resident.end()) {
      return PageState::kResident;
    }
    if (record.what == PageRecord::What::kEvicted) return PageState::kResident;
    return record.what == PageRecord::What::kResident ? PageState::kFetching : PageState::kSharded;
  }

  static void end_reduction(Building& building, int64_t now_ns) {
    const int64_t since_ns = std::exchange(building.reducing_since_ns, -1);
    if (since_ns >= 0) {
      building.lane.stretches.push_back({PageState::kReducing, since_ns, now_ns});
    }
  }

  void follow(const PageRecord& record) {
    using What = PageRecord::What;
    const bool is_gradient = rank_.names[record.pages] != "parameter";
    if (is_gradient && record.what != What::kReducing && record.what != What::kReduced) return;
    Building& building = at(record.page);
    building.lane.bytes = std::max(building.lane.bytes, record.bytes);
    const int64_t now_ns = std::clamp<int64_t>(record.time_ns, 0, step_.duration_ns);
    if (record.what == What::kReducing) {
      building.reducing_since_ns = now_ns;
      return;
    }
    if (record.what == What::kReduced) return end_reduction(building, now_ns);
    if (!std::exchange(building.has_moved, true)) building.state = before(record);
    building.enter(record.what == What::kFetching   ? PageState::kFetching
                   : record.what == What::kResident ? PageState::kResident
                                                    : PageState::kSharded,
                   now_ns);
  }

  const RankProfile& rank_;
  const StepProfile& step_;
  std::map<NameIndex, size_t> index_;
  std::vector<Building> lanes_;
};

}  // namespace

const char* name(PageState state) {
  constexpr const char* kNames[] = {"sharded", "fetching", "resident", "reducing"};
  return kNames[static_cast<size_t>(state)];
}

std::vector<PageLane> page_lanes(const RankProfile& rank, const StepProfile& step) {
  return Lanes(rank, step).build();
}

}  // namespace zeropage::profile
