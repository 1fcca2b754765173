// A rank's place among ranks that their launcher starts again (launcher/generations.h).
//
// Threads: the rank's one. Throws: where there is no launcher's memory under the variable, and what World throws.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/launcher/generations.h"
#include "zeropage/world.h"

namespace zeropage::comm {

// What lies around a rank that is a process. Ranks of a simulated cluster are threads, and have other ones (tests/simulated/).
struct Surroundings {
  // Where the ranks of a generation meet.
  std::function<c10::intrusive_ptr<c10d::Store>(const Place& place,
                                                std::chrono::milliseconds deadline)>
      open_store = comm::open_store;
  // Called before each word to the launcher, and again and again while this rank waits for one, or for other ranks' texts. What it throws
  // ends the rank: it tells the launcher nothing more, as a process that is killed. Default: nothing is called.
  std::function<void()> before_word = {};
};

class Membership {
 public:
  // Null where the launcher starts no rank again, or there is none.
  static std::unique_ptr<Membership> from_environment();

  Membership(Place place, detail::Generations generations, Surroundings surroundings = {});

  // Meets the others in the newest generation. Throws where one of them ends meanwhile.
  World join(const WorldOptions& options);
  // Whether somebody still has that world.
  bool world_lives() const { return !met_.expired(); }
  // After the error `words`, when all that was of that world is gone. out_of_memory: the error was that. Waits until there is a newer
  // generation; false: there will be none.
  bool leave(const std::string& words, bool out_of_memory);

  // Training has ended on all ranks: who ends from here on is not started again.
  void finish();

  // Behind the first generation: why each began, the oldest first.
  std::vector<detail::GenerationBegin> restarts() const;
  // By generation, from the first on: the rank whose memory did not suffice; -1: none. As long as the generation that was joined is
  // far; the same on all ranks once they have met in it.
  std::vector<int> out_of_memory() const;
  // Training goes on behind that step, in the generation that was joined.
  void note_resume(int64_t step);
  const Place& place() const { return place_; }

 private:
  void before_word() const;

  const Place place_;
  const Surroundings surroundings_;
  // What a world keeps of it may outlive this.
  const std::shared_ptr<detail::Generations> generations_;
  int joined_ = -1;
  std::weak_ptr<detail::WorldState> met_;
};

}  // namespace zeropage::comm
