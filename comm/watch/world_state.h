// What the handles of one world share. For comm/world*.cpp alone.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/rank_threads.h"
#include "comm/detail/rank_names.h"
#include "comm/watch/text_rounds.h"
#include "comm/watch/watch.h"
#include "comm/watch/watch_group.h"
#include "zeropage/communicator.h"
#include "zeropage/world.h"

namespace zeropage::comm::detail {

// What WorldOptions ask of a communicator, for worlds that are split from this one.
struct CommunicatorWishes {
  WaitLimits limits;
  Transport transport = Transport::kAuto;
  ReductionOrder reduction_order = ReductionOrder::kFast;
  bool begins_at_call = false;  // Watch::Options
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> decorate;
};

struct WorldState {
  std::shared_ptr<WorldState> split_from;  // whose store and watch it uses; null: it was not
  std::string where;                       // " along \"data\""; "": everywhere
  RankNames names;
  CommunicatorWishes wishes;
  Place place;
  std::vector<std::string> hosts;  // by rank
  std::string bind_address;
  std::chrono::milliseconds deadline{};
  c10::intrusive_ptr<c10d::Store> store;  // null in a simulated world
  // The same keys over a second connection, one for all worlds of a process: for watches, which wait behind no other call.
  c10::intrusive_ptr<c10d::Store> watched_store;
  std::unique_ptr<TextRounds> texts;  // null where there are no others
  std::shared_ptr<Watch> watch;
  std::shared_ptr<WatchGroup> group;
  int ranks_on_device = 1;
  int modules = 0;  // World::modules()
  std::optional<base::RankThread>
      rank_thread;  // none in a simulated world, and in one that was split
  std::unique_ptr<Communicator> communicator;
  std::shared_ptr<WorldState> beside;  // whose ranks these are; null: their own

  WorldState() = default;
  // What was begun here ends first, unless an exception is on its way: the gather for a next pass, say, which nobody waits for when a
  // model goes. The store ends with the rank that serves it: the others first read what they were told last.
  ~WorldState();
  WorldState(const WorldState&) = delete;
  WorldState& operator=(const WorldState&) = delete;

  // The world that all others were split from.
  const WorldState& root() const { return split_from ? split_from->root() : *this; }

  // What the rank is called that serves the store; -1: none does.
  int store_server_name() const {
    const Place& first = root().place;
    return first.launcher_serves_store || !first.rendezvous_file.empty() ? -1 : 0;
  }
  // The rank that serves the store; -1: none of these.
  int store_server() const {
    const int name = store_server_name();
    return name < 0 ? -1 : names.find(name, place.world_size);
  }
  // What ranks are called that nobody needs to wait for any longer.
  std::vector<int> lost_ranks() const;
  void begin_texts();
};

}  // namespace zeropage::comm::detail
