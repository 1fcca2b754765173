// Worlds of some of a world's ranks.
#include <algorithm>
#include <charconv>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/watch/world_state.h"
#include "zeropage/check.h"
#include "zeropage/communicator.h"
#include "zeropage/simulation.h"
#include "zeropage/world.h"

namespace zeropage::comm {
namespace {

constexpr std::string_view kSplit = "split ";

struct Choice {
  int64_t color = 0;
  int64_t key = 0;

  std::string to_text() const { return c10::str(kSplit, color, " ", key); }
  // rank: who wrote the text.
  static Choice parse(std::string_view text, int rank) {
    Choice choice;
    const char* const end = text.data() + text.size();
    bool is_fine = text.starts_with(kSplit);
    if (is_fine) {
      const auto color = std::from_chars(text.data() + kSplit.size(), end, choice.color);
      const auto key = std::from_chars(std::min(color.ptr + 1, end), end, choice.key);
      is_fine = color.ec == std::errc() && key.ec == std::errc() && key.ptr == end;
    }
    ZP_CHECK(is_fine, "World::split: rank ", rank, " does something else, and wrote \"", text,
             "\"; all ranks must call it at the same point");
    return choice;
  }
};

// The same rank among fewer. What fails in the whole world is not scripted for its parts.
SimulationOptions among(const SimulationOptions& whole, const std::vector<int>& ranks, int rank) {
  std::vector<int> hosts;
  for (const int member : ranks) hosts.push_back(whole.topology.host_of(member));
  SimulationOptions part = whole;
  part.rank = rank;
  part.topology = Topology(hosts);
  part.failures.clear();
  return part;
}

}  // namespace

World World::split(int64_t color, int64_t key) const {
  const std::vector<std::string> texts = gather_text("a split", Choice{color, key}.to_text());
  std::vector<std::pair<int64_t, int>> members;  // key, rank
  for (int other = 0; other < size(); ++other) {
    const Choice choice = Choice::parse(texts[static_cast<size_t>(other)], global_rank(other));
    if (choice.color == color) members.emplace_back(choice.key, other);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [unused, member] : members) ranks.push_back(member);
  return subset(ranks, c10::str(state_->where, " within colour ", color));
}

const std::string& World::where() const {
  return state_->where;
}

int World::global_rank(int rank) const {
  ZP_CHECK(rank >= 0 && rank < size(), "World::global_rank: there is no rank ", rank,
           " in a world of ", size(), state_->where);
  return state_->names[rank];
}

// ranks: of this world, this one among them, and the same on all of them. Every rank of this world calls it
// at the same point, each with its own part. Collective over `ranks`.
World World::subset(const std::vector<int>& ranks, const std::string& where) const {
  const State& whole = *state_;
  ZP_CHECK(!whole.beside, "a world beside another has texts alone; split the other");
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  TORCH_INTERNAL_ASSERT(own != ranks.end());
  auto state = std::make_shared<State>();
  state->split_from = state_;
  state->where = where;
  state->names = detail::RankNames(whole.names.of(ranks));
  state->wishes = whole.wishes;
  state->deadline = whole.deadline;
  state->bind_address = whole.bind_address;
  state->group = whole.group;
  state->ranks_on_device = whole.ranks_on_device;
  state->place = whole.place;
  state->place.rank = static_cast<int>(own - ranks.begin());
  state->place.world_size = static_cast<int>(ranks.size());
  World part(state);
  if (!whole.store) {
    auto simulated = std::make_unique<SimulatedCommunicator>(
        among(SimulatedCommunicator::of(communicator()).options(), ranks, part.rank()));
    const Topology& topology = simulated->options().topology;
    const int host = topology.host_of(part.rank());
    state->place.local_rank = topology.index_in_host(part.rank());
    state->place.local_world_size = static_cast<int>(topology.ranks_of(host).size());
    part.adopt(std::move(simulated));
    return part;
  }
  const uint64_t round = whole.texts ? whole.texts->next_round() : 0;
  const std::string prefix = c10::str("split/", round, "/", ranks.front());
  state->store = c10::make_intrusive<c10d::PrefixStore>(prefix, whole.store);
  state->watched_store = c10::make_intrusive<c10d::PrefixStore>(prefix, whole.watched_store);
  for (const int member : ranks) state->hosts.push_back(whole.hosts[static_cast<size_t>(member)]);
  const auto& hosts = state->hosts;
  const std::string& host = hosts[static_cast<size_t>(part.rank())];
  state->place.local_rank =
      static_cast<int>(std::count(hosts.begin(), hosts.begin() + part.rank(), host));
  state->place.local_world_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), host));
  if (part.size() == 1) {
    part.adopt(std::make_unique<SoloCommunicator>(device()));
  } else {
    part.begin_texts();
    part.connect(device());
  }
  return part;
}

}  // namespace zeropage::comm
