// Many ranks in one process, with the time and bytes of their traffic.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include "zeropage/communicator.h"

// The operations of a communicator, as errors and figures name them.

namespace zeropage::comm {

enum class Operation : uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kPair,  // send or recv
  kBarrier,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
};
inline constexpr size_t kOperationCount = 10;

constexpr const char* name(Operation operation) {
  constexpr std::array<const char*, kOperationCount> kNames = {
      "all_gather", "reduce_scatter", "all_reduce", "broadcast", "send/recv",
      "barrier",    "reduce",         "gather",     "scatter",   "all_to_all"};
  return kNames[static_cast<size_t>(operation)];
}

// Whether a rank may have all that it needs before every other has called: an end of it proves nothing about the
// others.
constexpr bool may_end_early(Operation operation) {
  return operation == Operation::kBroadcast || operation == Operation::kReduce ||
         operation == Operation::kGather || operation == Operation::kScatter;
}

// Which ranks are on which host.
//
// Hosts are numbered from 0 in the order of their first ranks. Ranks of a host need not be
// consecutive.
// Where hosts hold several ranks, those of two hosts face each other: what a rank has for a remote
// rank goes to one rank beside it or beside the remote one, its counterpart there.
class Topology {
 public:
  // hosts: by rank, any number that tells its host from others. Throws if there is none.
  explicit Topology(const std::vector<int>& hosts);

  // The first ranks on the first host, and so on; the last host may have fewer. Throws unless both
  // are positive.
  static Topology even(int ranks, int ranks_per_host);

  int size() const { return static_cast<int>(places_.size()); }
  int hosts() const { return static_cast<int>(ranks_of_.size()); }
  int host_of(int rank) const { return places_[static_cast<size_t>(rank)].host; }
  // A rank's place among those of its host, from 0.
  int index_in_host(int rank) const { return places_[static_cast<size_t>(rank)].index; }
  const std::vector<int>& ranks_of(int host) const { return ranks_of_[static_cast<size_t>(host)]; }

  // By host.
  std::vector<int> first_ranks() const;
  // The rank on `host` that stands for `rank`: itself on its own host.
  int counterpart(int rank, int host) const;

 private:
  struct Place {
    int host = 0;
    int index = 0;
  };
  std::vector<Place> places_;               // by rank
  std::vector<std::vector<int>> ranks_of_;  // by host, ascending
};

// What one rank sends in one operation, from sizes alone: what the communicators put on the wire.
//
// Three sets of algorithms, chosen as the real communicators are:
// * messages (Transport::kGloo, or one rank a host): each slice straight to its owner, in segments;
//   a broadcast along a binomial tree, a barrier by dissemination.
// * shared memory (all ranks on one host): each slice counts once for each rank that takes it.
// * two levels (several hosts with several ranks): within a host as in shared memory, between
//   hosts once, by the counterpart (zeropage/simulation.h). A reduction sends one partial sum a maximal
//   subtree of the reduction's tree (zeropage/communicator.h), so that the bits stay the same.
//
// Operations with a root, and all_to_all, send straight to the receiver, whatever hosts lie between. A reduction to
// a root is a reduce_scatter and a gather above 32 KiB, and goes straight to the root below.
//
// N ranks, B bytes: all_gather, reduce_scatter and all_to_all B (N-1)/N, all_reduce twice that, a binomial
// broadcast ceil(log2 N) times B at the root (Thakur, Rabenseifner, Gropp 2005, "Optimization of
// Collective Communication Operations in MPICH", section 4).
//
// Pure integers; thread-safe. Ranks must be in [0, topology().size()), unchecked.
// What a rank sends, by the kind of link it takes.
struct LinkTraffic {
  Traffic within_host = {};
  Traffic between_hosts = {};

  Traffic total() const {
    return {within_host.bytes + between_hosts.bytes, within_host.messages + between_hosts.messages};
  }
  LinkTraffic& operator+=(const LinkTraffic& other);
  LinkTraffic& operator-=(const LinkTraffic& other);
  friend bool operator==(const LinkTraffic&, const LinkTraffic&) = default;
};

class TrafficModel {
 public:
  enum class Algorithms : uint8_t { kMessages, kSharedMemory, kTwoLevels };

  // Throws for shared memory between hosts.
  TrafficModel(Topology topology, Transport transport);

  const Topology& topology() const { return topology_; }
  Algorithms algorithms() const { return algorithms_; }

  // numel: of the whole tensor, divisible by the world size.
  LinkTraffic all_gather(int rank, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic reduce_scatter(int rank, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic all_reduce(int rank, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic broadcast(int rank, int root, int64_t numel, c10::ScalarType dtype) const;
  // numel: of what is reduced, or of what the root has whole.
  LinkTraffic reduce(int rank, int root, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic gather(int rank, int root, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic scatter(int rank, int root, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic all_to_all(int rank, int64_t numel, c10::ScalarType dtype) const;
  LinkTraffic barrier(int rank) const;
  LinkTraffic send(int rank, int to_rank, int64_t numel, c10::ScalarType dtype) const;

 private:
  // Where a tensor's slices lie: rank r has elements [r slice_numel, (r + 1) slice_numel) of numel.
  struct Sliced;

  LinkTraffic gather_slices(int rank, const Sliced& sliced) const;
  LinkTraffic reduce_slices(int rank, const Sliced& sliced) const;
  LinkTraffic reduce_slices_by_host(int rank, const Sliced& sliced) const;
  void add(LinkTraffic& traffic, int from, int to, int64_t bytes, int64_t messages = 1) const;

  const Topology topology_;
  const Algorithms algorithms_;
  // By host: how many maximal subtrees of one rank, and of more, its ranks make up.
  struct Partials {
    int64_t of_one_rank = 0;
    int64_t of_several = 0;
  };
  std::vector<Partials> partials_;
};

// One rank of a world of up to 4096 whose other ranks do not exist: counts what it would send, and
// what that would cost in time.
//
// The sharding code runs against it on meta tensors, which have sizes and no memory. Each
// operation has ended when it returns. What it sends is counted by the formulas of the real
// communicators (zeropage/simulation.h), so the figures of a program are theirs, whatever N.
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
  std::vector<ScriptedFailure> failures = {};
};

// What calls of one operation cost this rank.
struct SimulatedCost {
  int64_t calls = 0;
  LinkTraffic sent = {};
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
