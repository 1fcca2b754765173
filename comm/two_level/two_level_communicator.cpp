#include "comm/two_level/two_level_communicator.h"

#include <numeric>
#include <utility>
#include <vector>

#include "comm/detail/broken_pipe.h"
#include "comm/detail/call.h"
#include "comm/detail/kept_slice.h"
#include "comm/detail/places.h"
#include "comm/detail/progress_thread.h"
#include "comm/gloo/message_rounds.h"
#include "comm/gloo/slice_messages.h"
#include "comm/shared_memory/host_copies.h"
#include "comm/shared_memory/host_slices.h"
#include "comm/two_level/two_level_reduction.h"
#include "memory/ledger.h"

namespace zeropage::comm {
namespace {

using detail::bytes_of;
using detail::Call;
using detail::HostLink;
using detail::HostSlices;
using detail::Operation;
using detail::Slices;
using detail::WatchedLink;
using Exchange = detail::GlooLink::Exchange;
using Session = HostLink::Session;

class TwoLevelCommunicator final : public Communicator {
 public:
  TwoLevelCommunicator(const Topology& topology, std::unique_ptr<HostLink> host,
                       const WatchedLink::Options& messages)
      : Communicator(messages.rank, messages.size),
        topology_(topology),
        own_host_(topology.host_of(rank())),
        calls_(messages.size, messages.names),
        host_(std::move(host)),
        link_(with_host(messages)) {
    std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
    for (const int neighbour : topology_.ranks_of(own_host_)) {
      own_slices_.push_back({neighbour});
      std::vector<int>& collected = collected_slices_.emplace_back();
      std::vector<int>& held = held_slices_.emplace_back();
      for (int owner = 0; owner < size(); ++owner) {
        if (topology_.counterpart(owner, own_host_) != neighbour) continue;
        held.push_back(owner);
        if (owner != neighbour) collected.push_back(owner);
      }
    }
    ledger_->charge(memory::Kind::kStaging, segment_share());
  }

  ~TwoLevelCommunicator() override {
    link_.abort();
    ledger_->discharge(memory::Kind::kStaging, segment_share());
  }

  std::string_view transport() const override { return "two-level"; }
  std::vector<int> lost_ranks() override { return link_.lost_peers(); }
  std::shared_ptr<detail::Watch> watch() const override { return link_.watch(); }

 private:
  Pending start_all_gather(const at::Tensor& whole, std::string what) override {
    return start(Operation::kAllGather, whole, {.dtype = whole.scalar_type()}, std::move(what),
                 [this, whole](const Call& call, Session& session) {
                   gather(call, session, whole, even_slices(whole));
                 });
  }

  Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) override {
    return start(Operation::kReduceScatter, whole, {.op = op, .dtype = whole.scalar_type()},
                 std::move(what), [this, whole, op](const Call& call, Session& session) {
                   reduction_.perform(call, session, whole, even_slices(whole), op);
                 });
  }

  Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) override {
    return start(Operation::kAllReduce, tensor, {.op = op, .dtype = tensor.scalar_type()},
                 std::move(what), [this, tensor, op](const Call& call, Session& session) {
                   if (call.bytes <= detail::kSmallBytes) {
                     // Every collective is a session of the host, so that ranks count alike.
                     session.meet();
                     rounds_.reduce_everywhere(call, tensor, op, all_ranks_, rank());
                   } else {
                     const Slices slices = even_slices(tensor);
                     reduction_.perform(call, session, tensor, slices, op);
                     gather(call, session, tensor, slices);
                   }
                 });
  }

  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override {
    return start(Operation::kBroadcast, tensor, {.dtype = tensor.scalar_type(), .root = root},
                 std::move(what), [this, tensor, root](const Call& call, Session& session) {
                   broadcast(call, session, tensor, root);
                 });
  }

  Pending start_reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string what) override {
    return start(
        Operation::kReduce, tensor, {.op = op, .dtype = tensor.scalar_type(), .root = root},
        std::move(what), [this, tensor, op, root](const Call& call, Session& session) {
          if (call.bytes <= detail::kSmallBytes) {
            reduction_.perform(call, session, tensor, Slices::all_at(root, tensor.numel()), op);
            return;
          }
          const Slices slices = even_slices(tensor);
          const at::Tensor own = slices.of(tensor, rank());
          const detail::KeptSlice kept(own, rank() != root);
          reduction_.perform(call, session, tensor, slices, op);
          HostSlices::Parts parts = parts_of(tensor, slices);
          parts.own_lies_in_whole = true;
          gather_at(call, session, own, tensor, parts, root);
          kept.put_back();
        });
  }

  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override {
    const HostSlices::Parts parts = parts_of(tensor, slices_at(tensor, root));
    return start_rooted(Operation::kGather, tensor, parts, root, std::move(what),
                        [this, tensor, parts, root](const Call& call, Session& session) {
                          gather_at(call, session, tensor, tensor, parts, root);
                        });
  }

  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override {
    const HostSlices::Parts parts = parts_of(tensor, slices_at(tensor, root));
    return start_rooted(Operation::kScatter, tensor, parts, root, std::move(what),
                        [this, tensor, parts, root](const Call& call, Session& session) {
                          if (rank() == root) count_for_neighbours(call, parts);
                          messages_.scatter(call, tensor, tensor, parts.slices, root);
                          if (is_neighbour(root)) {
                            slices_.scatter(session, parts, tensor, topology_.index_in_host(root));
                          } else {
                            session.meet();
                          }
                        });
  }

  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string what) override {
    return start(Operation::kAllToAll, given, {.dtype = given.scalar_type()}, std::move(what),
                 [this, given, received](const Call& call, Session& session) {
                   const HostSlices::Parts parts = parts_of(given, even_slices(given));
                   count_for_neighbours(call, parts);
                   detail::copy_bytes(parts.slices.of(received, rank()),
                                      parts.slices.of(given, rank()));
                   slices_.exchange(session, parts, given, received);
                   messages_.exchange(call, given, received, parts.slices);
                 });
  }

  Pending start_barrier(std::string what) override {
    return start(Operation::kBarrier, at::empty({0}, at::kByte), {}, std::move(what),
                 [this](const Call& call, Session& session) {
                   session.meet();
                   if (host_->own() == 0) {
                     rounds_.disseminate(call, first_ranks(), own_host_);
                   }
                   session.meet();
                 });
  }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    return launch(calls_.send(tensor, to_rank, std::move(what)), tensor,
                  [this, tensor, to_rank](const Call& made) {
                    sent_.add(made.operation, made.bytes);
                    if (is_neighbour(to_rank)) {
                      host_->send(topology_.index_in_host(to_rank), made, tensor.data_ptr());
                    } else {
                      Exchange exchange(link_.messages());
                      exchange.send(tensor, to_rank, made.tag(0));
                      exchange.wait_sends();
                    }
                  });
  }

  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override {
    return launch(calls_.recv(tensor, from_rank, std::move(what)), tensor,
                  [this, tensor, from_rank](const Call& made) {
                    if (is_neighbour(from_rank)) {
                      host_->receive(topology_.index_in_host(from_rank), made, tensor.data_ptr());
                    } else {
                      Exchange exchange(link_.messages());
                      exchange.wait_recv(exchange.recv(tensor, from_rank, made.tag(0)));
                    }
                  });
  }

  WireTraffic sent() const override { return sent_.total(); }

  // ---- starting ----

  // A rank may wait for its host or for another: what ends one wait ends the other.
  WatchedLink::Options with_host(WatchedLink::Options messages) {
    messages.abort_others = [this] { host_->abort(); };
    messages.on_failure = [this](const detail::Account& account) { host_->fail(account); };
    messages.state_of = [this](int rank) { return host_->state_of(rank); };
    return messages;
  }

  template <typename Body>
  Pending start(Operation operation, const at::Tensor& tensor, const HostLink::Details& details,
                std::string what, Body body) {
    const Call call = calls_.collective(operation, tensor, std::move(what));
    return launch(call, tensor, [this, tensor, details, body = std::move(body)](const Call& made) {
      Session session(*host_, made, details, tensor.data_ptr());
      body(made, session);
    });
  }

  // tensor: the root's whole, or the slice of another.
  template <typename Body>
  Pending start_rooted(Operation operation, const at::Tensor& tensor,
                       const HostSlices::Parts& parts, int root, std::string what, Body body) {
    const int64_t bytes = parts.slices.numel * parts.element_bytes;
    return launch(calls_.collective(operation, bytes, std::move(what)), tensor,
                  [this, tensor, root, body = std::move(body)](const Call& made) {
                    Session session(*host_, made, {.dtype = tensor.scalar_type(), .root = root},
                                    tensor.data_ptr());
                    body(made, session);
                  });
  }

  template <typename Body>
  Pending launch(Call call, const at::Tensor& tensor, Body body) {
    return progress_.run(
        [this, call = std::move(call), body = std::move(body)] {
          // The thread may be one of the user's, who waits.
          const detail::BrokenPipeScope broken_pipe;
          link_.perform(call, [&] { body(call); });
        },
        {tensor});
  }

  Slices even_slices(const at::Tensor& whole) const { return Slices::even(whole.numel(), size()); }
  // The slices of what the root has whole.
  Slices slices_at(const at::Tensor& tensor, int root) const {
    return Slices::even(rank() == root ? tensor.numel() : tensor.numel() * size(), size());
  }
  static HostSlices::Parts parts_of(const at::Tensor& tensor, const Slices& slices) {
    return {.slices = slices, .element_bytes = static_cast<int64_t>(tensor.element_size())};
  }
  std::vector<int> far_ranks() const {
    std::vector<int> ranks;
    detail::for_each_other(rank(), size(), [&](int other) {
      if (!is_neighbour(other)) ranks.push_back(other);
    });
    return ranks;
  }
  bool is_neighbour(int other) const { return topology_.host_of(other) == own_host_; }

  std::vector<int> first_ranks() const {
    std::vector<int> ranks;
    for (int host = 0; host < topology_.hosts(); ++host) {
      ranks.push_back(topology_.ranks_of(host).front());
    }
    return ranks;
  }

  // ---- algorithms, on the progress thread ----

  // A slice crosses to its counterparts, who then have it for their neighbours.
  void gather(const Call& call, Session& session, const at::Tensor& whole, const Slices& slices) {
    // Apart from the rounds of a reduction before it.
    constexpr uint64_t kRound = uint64_t{1} << 32;
    Exchange exchange(link_.messages());
    std::vector<size_t> tickets;
    for (const int owner : collected_slices_[static_cast<size_t>(host_->own())]) {
      if (slices.count(owner) == 0) continue;
      tickets.push_back(exchange.recv(slices.of(whole, owner), owner, call.tag(kRound)));
    }
    const at::Tensor own = slices.of(whole, rank());
    for (int host = 0; host < topology_.hosts() && own.numel() > 0; ++host) {
      if (host == own_host_) continue;
      exchange.send(own, topology_.counterpart(rank(), host), call.tag(kRound));
      sent_.add(call.operation, bytes_of(own));
    }
    count_held(call, whole, slices);
    const auto wait_for_others = [&] {
      for (const size_t ticket : tickets) exchange.wait_recv(ticket);
    };
    if (copies_.gathers_through_slots(whole, slices, held_slices_)) {
      wait_for_others();
      copies_.gather_through_slots(session, whole, slices, held_slices_);
    } else {
      session.meet();
      copies_.gather_from_peers(session, whole, slices, own_slices_);
      wait_for_others();
      session.meet();
      copies_.gather_from_peers(session, whole, slices, collected_slices_);
      session.meet();
    }
    exchange.wait_sends();
  }

  // What the neighbours read of this rank.
  void count_held(const Call& call, const at::Tensor& whole, const Slices& slices) {
    const int neighbours = host_->size() - 1;
    for (const int owner : held_slices_[static_cast<size_t>(host_->own())]) {
      const int64_t bytes = slices.count(owner) * static_cast<int64_t>(whole.element_size());
      if (bytes > 0) sent_.add(call.operation, bytes * neighbours, neighbours);
    }
  }

  // A slice crosses straight to the root, and passes shared memory on its host.
  void gather_at(const Call& call, Session& session, const at::Tensor& own, const at::Tensor& whole,
                 const HostSlices::Parts& parts, int root) {
    messages_.gather(call, own, whole, parts.slices, root);
    if (!is_neighbour(root)) {
      session.meet();
      return;
    }
    if (rank() != root && parts.bytes(rank()) > 0) sent_.add(call.operation, parts.bytes(rank()));
    slices_.gather(session, parts, rank() == root ? whole : own_tensor(own, whole, parts),
                   topology_.index_in_host(root));
  }
  // What was announced: all of it, or this rank's slice alone.
  static const at::Tensor& own_tensor(const at::Tensor& own, const at::Tensor& whole,
                                      const HostSlices::Parts& parts) {
    return parts.own_lies_in_whole ? whole : own;
  }

  // What they read of this rank.
  void count_for_neighbours(const Call& call, const HostSlices::Parts& parts) {
    for (const int neighbour : topology_.ranks_of(own_host_)) {
      const int64_t bytes = parts.bytes(neighbour);
      if (neighbour != rank() && bytes > 0) sent_.add(call.operation, bytes);
    }
  }

  // To one rank of each host, who gives it to its neighbours.
  void broadcast(const Call& call, Session& session, const at::Tensor& tensor, int root) {
    const int root_host = topology_.host_of(root);
    std::vector<int> receivers = first_ranks();
    receivers[static_cast<size_t>(root_host)] = root;
    const int receiver = receivers[static_cast<size_t>(own_host_)];
    if (rank() == receiver) {
      rounds_.broadcast(call, tensor, receivers, own_host_, root_host);
      const int neighbours = host_->size() - 1;
      sent_.add(call.operation, call.bytes * neighbours, neighbours);
    }
    copies_.broadcast(session, tensor, topology_.index_in_host(receiver));
  }

  // The segment is counted once a host, in equal parts.
  int64_t segment_share() const { return host_->bytes() / host_->size(); }

  // Constant after construction.
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();
  const Topology topology_;
  const int own_host_;
  std::vector<int> all_ranks_ = std::vector<int>(static_cast<size_t>(size()));
  // By place on this host: a rank's own slice, those of remote ranks it stands for, and both.
  detail::HostCopies::Held own_slices_;
  detail::HostCopies::Held collected_slices_;
  detail::HostCopies::Held held_slices_;

  // Owned by the calling thread.
  detail::CallNumbers calls_;

  // Owned by the thread that performs.
  detail::TrafficCounter sent_;
  const std::unique_ptr<HostLink> host_;
  const detail::HostCopies copies_{*host_};
  WatchedLink link_;
  detail::MessageRounds rounds_{link_.messages(), sent_};
  detail::SliceMessages messages_{link_.messages(), sent_, rank(), far_ranks()};
  const HostSlices slices_{*host_, topology_.ranks_of(own_host_)};
  detail::TwoLevelReduction reduction_{topology_, rank(), *host_, link_.messages(), sent_};

  detail::ProgressThread progress_;  // last: its thread uses everything above
};

}  // namespace

std::unique_ptr<Communicator> make_two_level_communicator(const Topology& topology,
                                                          std::unique_ptr<HostLink> host,
                                                          const WatchedLink::Options& messages) {
  return std::make_unique<TwoLevelCommunicator>(topology, std::move(host), messages);
}

}  // namespace zeropage::comm
