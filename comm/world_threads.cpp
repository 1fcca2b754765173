// Ranks as threads of this process.
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/watch/rank_failure.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"
#include "zeropage/world.h"

namespace zeropage::comm {
namespace {

// What ranks threw, and who was first.
class Failures {
 public:
  explicit Failures(int ranks) { errors_.resize(static_cast<size_t>(ranks)); }

  // The exception that is being handled.
  void note(int rank) {
    const std::lock_guard lock(mutex_);
    errors_[static_cast<size_t>(rank)] = std::current_exception();
    if (first_ < 0) first_ = rank;
  }
  void rethrow() {
    if (first_ >= 0) throw RanksFailed(first_, std::move(errors_));
  }

 private:
  std::mutex mutex_;
  std::vector<std::exception_ptr> errors_;
  int first_ = -1;
};

}  // namespace

void World::threads(int ranks, const std::function<void(World&)>& function,
                    const WorldOptions& options, const ThreadsOptions& threads) {
  ZP_CHECK(ranks >= 1, "World::threads: expected 1 rank or more, got ", ranks);
  ZP_CHECK(threads.hosts.empty() || threads.hosts.size() == static_cast<size_t>(ranks),
           "World::threads: expected ThreadsOptions::hosts of ", ranks, " ranks, got ",
           threads.hosts.size(), "; give one a rank, or none");
  ZP_CHECK(threads.threads_per_rank >= 1,
           "World::threads: expected ThreadsOptions::threads_per_rank of 1 or more, got ",
           threads.threads_per_rank);
  const bool on_one_host = threads.hosts.empty();
  // Threads cannot share an accelerator, so each rank has its own, whatever the hosts are called.
  const bool numbers_all = on_one_host || options.device != c10::kCPU;
  const c10::intrusive_ptr<c10d::Store> shared = c10::make_intrusive<c10d::HashStore>();
  Failures failures(ranks);
  const auto run = [&](int rank) {
    const memory::LedgerScope ledger(
        std::make_shared<memory::Ledger>(c10::str("rank ", rank, "/", ranks)));
    at::set_num_threads(threads.threads_per_rank);
    try {
      World world({.rank = rank,
                   .world_size = ranks,
                   .local_rank = numbers_all ? rank : -1,
                   .local_world_size = numbers_all ? ranks : -1,
                   .host = on_one_host ? "" : threads.hosts[static_cast<size_t>(rank)],
                   .launcher = "threads"},
                  threads.store ? threads.store(rank) : shared, options);
      // Noted before the world closes, which the other ranks notice and throw for.
      try {
        function(world);
        // Leaving early would look like a lost rank to the others.
        world.communicator().barrier("the end of World::threads").wait();
      } catch (...) {
        failures.note(rank);
        if (const auto watch = world.communicator().watch()) detail::tell_of_shortage(*watch, rank);
      }
    } catch (...) {
      failures.note(rank);
    }
  };
  {
    std::vector<std::jthread> running;
    for (int rank = 0; rank < ranks; ++rank) running.emplace_back(run, rank);
  }
  failures.rethrow();
}

}  // namespace zeropage::comm
