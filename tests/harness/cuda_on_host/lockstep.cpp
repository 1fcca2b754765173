#include "tests/harness/cuda_on_host/lockstep.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <ucontext.h>
#include <vector>

namespace zeropage::testing::lockstep {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;

enum class State : uint8_t { kReady, kAtBarrier, kAmongLanes, kEnded };

struct Thread {
  ucontext_t context;
  std::unique_ptr<std::byte[]> stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
  State state = State::kReady;
  const char* name = "";  // of what it waits in
  uint32_t mask = 0;
  uint64_t given = 0;
  Lanes taken = {};
};

bool meet_in_one(const Thread& one, const Thread& other) {
  return one.state == other.state && one.mask == other.mask && !std::strcmp(one.name, other.name);
}

class Runner {
 public:
  void run(const Grid& grid, const std::function<void()>& body) {
    grid_ = grid;
    body_ = &body;
    error_ = nullptr;
    while (threads_.size() < grid.threads) threads_.emplace_back();
    for (unsigned i = 0; i < grid.blocks; ++i) {
      place_.block.x = in_order(i, grid.blocks);
      run_block();
    }
  }

  const Place& place() const { return place_; }

  // Lets the thread that runs wait until the others of the meeting are there.
  const Lanes& wait(State state, const char* name, uint32_t mask, uint64_t given) {
    Thread& self = threads_[place_.thread.x];
    self.state = state;
    self.name = name;
    self.mask = mask;
    self.given = given;
    swapcontext(&self.context, &scheduler_);
    return self.taken;
  }

 private:
  unsigned in_order(unsigned i, unsigned count) const {
    return grid_.order == Order::kForward ? i : count - 1 - i;
  }

  void run_block() {
    for (unsigned thread = 0; thread < grid_.threads; ++thread) begin(threads_[thread]);
    while (run_those_ready()) {
      release_barrier();
      for (unsigned first = 0; first < grid_.threads; first += kWarp) release_lanes(first);
    }
    // Lanes first: what their warp waits for keeps it from the block's barrier too.
    for (const State state : {State::kAmongLanes, State::kAtBarrier}) {
      for (unsigned thread = 0; thread < grid_.threads; ++thread) {
        if (threads_[thread].state == state) throw std::logic_error(divergence(thread));
      }
    }
  }

  void begin(Thread& thread) {
    thread.state = State::kReady;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &scheduler_;
    makecontext(&thread.context, &Runner::run_thread, 0);
  }

  // Begins on the fiber's own stack; its end goes on in the scheduler.
  static void run_thread();

  bool run_those_ready() {
    bool any = false;
    for (unsigned i = 0; i < grid_.threads; ++i) {
      place_.thread.x = in_order(i, grid_.threads);
      Thread& thread = threads_[place_.thread.x];
      if (thread.state != State::kReady) continue;
      any = true;
      swapcontext(&scheduler_, &thread.context);
      if (error_ != nullptr) std::rethrow_exception(error_);
    }
    return any;
  }

  void release_barrier() {
    const auto end = threads_.begin() + grid_.threads;
    const auto waits = [](const Thread& thread) { return thread.state == State::kAtBarrier; };
    if (!std::all_of(threads_.begin(), end, waits)) return;
    std::for_each(threads_.begin(), end, [](Thread& thread) { thread.state = State::kReady; });
  }

  // Releases the lanes of the warp whose first thread that is.
  void release_lanes(unsigned first) {
    for (unsigned thread = first; thread < std::min(first + kWarp, grid_.threads); ++thread) {
      const Thread& waiting = threads_[thread];
      if (waiting.state != State::kAmongLanes || missed_by(thread) != kNobody) continue;
      const uint32_t mask = waiting.mask;
      Lanes given = {};
      for_each_lane(mask, [&](unsigned lane) { given[lane] = threads_[first + lane].given; });
      for_each_lane(mask, [&](unsigned lane) {
        threads_[first + lane].taken = given;
        threads_[first + lane].state = State::kReady;
      });
    }
  }

  template <typename Visit>
  static void for_each_lane(uint32_t mask, Visit visit) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1U) != 0) visit(lane);
    }
  }

  static constexpr unsigned kNobody = ~0U;

  // The first thread that is not where that one waits for it.
  unsigned missed_by(unsigned thread) const {
    const Thread& waiting = threads_[thread];
    if (waiting.state == State::kAtBarrier) {
      for (unsigned other = 0; other < grid_.threads; ++other) {
        if (threads_[other].state != State::kAtBarrier) return other;
      }
      return kNobody;
    }
    unsigned missed = kNobody;
    for_each_lane(waiting.mask, [&](unsigned lane) {
      const unsigned other = thread / kWarp * kWarp + lane;
      const bool there = other < grid_.threads && meet_in_one(waiting, threads_[other]);
      if (!there && missed == kNobody) missed = other;
    });
    return missed;
  }

  std::string divergence(unsigned thread) const {
    const unsigned other = missed_by(thread);
    std::string words = "block " + std::to_string(place_.block.x) + ": thread " +
                        std::to_string(thread) + " waits in " + described(threads_[thread]) +
                        " for thread " + std::to_string(other) + ", which ";
    if (other >= grid_.threads) return words + "the block does not have";
    if (threads_[other].state == State::kEnded) return words + "has ended";
    return words + "waits in " + described(threads_[other]);
  }

  static std::string described(const Thread& thread) {
    if (thread.state != State::kAmongLanes) return thread.name;
    return thread.name + std::string(" of mask ") + std::to_string(thread.mask);
  }

  Grid grid_;
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr error_;
  Place place_;
  ucontext_t scheduler_;
  std::vector<Thread> threads_;
};

Runner& runner() {
  static Runner one;
  return one;
}

void Runner::run_thread() {
  Runner& self = runner();
  try {
    (*self.body_)();
  } catch (...) {
    self.error_ = std::current_exception();
  }
  self.threads_[self.place_.thread.x].state = State::kEnded;
}

std::string thread_at(const char* name) {
  return "block " + std::to_string(here().block.x) + ": thread " + std::to_string(here().thread.x) +
         " in " + name + ": ";
}

}  // namespace

const Place& here() {
  return runner().place();
}

void run_grid(const Grid& grid, const std::function<void()>& body) {
  runner().run(grid, body);
}

void meet_block(const char* name) {
  runner().wait(State::kAtBarrier, name, 0, 0);
}

Lanes meet_lanes(const char* name, uint32_t mask, uint64_t mine) {
  if ((mask >> here().lane() & 1U) == 0) {
    throw std::logic_error(thread_at(name) + "its mask " + std::to_string(mask) +
                           " does not have its own lane");
  }
  return runner().wait(State::kAmongLanes, name, mask, mine);
}

uint64_t take_from(const char* name, uint32_t mask, uint64_t mine, unsigned source) {
  if ((mask >> source & 1U) == 0) {
    throw std::logic_error(thread_at(name) + "it reads lane " + std::to_string(source) +
                           ", which its mask " + std::to_string(mask) + " does not have");
  }
  return meet_lanes(name, mask, mine)[source];
}

}  // namespace zeropage::testing::lockstep
