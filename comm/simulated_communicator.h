// One rank of a world of up to 4096 whose other ranks do not exist: counts what it would send, and
// what that would cost in time.
//
// The sharding code runs against it on meta tensors, which have sizes and no memory. Each
// operation has ended when it returns. What it sends is counted by the formulas of the real
// communicators (comm/traffic.h), so the figures of a program are theirs, whatever N.
// What the program's meta tensors would hold is on the ledger's account of c10::kMeta
// (memory/meta_memory.h).
// Host tensors are moved too, so that a program's small decisions need no second path. For them the
// other ranks are taken to hold what this one holds: a sum is N times this rank's contribution, a
// mean or a maximum is the contribution, and what an all_gather, a gather, a scatter, an
// all_to_all, a recv or a broadcast would bring from others stays as it is.
// Time: a message of B bytes costs alpha + B / beta (Hockney 1994, "The communication challenge for
// MPP"), with a link within a host and one between hosts for each rank. An operation costs what this
// rank sends, one message after the other, or what it receives where it sends nothing or is the root; a broadcast and a barrier the longest way through their
// tree (Thakur, Rabenseifner, Gropp 2005). Operations do not overlap, and neither do the two links;
// adding up costs nothing. Seconds.
// Failures: as scripted, an operation ends as if a rank were lost, and those after it with the same
// error.
// Threads: as Communicator.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/operation.h"
#include "comm/topology.h"
#include "comm/traffic.h"
#include "comm/transport.h"

namespace zeropage::comm {

namespace detail {
class CallNumbers;
struct Call;
}  // namespace detail

inline constexpr int kMostSimulatedRanks = 4096;

struct Link {
  double latency_seconds = 0;   // alpha
  double bytes_per_second = 0;  // beta
};

// The call of an operation, counted from 0 among its kind, that finds a rank lost.
struct ScriptedFailure {
  Operation operation = Operation::kAllReduce;
  int64_t call = 0;
  int lost_rank = 0;
};

struct SimulationOptions {
  int rank = 0;
  // The ranks and their hosts.
  Topology topology = Topology::even(1, 1);
  // The transport whose algorithms are counted.
  Transport transport = Transport::kAuto;
  // A core's copy through memory.
  Link within_host{.latency_seconds = 1e-6, .bytes_per_second = 10e9};
  // TCP over 100 Gbit/s, for each rank.
  Link between_hosts{.latency_seconds = 25e-6, .bytes_per_second = 12.5e9};
  std::vector<ScriptedFailure> failures;
};

// What calls of one operation cost this rank.
struct SimulatedCost {
  int64_t calls = 0;
  LinkTraffic sent;
  double seconds = 0;
};

struct SimulationFigures {
  std::array<SimulatedCost, kOperationCount> by_operation;

  const SimulatedCost& operator[](Operation operation) const {
    return by_operation[static_cast<size_t>(operation)];
  }
};

class SimulatedCommunicator final : public Communicator {
 public:
  // Throws for a rank that is not in the topology, more than kMostSimulatedRanks, and links that
  // take no time.
  explicit SimulatedCommunicator(const SimulationOptions& options);
  ~SimulatedCommunicator() override;

  // The communicator of a simulated world; throws for another.
  static const SimulatedCommunicator& of(const Communicator& communicator);

  const SimulationFigures& figures() const { return figures_; }
  const SimulationOptions& options() const { return options_; }

  c10::Device device() const override { return c10::kMeta; }
  bool moves(c10::Device there) const override { return there.is_meta() || there.is_cpu(); }
  std::string_view transport() const override { return "simulated"; }

 private:
  Pending start_all_gather(const at::Tensor& whole, std::string what) override;
  Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) override;
  Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) override;
  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override;
  Pending start_barrier(std::string what) override;
  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override;
  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override;
  WireTraffic sent() const override;
  Pending start_reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string what) override;
  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override;
  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override;
  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string what) override;

  Pending count(const detail::Call& call, const LinkTraffic& sent, double seconds);
  void reduce_equals(const at::Tensor& tensor, ReduceOp op) const;
  template <typename Sent>
  double seconds_from_others(const Sent& sent_by) const;
  double seconds_for(const LinkTraffic& traffic) const;
  double seconds_of_broadcast(int64_t bytes) const;
  double seconds_of_barrier() const;

  // Constant after construction.
  const SimulationOptions options_;
  const TrafficModel model_;

  // Owned by the calling thread.
  const std::unique_ptr<detail::CallNumbers> calls_;
  SimulationFigures figures_;
  std::exception_ptr first_error_;
};

}  // namespace zeropage::comm
