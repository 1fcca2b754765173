// Ranks as threads of the test's process (zeropage/world.h), with a test's deadlines, and what each of
// them threw.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "zeropage/world.h"

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
  try {
    comm::World::threads(size, fn,
                         {.deadline = options.deadline,
                          .busy_limit = options.busy_limit,
                          .report_interval = options.report_interval,
                          .device = options.device,
                          .transport = options.transport,
                          .reduction_order = options.reduction_order,
                          .decorate = options.decorate},
                         {.hosts = options.hosts, .store = options.store});
  } catch (const comm::RanksFailed& failed) {
    return failed.errors();
  }
  return std::vector<std::exception_ptr>(static_cast<size_t>(size));
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
