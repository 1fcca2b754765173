#include "zeropage/world.h"

#include <algorithm>
#include <cstdio>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/version.h>

#include "comm/communicator_choice.h"
#include "comm/uncaught_error.h"
#include "comm/watch/store_calls.h"
#include "comm/watch/world_state.h"
#include "device/stream.h"
#include "memory/device_memory.h"
#include "memory/self_check.h"
#include "zeropage/check.h"
#include "zeropage/communicator.h"
#include "zeropage/device.h"
#include "zeropage/ledger.h"
#include "zeropage/simulation.h"

namespace zeropage::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks that cannot connect find out at about the same time.
constexpr auto kRollCall = std::chrono::seconds(2);
constexpr size_t kMostDifferences = 5;
// Before what a rank says of its device.
constexpr char kDevice = '+';
constexpr char kNoDevice = '-';

std::chrono::milliseconds left_until(Clock::time_point moment) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(moment - Clock::now());
  return std::max(left, std::chrono::milliseconds(1));
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// What rank `other` says differently from the first, a few lines of it; "" if nothing.
std::string difference(const std::string& first, const std::string& other_text, int first_name,
                       int other) {
  const auto lines = split_lines(first);
  const auto other_lines = split_lines(other_text);
  std::string report;
  size_t found = 0;
  for (size_t i = 0; i < std::max(lines.size(), other_lines.size()); ++i) {
    const std::string here = i < lines.size() ? lines[i] : "nothing";
    const std::string there = i < other_lines.size() ? other_lines[i] : "nothing";
    if (here == there) continue;
    if (++found <= kMostDifferences) {
      report += c10::str("\n  rank ", first_name, " has ", here, "; rank ", other, " has ", there);
    }
  }
  if (found > kMostDifferences) {
    report += c10::str("\n  and ", found - kMostDifferences, " more differences");
  }
  return report;
}

}  // namespace

World World::from_environment(const WorldOptions& options) {
  const Place place = read_place();
  if (place.world_size > 1) {
    memory::Ledger::process()->set_owner(c10::str("rank ", place.rank, "/", place.world_size));
    detail::say_uncaught_errors_shortly();
  }
  return {place, open_store(place, options.deadline), options};
}

int World::launch(int ranks, const std::function<int(World&)>& function,
                  const WorldOptions& options, const LaunchOptions& launch) {
  if (ranks == 1) {
    World alone({.local_rank = 0, .local_world_size = 1, .launcher = "none"},
                c10::make_intrusive<c10d::HashStore>(), options);
    return function(alone);
  }
  LaunchOptions adjusted = launch;
  adjusted.ranks = ranks;
  return launch_function(
      [&] {
        World world = from_environment(options);
        return function(world);
      },
      adjusted);
}

World::World(const Place& place, c10::intrusive_ptr<c10d::Store> store, const WorldOptions& options)
    : state_(std::make_shared<State>()) {
  memory::check_libtorch();
  state_->rank_thread.emplace();
  state_->place = place;
  state_->wishes = {.limits = {.deadline = options.deadline,
                               .busy_limit = options.busy_limit,
                               .report_interval = options.report_interval},
                    .transport = options.transport,
                    .reduction_order = options.reduction_order,
                    .begins_at_call = !device::has_streams(options.device) && !options.decorate,
                    .decorate = options.decorate};
  state_->deadline = options.deadline;
  state_->store =
      c10::make_intrusive<c10d::PrefixStore>("zeropage" + place.attempt, std::move(store));
  if (size() == 1) {
    state_->place.local_rank = 0;
    state_->place.local_world_size = 1;
    ZP_CHECK(options.transport != Transport::kNccl || options.device == c10::kCUDA,
             "NCCL was asked for, but this world is on ", c10::Device(options.device),
             "; set WorldOptions::device to c10::kCUDA");
    state_->hosts = {place.host};
    adopt(std::make_unique<SoloCommunicator>(choose_device(options.device)));
    return;
  }
  state_->group = std::make_shared<detail::WatchGroup>();
  state_->watched_store = detail::connect_again(state_->store);
  begin_texts();
  check_agreement("the world",
                  {c10::str("world size: ", size()), c10::str("LibTorch: ", TORCH_VERSION),
                   c10::str("deadline: ", options.deadline.count(), " ms"),
                   c10::str("busy limit: ", options.busy_limit.count(), " ms"),
                   c10::str("device: ", c10::Device(options.device)),
                   c10::str("communicator: ", name(options.transport)),
                   c10::str("order of reductions: ", name(options.reduction_order))});
  const std::string own_host = place.host.empty() ? host_identity() : place.host;
  state_->hosts = gather_text("hosts", own_host);
  const std::vector<std::string>& hosts = state_->hosts;
  if (place.local_rank < 0 || place.local_world_size < 0) {
    state_->place.local_rank =
        static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank(), own_host));
    state_->place.local_world_size =
        static_cast<int>(std::count(hosts.begin(), hosts.end(), own_host));
  }
  const c10::Device device = choose_device(options.device);
  state_->bind_address = address_for_peers(state_->place);
  connect(device);
}

// Collective.
void World::connect(c10::Device device) {
  const detail::CommunicatorWishes& wishes = state_->wishes;
  adopt(make_communicator(
      {.transport = wishes.transport,
       .reduction_order = wishes.reduction_order,
       .device = device,
       .rank = rank(),
       .size = size(),
       .hosts = state_->hosts,
       .deadline = wishes.limits.deadline,
       .watch = state_->watch,
       .store = state_->store,
       .watched_store = state_->watched_store,
       .store_server = state_->store_server(),
       .store_server_name = state_->store_server_name(),
       .names = state_->names,
       .says_what_is_slower = !state_->split_from,
       .bind_address = state_->bind_address,
       .gather_text = [this](const auto& topic,
                             const auto& text) { return gather_text(topic, text); },
       .fail_to_connect = [this](const std::exception& error) { fail_to_connect(error); }}));
}

// Nobody is waited for as busy before the watch starts, with the communicator.
void World::begin_texts() {
  state_->watch = std::make_shared<detail::Watch>(detail::Watch::Options{
      .store = c10::make_intrusive<c10d::PrefixStore>("watch", state_->watched_store),
      .rank = rank(),
      .size = size(),
      .store_server = state_->store_server(),
      .limits = state_->wishes.limits,
      .begins_at_call = state_->wishes.begins_at_call,
      .names = state_->names,
      .group = state_->group});
  state_->group->add(state_->watch);
  state_->begin_texts();
}

// Collective: where one rank has no such device, all end with its reason. The others learn which device
// it is otherwise.
c10::Device World::choose_device(c10::DeviceType type) {
  if (!device::has_streams(type)) {
    ZP_CHECK(type == c10::kCPU, "a world cannot be on ", c10::Device(type),
             "; set WorldOptions::device to c10::kCUDA or c10::kCPU");
    return type;
  }
  const int count = memory::device_count(type);
  const c10::Device device(type, static_cast<c10::DeviceIndex>(local_rank() % std::max(count, 1)));
  std::string obstacle = memory::obstacle_to(device);
  std::string own;
  try {
    if (obstacle.empty()) {
      memory::set_current_device(device);
      if (type == c10::kCUDA) memory::observe_cuda_memory();
      own = kDevice + memory::device_identity(device);
    }
  } catch (const std::exception& error) {
    obstacle = c10::str(device, ": ", memory::message_of(error));
  }
  const std::vector<std::string> of_ranks =
      gather_text("devices", obstacle.empty() ? own : kNoDevice + obstacle);
  ZP_CHECK(obstacle.empty(), obstacle);
  for (size_t other = 0; other < of_ranks.size(); ++other) {
    ZP_CHECK(of_ranks[other].front() != kNoDevice, "rank ", other,
             " has no device: ", of_ranks[other].substr(1));
  }
  state_->ranks_on_device = static_cast<int>(std::count(of_ranks.begin(), of_ranks.end(), own));
  return device;
}

// Gloo does not say whom it misses. Who still lives says so in the store.
void World::fail_to_connect(const std::exception& error) const {
  const std::string reason = memory::message_of(error);
  if (state_->texts->has_lost_store()) {
    ZP_THROW("connecting: ", detail::were_lost({state_->store_server_name()}));
  }
  const auto key = [](int rank) { return c10::str("unconnected/", rank); };
  const auto leave_at = Clock::now() + kRollCall;
  std::vector<int> missing;
  detail::ask_within(kRollCall, [store = state_->store, own = key(rank())] {
    detail::write_key(*store, own, "");
    return std::string();
  });
  for (int other = 0; other < size(); ++other) {
    if (!state_->texts->read(key(other), left_until(leave_at))) missing.push_back(other);
  }
  ZP_CHECK(missing.empty(), "connecting: ", detail::were_lost(state_->names.of(missing)));
  ZP_THROW("connecting: ", reason.substr(0, reason.find('\n')));
}

World World::simulated(const SimulationOptions& options) {
  auto communicator = std::make_unique<SimulatedCommunicator>(options);
  const Topology& topology = options.topology;
  auto state = std::make_shared<State>();
  state->place = {.rank = options.rank,
                  .world_size = topology.size(),
                  .local_rank = topology.index_in_host(options.rank),
                  .local_world_size =
                      static_cast<int>(topology.ranks_of(topology.host_of(options.rank)).size()),
                  .launcher = "none"};
  state->deadline = WorldOptions().deadline;
  state->communicator = std::move(communicator);
  return World(std::move(state));
}

void World::adopt(std::unique_ptr<Communicator> communicator) {
  communicator->where_ = state_->where;
  const auto& decorate = state_->wishes.decorate;
  state_->communicator = decorate ? decorate(std::move(communicator)) : std::move(communicator);
}

int World::rank() const {
  return state_->place.rank;
}
int World::size() const {
  return state_->place.world_size;
}
int World::local_rank() const {
  return state_->place.local_rank;
}
int World::local_size() const {
  return state_->place.local_world_size;
}
std::chrono::milliseconds World::deadline() const {
  return state_->deadline;
}
c10::Device World::device() const {
  return communicator().device();
}
int World::ranks_on_device() const {
  return state_->ranks_on_device;
}
Communicator& World::communicator() const {
  ZP_CHECK(state_->communicator != nullptr,
           "a world beside another has texts, and no communicator; use the other's");
  return *state_->communicator;
}

std::vector<std::string> World::gather_text(const std::string& topic,
                                            const std::string& text) const {
  if (!state_->store) return std::vector<std::string>(static_cast<size_t>(size()), text);
  if (size() == 1) return {text};
  return state_->texts->gather(topic, text);
}

void World::check_agreement(const std::string& topic, const std::vector<std::string>& lines) const {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  const std::string differing =
      settle_difference(topic, text, [this](const std::vector<std::string>& texts) {
        const detail::RankNames& names = state_->names;
        for (size_t other = 1; other < texts.size(); ++other) {
          std::string found =
              difference(texts.front(), texts[other], names[0], names[static_cast<int>(other)]);
          if (!found.empty()) return found;
        }
        return std::string();
      });
  ZP_CHECK(differing.empty(), topic, " differs between ranks; make it the same on all:", differing);
}

std::string World::settle(const std::string& topic, const std::string& text,
                          const Decide& decide) const {
  if (size() == 1 || !state_->store) return decide({text});
  return state_->texts->settle(topic, text, decide);
}

std::string World::settle_difference(const std::string& topic, const std::string& text,
                                     const Decide& decide) const {
  if (size() == 1 || !state_->store) return "";
  return state_->texts->settle_difference(topic, text, decide);
}

int World::modules() const {
  return state_->modules;
}

void World::add_module() const {
  ++state_->modules;
}

World World::beside(const std::string& name, std::chrono::milliseconds deadline) const {
  auto state = std::make_shared<State>();
  state->split_from = state_->split_from;
  state->where = state_->where;
  state->names = state_->names;
  state->place = state_->place;
  state->deadline = deadline;
  state->ranks_on_device = state_->ranks_on_device;
  state->beside = state_;
  if (state_->store) {
    const uint64_t round = state_->texts ? state_->texts->next_round() : 0;
    state->store = c10::make_intrusive<c10d::PrefixStore>(c10::str("beside/", round, "/", name),
                                                          state_->store);
    if (state_->texts) state->begin_texts();
  }
  return World(std::move(state));
}

}  // namespace zeropage::comm
