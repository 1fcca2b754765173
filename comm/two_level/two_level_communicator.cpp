#include "comm/two_level/two_level_communicator.h"

#include <numeric>
#include <utility>
#include <vector>

#include "comm/detail/broken_pipe.h"
#include "comm/detail/call.h"
#include "comm/detail/kept_slice.h"
#include "comm/detail/progress_thread.h"
#include "comm/gloo/message_rounds.h"
#include "comm/shared_memory/segment_charge.h"
#include "comm/two_level/two_level_gather.h"
#include "comm/two_level/two_level_reduction.h"
#include "comm/two_level/two_level_transfers.h"

namespace zeropage::comm {
namespace {

using detail::Call;
using detail::HostLink;
using detail::Operation;
using detail::Slices;
using detail::WatchedLink;
using Exchange = detail::GlooLink::Exchange;
using Parts = detail::HostSlices::Parts;
using Session = HostLink::Session;

class TwoLevelCommunicator final : public Communicator {
 public:
  TwoLevelCommunicator(const Topology& topology, std::unique_ptr<HostLink> host,
                       const WatchedLink::Options& messages)
      : Communicator(messages.rank, messages.size),
        topology_(topology),
        calls_(messages.size, messages.names),
        host_(std::move(host)),
        link_(with_host(messages)) {
    std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  }

  ~TwoLevelCommunicator() override { link_.abort(); }

  std::string_view transport() const override { return "two-level"; }
  std::vector<int> lost_ranks() override { return link_.lost_peers(); }
  std::shared_ptr<detail::Watch> watch() const override { return link_.watch(); }

 private:
  Pending start_all_gather(const at::Tensor& whole, std::string what) override {
    return start(Operation::kAllGather, whole, {.dtype = whole.scalar_type()}, std::move(what),
                 [this, whole](const Call& call, Session& session) {
                   gather_.perform(call, session, whole, even_slices(whole));
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
                     gather_.perform(call, session, tensor, slices);
                   }
                 });
  }

  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override {
    return start(Operation::kBroadcast, tensor, {.dtype = tensor.scalar_type(), .root = root},
                 std::move(what), [this, tensor, root](const Call& call, Session& session) {
                   transfers_.broadcast(call, session, tensor, root);
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
          const detail::KeptSlice kept(slices.of(tensor, rank()), rank() != root);
          reduction_.perform(call, session, tensor, slices, op);
          Parts parts = Parts::even(tensor, size());
          parts.own_lies_in_whole = true;
          transfers_.gather(call, session, tensor, parts, root);
          kept.put_back();
        });
  }

  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override {
    const Parts parts = Parts::with_root(tensor, rank() == root, size());
    return start_rooted(Operation::kGather, tensor, parts, root, std::move(what),
                        [this, tensor, parts, root](const Call& call, Session& session) {
                          transfers_.gather(call, session, tensor, parts, root);
                        });
  }

  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override {
    const Parts parts = Parts::with_root(tensor, rank() == root, size());
    return start_rooted(Operation::kScatter, tensor, parts, root, std::move(what),
                        [this, tensor, parts, root](const Call& call, Session& session) {
                          transfers_.scatter(call, session, tensor, parts, root);
                        });
  }

  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string what) override {
    return start(Operation::kAllToAll, given, {.dtype = given.scalar_type()}, std::move(what),
                 [this, given, received](const Call& call, Session& session) {
                   transfers_.exchange(call, session, given, received, Parts::even(given, size()));
                 });
  }

  Pending start_barrier(std::string what) override {
    return start(Operation::kBarrier, at::empty({0}, at::kByte), {}, std::move(what),
                 [this](const Call& call, Session& session) {
                   session.meet();
                   if (host_->peers().own() == 0) {
                     rounds_.disseminate(call, topology_.first_ranks(), topology_.host_of(rank()));
                   }
                   session.meet();
                 });
  }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    return launch(calls_.send(tensor, to_rank, std::move(what)), tensor,
                  [this, tensor, to_rank](const Call& made) {
                    sent_.add(made.operation, made.bytes);
                    if (is_neighbour(to_rank)) {
                      host_->pairs().send(topology_.index_in_host(to_rank), made,
                                          tensor.data_ptr());
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
                      host_->pairs().receive(topology_.index_in_host(from_rank), made,
                                             tensor.data_ptr());
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
    messages.on_failure = [this](const detail::FailureReason& account) { host_->fail(account); };
    messages.state_of = [this](int rank) { return host_->peers().state_of(rank); };
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
  Pending start_rooted(Operation operation, const at::Tensor& tensor, const Parts& parts, int root,
                       std::string what, Body body) {
    return launch(calls_.collective(operation, parts.all_bytes(), std::move(what)), tensor,
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
  bool is_neighbour(int other) const {
    return topology_.host_of(other) == topology_.host_of(rank());
  }

  // Constant after construction.
  const Topology topology_;
  std::vector<int> all_ranks_ = std::vector<int>(static_cast<size_t>(size()));

  // Owned by the calling thread.
  detail::CallNumbers calls_;

  // Owned by the thread that performs.
  detail::TrafficCounter sent_;
  const std::unique_ptr<HostLink> host_;
  const detail::SegmentCharge charge_{host_->bytes() / host_->peers().size()};
  WatchedLink link_;
  detail::MessageRounds rounds_{link_.messages(), sent_};
  detail::TwoLevelGather gather_{topology_, rank(), host_->peers(), link_.messages(), sent_};
  detail::TwoLevelReduction reduction_{topology_, rank(), host_->peers(), link_.messages(), sent_};
  detail::TwoLevelTransfers transfers_{topology_, rank(), host_->peers(), link_.messages(), sent_};

  detail::ProgressThread progress_;  // last: its thread uses everything above
};

}  // namespace

std::unique_ptr<Communicator> make_two_level_communicator(const Topology& topology,
                                                          std::unique_ptr<HostLink> host,
                                                          const WatchedLink::Options& messages) {
  return std::make_unique<TwoLevelCommunicator>(topology, std::move(host), messages);
}

}  // namespace zeropage::comm
