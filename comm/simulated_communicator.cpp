#include <algorithm>
#include <bit>
#include <future>
#include <utility>

#include <ATen/ops/empty.h>

#include "base/exact.h"
#include "comm/detail/call.h"
#include "memory/meta_memory.h"
#include "operators/meta_operators.h"
#include "zeropage/check.h"
#include "zeropage/simulation.h"

namespace zeropage::comm {
namespace {

double seconds_over(const Link& link, const Traffic& traffic) {
  return static_cast<double>(traffic.messages) * link.latency_seconds +
         static_cast<double>(traffic.bytes) / link.bytes_per_second;
}

// Rounds in which something reaches all of `size` when each passes it on.
int64_t rounds_to_reach(int size) {
  return std::bit_width(static_cast<unsigned>(size - 1));
}

void check_link(const Link& link, const char* which) {
  ZP_CHECK(link.latency_seconds >= 0 && link.bytes_per_second > 0, "SimulationOptions::", which,
           ": expected a latency of 0 s or more and more than 0 bytes a second, got ",
           link.latency_seconds, " s and ", link.bytes_per_second);
}

SimulationOptions checked(const SimulationOptions& options) {
  const int size = options.topology.size();
  ZP_CHECK(size <= kMostSimulatedRanks, "a simulated world of ", size, " ranks: expected at most ",
           kMostSimulatedRanks);
  ZP_CHECK(options.rank >= 0 && options.rank < size, "SimulationOptions::rank: there is no rank ",
           options.rank, " in a world of ", size);
  check_link(options.within_host, "within_host");
  check_link(options.between_hosts, "between_hosts");
  for (const ScriptedFailure& failure : options.failures) {
    ZP_CHECK(
        failure.lost_rank >= 0 && failure.lost_rank < size && failure.lost_rank != options.rank,
        "ScriptedFailure::lost_rank: expected another rank of a world of ", size, ", got ",
        failure.lost_rank);
  }
  return options;
}

}  // namespace

SimulatedCommunicator::SimulatedCommunicator(const SimulationOptions& options)
    : Communicator(options.rank, options.topology.size()),
      options_(checked(options)),
      model_(options.topology, options.transport),
      calls_(std::make_unique<detail::CallNumbers>(size())) {
  operators::provide_meta_operators();
  memory::observe_meta_memory();
}

SimulatedCommunicator::~SimulatedCommunicator() = default;

const SimulatedCommunicator& SimulatedCommunicator::of(const Communicator& communicator) {
  const auto* simulated = dynamic_cast<const SimulatedCommunicator*>(&communicator);
  ZP_CHECK(simulated != nullptr, "expected the communicator of World::simulated(), got a ",
           communicator.transport(), " one, whose operations take real time");
  return *simulated;
}

Pending SimulatedCommunicator::start_all_gather(const at::Tensor& whole, std::string what) {
  const LinkTraffic sent = model_.all_gather(rank(), whole.numel(), whole.scalar_type());
  return count(calls_->collective(Operation::kAllGather, whole, std::move(what)), sent,
               seconds_for(sent));
}

Pending SimulatedCommunicator::start_reduce_scatter(const at::Tensor& whole, ReduceOp op,
                                                    std::string what) {
  const LinkTraffic sent = model_.reduce_scatter(rank(), whole.numel(), whole.scalar_type());
  Pending pending = count(calls_->collective(Operation::kReduceScatter, whole, std::move(what)),
                          sent, seconds_for(sent));
  reduce_equals(detail::Slices::even(whole.numel(), size()).of(whole, rank()), op);
  return pending;
}

Pending SimulatedCommunicator::start_all_reduce(const at::Tensor& tensor, ReduceOp op,
                                                std::string what) {
  const LinkTraffic sent = model_.all_reduce(rank(), tensor.numel(), tensor.scalar_type());
  Pending pending = count(calls_->collective(Operation::kAllReduce, tensor, std::move(what)), sent,
                          seconds_for(sent));
  reduce_equals(tensor, op);
  return pending;
}

Pending SimulatedCommunicator::start_broadcast(const at::Tensor& tensor, int root,
                                               std::string what) {
  const LinkTraffic sent = model_.broadcast(rank(), root, tensor.numel(), tensor.scalar_type());
  return count(calls_->collective(Operation::kBroadcast, tensor, std::move(what)), sent,
               seconds_of_broadcast(detail::bytes_of(tensor)));
}

// To the time of its own messages the root adds that of the slices that come to it.
Pending SimulatedCommunicator::start_reduce(const at::Tensor& tensor, ReduceOp op, int root,
                                            std::string what) {
  const int64_t numel = tensor.numel();
  const auto dtype = tensor.scalar_type();
  const LinkTraffic sent = model_.reduce(rank(), root, numel, dtype);
  const bool is_small = detail::bytes_of(tensor) <= detail::kSmallBytes;
  double seconds = seconds_for(sent);
  if (rank() == root) {
    seconds += seconds_from_others([&](int other) {
      return is_small ? model_.reduce(other, root, numel, dtype)
                      : model_.gather(other, root, base::round_up<int64_t>(numel, size()), dtype);
    });
  }
  Pending pending =
      count(calls_->collective(Operation::kReduce, tensor, std::move(what)), sent, seconds);
  if (rank() == root) reduce_equals(tensor, op);
  return pending;
}

Pending SimulatedCommunicator::start_gather(const at::Tensor& tensor, int root, std::string what) {
  const int64_t numel = rank() == root ? tensor.numel() : tensor.numel() * size();
  const auto dtype = tensor.scalar_type();
  const LinkTraffic sent = model_.gather(rank(), root, numel, dtype);
  const double seconds =
      rank() == root
          ? seconds_from_others([&](int other) { return model_.gather(other, root, numel, dtype); })
          : seconds_for(sent);
  const int64_t bytes = numel * static_cast<int64_t>(tensor.element_size());
  return count(calls_->collective(Operation::kGather, bytes, std::move(what)), sent, seconds);
}

// Takes as long for all as the root's messages.
Pending SimulatedCommunicator::start_scatter(const at::Tensor& tensor, int root, std::string what) {
  const int64_t numel = rank() == root ? tensor.numel() : tensor.numel() * size();
  const int64_t bytes = numel * static_cast<int64_t>(tensor.element_size());
  return count(calls_->collective(Operation::kScatter, bytes, std::move(what)),
               model_.scatter(rank(), root, numel, tensor.scalar_type()),
               seconds_for(model_.scatter(root, root, numel, tensor.scalar_type())));
}

Pending SimulatedCommunicator::start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                                                std::string what) {
  const LinkTraffic sent = model_.all_to_all(rank(), given.numel(), given.scalar_type());
  Pending pending = count(calls_->collective(Operation::kAllToAll, given, std::move(what)), sent,
                          seconds_for(sent));
  const auto slices = detail::Slices::even(given.numel(), size());
  if (!first_error_) slices.of(received, rank()).copy_(slices.of(given, rank()));
  return pending;
}

Pending SimulatedCommunicator::start_barrier(std::string what) {
  return count(calls_->collective(Operation::kBarrier, at::empty({0}, at::kByte), std::move(what)),
               model_.barrier(rank()), seconds_of_barrier());
}

Pending SimulatedCommunicator::start_send(const at::Tensor& tensor, int to_rank, std::string what) {
  const LinkTraffic sent = model_.send(rank(), to_rank, tensor.numel(), tensor.scalar_type());
  return count(calls_->send(tensor, to_rank, std::move(what)), sent, seconds_for(sent));
}

// Takes as long as the other rank's send.
Pending SimulatedCommunicator::start_recv(const at::Tensor& tensor, int from_rank,
                                          std::string what) {
  const LinkTraffic arriving = model_.send(from_rank, rank(), tensor.numel(), tensor.scalar_type());
  return count(calls_->recv(tensor, from_rank, std::move(what)), {}, seconds_for(arriving));
}

WireTraffic SimulatedCommunicator::sent() const {
  const auto of = [this](Operation operation) { return figures_[operation].sent.total(); };
  return {of(Operation::kAllGather), of(Operation::kReduceScatter), of(Operation::kAllReduce),
          of(Operation::kBroadcast), of(Operation::kPair),          of(Operation::kBarrier),
          of(Operation::kReduce),    of(Operation::kGather),        of(Operation::kScatter),
          of(Operation::kAllToAll)};
}

// Every rank is taken to hold what this one holds: a mean or a maximum of equals is any of them.
void SimulatedCommunicator::reduce_equals(const at::Tensor& tensor, ReduceOp op) const {
  if (op == ReduceOp::kSum && !first_error_) tensor.mul_(size());
}

Pending SimulatedCommunicator::count(const detail::Call& call, const LinkTraffic& sent,
                                     double seconds) {
  SimulatedCost& cost = figures_.by_operation[static_cast<size_t>(call.operation)];
  for (const ScriptedFailure& failure : options_.failures) {
    if (first_error_ || failure.operation != call.operation || failure.call != cost.calls) continue;
    try {
      ZP_THROW(call.describe(), ": lost rank ", failure.lost_rank,
               " (scripted); it has ended or was killed. See the last lines of rank ",
               failure.lost_rank);
    } catch (...) {
      first_error_ = std::current_exception();
    }
  }
  if (first_error_) {
    std::promise<void> failed;
    failed.set_exception(first_error_);
    return {failed.get_future().share(), {}};
  }
  ++cost.calls;
  cost.sent += sent;
  cost.seconds += seconds;
  return {};
}

// ---- time ----

// Seconds that the messages from all other ranks take, one after the other.
template <typename Sent>
double SimulatedCommunicator::seconds_from_others(const Sent& sent_by) const {
  double seconds = 0;
  for (int other = 0; other < size(); ++other) {
    if (other != rank()) seconds += seconds_for(sent_by(other));
  }
  return seconds;
}

double SimulatedCommunicator::seconds_for(const LinkTraffic& traffic) const {
  return seconds_over(options_.within_host, traffic.within_host) +
         seconds_over(options_.between_hosts, traffic.between_hosts);
}

double SimulatedCommunicator::seconds_of_broadcast(int64_t bytes) const {
  const Topology& topology = model_.topology();
  const auto in_a_row = [bytes](const Link& link, int64_t messages) {
    return seconds_over(link, {bytes * messages, messages});
  };
  if (model_.algorithms() == TrafficModel::Algorithms::kMessages) {
    return in_a_row(topology.hosts() > 1 ? options_.between_hosts : options_.within_host,
                    rounds_to_reach(size()));
  }
  size_t most_beside = 0;
  for (int host = 0; host < topology.hosts(); ++host) {
    most_beside = std::max(most_beside, topology.ranks_of(host).size() - 1);
  }
  return in_a_row(options_.between_hosts, rounds_to_reach(topology.hosts())) +
         in_a_row(options_.within_host, static_cast<int64_t>(most_beside));
}

double SimulatedCommunicator::seconds_of_barrier() const {
  const Topology& topology = model_.topology();
  const auto rounds = [](const Link& link, int64_t count) {
    return seconds_over(link, {0, count});
  };
  if (model_.algorithms() == TrafficModel::Algorithms::kMessages) {
    return rounds(topology.hosts() > 1 ? options_.between_hosts : options_.within_host,
                  rounds_to_reach(size()));
  }
  return rounds(options_.within_host, 1) +
         rounds(options_.between_hosts, rounds_to_reach(topology.hosts()));
}

}  // namespace zeropage::comm
