// The threads of a CUDA block as fibers of one host thread, in a fixed order. A fiber runs until it
// waits for others, at a barrier or in an exchange with lanes of its warp, or ends. When none can
// run and some wait, a thread missed what another waits in: run_grid throws and names both.
//
// Deterministic, and no proof that a barrier is there: run a kernel in both orders, since what is
// read before it was written in one of them is right in the other. Not for several host threads.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

namespace zeropage::testing::lockstep {

inline constexpr int kWarp = 32;

// The order of the blocks of a grid, and of the threads of a block between two barriers.
enum class Order : uint8_t { kForward, kBackward };

// What each lane of a warp gave; 0 for lanes outside of the mask.
using Lanes = std::array<uint64_t, kWarp>;

struct Grid {
  unsigned blocks = 1;
  unsigned threads = 1;  // of a block
  Order order = Order::kForward;
};

struct Along {
  unsigned x = 0;
};

// The place of the thread that runs.
struct Place {
  Along block;
  Along thread;

  unsigned lane() const { return thread.x % kWarp; }
};
const Place& here();

// Calls body() as each thread of the grid. Rethrows what it throws; the other threads are dropped.
void run_grid(const Grid& grid, const std::function<void()>& body);

// For body() alone. All threads of the block meet there; those of a mask, and what they give.
// `name` is the meeting's in errors. Throws where the thread is not of its own mask.
void meet_block(const char* name);
Lanes meet_lanes(const char* name, uint32_t mask, uint64_t mine);

// The same where each takes what `source` gave. Throws where that lane is not of the mask.
uint64_t take_from(const char* name, uint32_t mask, uint64_t mine, unsigned source);

}  // namespace zeropage::testing::lockstep
