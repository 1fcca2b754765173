// Ranks as threads of the test's process: each has a world, a ledger and LibTorch's intra-op pool
// to itself.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include "comm/world.h"
#include "memory/ledger.h"

namespace zeropage::testing {

using RankFunction = std::function<void(comm::World&)>;

struct RankOptions {
  std::chrono::milliseconds deadline = std::chrono::seconds(30);
  std::chrono::milliseconds busy_limit = std::chrono::seconds(60);
  std::chrono::milliseconds report_interval = std::chrono::seconds(30);
  std::function<std::unique_ptr<comm::Communicator>(std::unique_ptr<comm::Communicator>)> decorate;
  comm::Transport transport = comm::Transport::kAuto;
  std::vector<std::string> hosts = {};  // by rank; none: all on this one
  c10::DeviceType device = c10::kCPU;
  comm::ReductionOrder reduction_order = comm::ReductionOrder::kFast;
  // Where they meet; null: in a HashStore of their own. One a rank, or one for all.
  std::function<c10::intrusive_ptr<c10d::Store>(int rank)> store = {};
};

// Labels of hosts for RankOptions::hosts, from any numbers that tell them apart.
inline std::vector<std::string> host_labels(const std::vector<int>& hosts) {
  std::vector<std::string> labels;
  for (const int host : hosts) labels.push_back(c10::str("host ", host));
  return labels;
}

// Runs fn on `size` ranks and returns what each threw (null: nothing), by rank.
inline std::vector<std::exception_ptr> try_ranks(int size, const RankFunction& fn,
                                                 const RankOptions& options = {}) {
  const c10::intrusive_ptr<c10d::Store> shared_store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const memory::LedgerScope ledger(
          std::make_shared<memory::Ledger>(c10::str("rank ", rank, "/", size)));
      at::set_num_threads(1);
      try {
        comm::World world({.rank = rank,
                           .world_size = size,
                           .local_rank = rank,
                           .local_world_size = size,
                           .host = options.hosts.empty() ? std::string()
                                                         : options.hosts[static_cast<size_t>(rank)],
                           .launcher = "test"},
                          options.store ? options.store(rank) : shared_store,
                          {.deadline = options.deadline,
                           .busy_limit = options.busy_limit,
                           .report_interval = options.report_interval,
                           .device = options.device,
                           .transport = options.transport,
                           .reduction_order = options.reduction_order,
                           .decorate = options.decorate});
        fn(world);
        // Leaving early would look like a lost rank to the others.
        world.communicator().barrier("the end of the test").wait();
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// Runs fn on `size` ranks; rethrows the error of the lowest rank that had one.
inline void run_ranks(int size, const RankFunction& fn, const RankOptions& options = {}) {
  for (const std::exception_ptr& error : try_ranks(size, fn, options)) {
    if (error) std::rethrow_exception(error);
  }
}

// The message of an exception, or "" for null.
inline std::string message_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& caught) {
    return caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    return caught.what();
  }
}

}  // namespace zeropage::testing
