#include "comm/gloo_communicator.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "comm/detail/broken_pipe.h"
#include "comm/detail/call.h"
#include "comm/detail/gloo_link.h"
#include "comm/detail/progress_thread.h"
#include "comm/detail/store_calls.h"
#include "comm/detail/watch.h"
#include "comm/reduction.h"
#include "memory/bytes.h"
#include "memory/check.h"
#include "memory/ledger.h"

namespace zeropage::comm {
namespace {

using detail::bytes_of;
using detail::Call;
using detail::GlooLink;
using detail::kSegmentBytes;
using detail::Operation;
using detail::Slices;
using Exchange = detail::GlooLink::Exchange;

// A timed-out rank waits this long for the others' account of where they stand.
constexpr auto kPostMortem = std::chrono::seconds(1);
// From the first connection that a killed process loses to its last.
constexpr auto kLastClose = std::chrono::milliseconds(20);
// The rank that serves the store waits this long for the others to end as well.
constexpr auto kFarewell = std::chrono::milliseconds(500);

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(const GlooOptions& options)
      : Communicator(options.rank, options.size),
        store_(options.store->clone()),
        deadline_(options.deadline),
        store_server_(options.store_server),
        link_({options.store, options.rank, options.size, options.bind_address, options.deadline}),
        watch_({.store = store_,
                .rank = options.rank,
                .size = options.size,
                .patience = detail::Watch::patience_for(options.deadline),
                .interrupt = [this] { link_.abort(); },
                .lost_ranks = [this] { return link_.lost_peers(); }}) {}

  ~GlooCommunicator() override { link_.abort(); }

  std::string_view transport() const override { return "gloo"; }
  std::vector<int> lost_ranks() override { return link_.lost_peers(); }

 private:
  Pending start_all_gather(const at::Tensor& whole, std::string what) override {
    return start(Operation::kAllGather, whole, std::move(what), [this, whole](const Call& call) {
      all_gather_slices(call, whole, even_slices(whole));
    });
  }

  Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) override {
    return start(Operation::kReduceScatter, whole, std::move(what),
                 [this, whole, op](const Call& call) {
                   reduce_slices(call, whole, even_slices(whole), op);
                 });
  }

  Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) override {
    return start(Operation::kAllReduce, tensor, std::move(what),
                 [this, tensor, op](const Call& call) {
                   if (call.bytes <= detail::kSmallBytes) {
                     all_reduce_small(call, tensor, op);
                   } else {
                     const Slices slices = even_slices(tensor);
                     reduce_slices(call, tensor, slices, op);
                     all_gather_slices(call, tensor, slices);
                   }
                 });
  }

  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override {
    return start(Operation::kBroadcast, tensor, std::move(what),
                 [this, tensor, root](const Call& call) { broadcast_tree(call, tensor, root); });
  }

  Pending start_barrier(std::string what) override {
    return start(Operation::kBarrier, at::empty({0}, at::kByte), std::move(what),
                 [this](const Call& call) { disseminate(call); });
  }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    const Call call{.operation = Operation::kPair,
                    .sequence = pairs_sent_[to_rank]++,
                    .bytes = bytes_of(tensor),
                    .what = std::move(what),
                    .peer = to_rank,
                    .end = Call::End::kSends};
    return launch(call, tensor, [this, tensor, to_rank](const Call& made) {
      Exchange exchange(link_);
      exchange.send(tensor, to_rank, made.tag(0));
      sent_.add(made.operation, made.bytes);
      exchange.wait_sends();
    });
  }

  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override {
    const Call call{.operation = Operation::kPair,
                    .sequence = pairs_received_[from_rank]++,
                    .bytes = bytes_of(tensor),
                    .what = std::move(what),
                    .peer = from_rank,
                    .end = Call::End::kReceives};
    return launch(call, tensor, [this, tensor, from_rank](const Call& made) {
      Exchange exchange(link_);
      exchange.wait_recv(exchange.recv(tensor, from_rank, made.tag(0)));
    });
  }

  WireTraffic sent() const override { return sent_.total(); }

  // ---- starting ----

  template <typename Body>
  Pending start(Operation operation, const at::Tensor& tensor, std::string what, Body body) {
    return launch({operation, next_sequence_++, bytes_of(tensor), std::move(what)}, tensor,
                  std::move(body));
  }

  template <typename Body>
  Pending launch(Call call, const at::Tensor& tensor, Body body) {
    return progress_.run(
        [this, call = std::move(call), body = std::move(body)] {
          // The thread may be one of the user's, who waits.
          const detail::BrokenPipeScope broken_pipe;
          try {
            watch_.perform(call, [&] { body(call); });
          } catch (const detail::PeerError& error) {
            fail(call, error);
          }
        },
        {tensor});
  }

  Slices even_slices(const at::Tensor& whole) const { return Slices::even(whole.numel(), size()); }

  // ---- algorithms, on the progress thread ----

  // Peers in an order that spreads the load: every rank begins with its right neighbour.
  template <typename Visit>
  void for_each_peer(Visit visit) const {
    for (int distance = 1; distance < size(); ++distance) visit((rank() + distance) % size());
  }

  void all_gather_slices(const Call& call, const at::Tensor& whole, const Slices& slices) {
    constexpr uint64_t kRound = uint64_t{1}
                                << 32;  // apart from the rounds of a reduction before it
    Exchange exchange(link_);
    std::vector<size_t> tickets;
    for_each_peer([&](int peer) {
      if (slices.count(peer) > 0) {
        tickets.push_back(exchange.recv(slices.of(whole, peer), peer, call.tag(kRound)));
      }
    });
    const at::Tensor own = slices.of(whole, rank());
    if (own.numel() > 0) {
      for_each_peer([&](int peer) {
        exchange.send(own, peer, call.tag(kRound));
        sent_.add(call.operation, bytes_of(own));
      });
    }
    for (const size_t ticket : tickets) exchange.wait_recv(ticket);
    exchange.wait_sends();
  }

  // Each slice goes to its owner, segment by segment, and is reduced there while the next segment
  // arrives.
  void reduce_slices(const Call& call, const at::Tensor& whole, const Slices& slices, ReduceOp op) {
    const int64_t segment_numel = kSegmentBytes / static_cast<int64_t>(whole.element_size());
    Exchange exchange(link_);
    for (int64_t first = 0, round = 0; first < slices.slice_numel;
         first += segment_numel, ++round) {
      for_each_peer([&](int peer) {
        const int64_t count = std::min(segment_numel, slices.count(peer) - first);
        if (count <= 0) return;
        const at::Tensor segment = whole.narrow(0, slices.first(peer) + first, count);
        exchange.send(segment, peer, call.tag(static_cast<uint64_t>(round)));
        sent_.add(call.operation, bytes_of(segment));
      });
    }
    const int64_t own_numel = slices.count(rank());
    const int64_t segments = memory::div_ceil(own_numel, segment_numel);
    const auto staging = [&](int64_t segment, int peer_index) {
      return staging_for(whole, segment_numel,
                         static_cast<int>(segment % 2) * (size() - 1) + peer_index);
    };
    const auto count_of = [&](int64_t segment) {
      return std::min(segment_numel, own_numel - segment * segment_numel);
    };
    std::vector<std::vector<size_t>> tickets(static_cast<size_t>(segments));
    const auto receive = [&](int64_t segment) {
      int peer_index = 0;
      for_each_peer([&](int peer) {
        const at::Tensor buffer = staging(segment, peer_index++).narrow(0, 0, count_of(segment));
        tickets[segment].push_back(
            exchange.recv(buffer, peer, call.tag(static_cast<uint64_t>(segment))));
      });
    };
    if (segments > 0) receive(0);
    std::vector<const void*> contributions(static_cast<size_t>(size()));
    for (int64_t segment = 0; segment < segments; ++segment) {
      if (segment + 1 < segments) receive(segment + 1);
      for (const size_t ticket : tickets[segment]) exchange.wait_recv(ticket);
      const at::Tensor own =
          whole.narrow(0, slices.first(rank()) + segment * segment_numel, count_of(segment));
      contributions[rank()] = own.data_ptr();
      int peer_index = 0;
      for_each_peer(
          [&](int peer) { contributions[peer] = staging(segment, peer_index++).data_ptr(); });
      reduce_in_rank_order(contributions, own.data_ptr(), own.numel(), whole.scalar_type(), op);
    }
    exchange.wait_sends();
  }

  void all_reduce_small(const Call& call, const at::Tensor& tensor, ReduceOp op) {
    const at::Tensor own = tensor.clone();
    Exchange exchange(link_);
    std::vector<at::Tensor> received(static_cast<size_t>(size()));
    std::vector<size_t> tickets;
    std::vector<const void*> contributions(static_cast<size_t>(size()), own.data_ptr());
    for_each_peer([&](int peer) {
      received[peer] = at::empty_like(tensor);
      contributions[peer] = received[peer].data_ptr();
      tickets.push_back(exchange.recv(received[peer], peer, call.tag(0)));
    });
    for_each_peer([&](int peer) {
      exchange.send(own, peer, call.tag(0));
      sent_.add(call.operation, call.bytes);
    });
    for (const size_t ticket : tickets) exchange.wait_recv(ticket);
    reduce_in_rank_order(contributions, tensor.data_ptr(), tensor.numel(), tensor.scalar_type(),
                         op);
    exchange.wait_sends();
  }

  // A binomial tree over ranks counted from the root: a rank receives once, then feeds ever nearer
  // ranks.
  void broadcast_tree(const Call& call, const at::Tensor& tensor, int root) {
    const int from_root = (rank() - root + size()) % size();
    const int span = static_cast<int>(std::bit_ceil(static_cast<unsigned>(size())));
    const int low_bit = from_root == 0 ? span : from_root & -from_root;
    Exchange exchange(link_);
    if (from_root != 0) {
      const int parent = (from_root - low_bit + root) % size();
      exchange.wait_recv(exchange.recv(tensor, parent, call.tag(0)));
    }
    for (int step = low_bit / 2; step > 0; step /= 2) {
      if (from_root + step >= size()) continue;
      exchange.send(tensor, (from_root + step + root) % size(), call.tag(0));
      sent_.add(call.operation, call.bytes);
    }
    exchange.wait_sends();
  }

  void disseminate(const Call& call) {
    const at::Tensor token = at::zeros({1}, at::kByte);
    const at::Tensor received = at::zeros({1}, at::kByte);
    for (int distance = 1; distance < size(); distance *= 2) {
      Exchange exchange(link_);
      const auto round = static_cast<uint64_t>(distance);
      const size_t ticket =
          exchange.recv(received, (rank() - distance + size()) % size(), call.tag(round));
      exchange.send(token, (rank() + distance) % size(), call.tag(round));
      sent_.add(call.operation, 0);
      exchange.wait_recv(ticket);
      exchange.wait_sends();
    }
  }

  at::Tensor staging_for(const at::Tensor& like, int64_t numel, int index) {
    memory::KindScope kind(memory::Kind::kStaging);
    if (staging_.empty()) staging_.resize(static_cast<size_t>(2 * (size() - 1)));
    at::Tensor& buffer = staging_[static_cast<size_t>(index)];
    if (!buffer.defined()) buffer = at::empty({kSegmentBytes}, at::kByte);
    return buffer.view(like.scalar_type()).narrow(0, 0, numel);
  }

  // ---- failing ----

  // Tells the others through the store, asks the store what they say, and throws the whole account.
  [[noreturn]] void fail(const Call& call, const detail::PeerError& error) {
    if (const auto verdict = watch_.verdict()) {
      const std::string ours = c10::str(call.describe(), ": ", verdict->words);
      account_of(verdict->other, ours, std::chrono::seconds(0));
      part(ours, /*silent=*/rank());
    }
    if (const auto lost = watch_.lost_rank(); lost && error.aborted) {
      fail_without(*lost, call, "its connection broke in the middle of a message");
    }
    ZP_CHECK(
        !error.aborted, call.describe(),
        ": the communicator was destroyed while this was in flight; wait for its Pending first");
    if (!error.timed_out) fail_without(error.peer, call, error.what());
    const std::string ours =
        c10::str(call.describe(), ": rank ", error.peer, " did not answer within ",
                 static_cast<double>(deadline_.count()) / 1000.0, " s");
    const auto theirs = account_of(error.peer, ours, kPostMortem);
    if (theirs && !theirs->empty()) {
      part(c10::str(ours, ". Rank ", error.peer, " had failed in ", *theirs), error.peer);
    }
    part(
        c10::str(ours, "; it hangs, was stopped, or is busy elsewhere. ", watch_.describe_others()),
        error.peer);
  }

  [[noreturn]] void fail_without(int peer, const Call& call, const std::string& reason) {
    const auto lost = [&call](int rank, const std::string& words) {
      return c10::str(call.describe(), ": lost rank ", rank, " (", words,
                      "); it has ended or was killed");
    };
    const std::string ours = lost(peer, reason);
    const std::string end = c10::str(". See the last lines of rank ", peer);
    // The kernel closes what a dead process had one after the other.
    if (peer == store_server_) std::this_thread::sleep_for(kLastClose);
    const bool served = store_server_ == rank() || detail::is_served(store_);
    if (!served && peer == store_server_) ZP_THROW(ours, end);
    if (!served && store_server_ >= 0) {
      // It would have waited for our account, had it ended because of the other.
      ZP_THROW(lost(store_server_, "it served the store, which has ended"), ". Rank ", peer,
               " has ended too");
    }
    const auto theirs = account_of(peer, ours, std::chrono::seconds(0));
    if (theirs && !theirs->empty()) {
      part(c10::str(ours, ". Rank ", peer, " had failed in ", *theirs), peer);
    }
    part(ours + end, peer);
  }

  // Publishes our account and returns the peer's if it has one within `patience`.
  std::optional<std::string> account_of(int peer, const std::string& ours,
                                        std::chrono::seconds patience) const {
    return detail::ask_within(patience + kPostMortem,
                              [store = store_, own_key = failure_key(rank()),
                               peer_key = failure_key(peer), ours, patience] {
                                if (!detail::is_served(store)) return std::string();
                                detail::write_key(*store, own_key, ours);
                                return detail::read_key(store, peer_key, patience).value_or("");
                              });
  }

  // The rank that serves the store lets the others say and read why they end before it ends itself.
  // A rank that is lost or hangs will not.
  [[noreturn]] void part(const std::string& words, int silent) {
    // The whole account, with what the peer said, before those who wait for us hear that we go.
    detail::ask_within(kPostMortem, [store = store_, own_key = failure_key(rank()),
                                     last_key = last_key(rank()), words] {
      if (!detail::is_served(store)) return std::string();
      detail::write_key(*store, own_key, words);
      detail::write_key(*store, last_key, "");
      return std::string();
    });
    link_.close();
    const auto leave_at = std::chrono::steady_clock::now() + kFarewell;
    for (int other = 0; rank() == store_server_ && other < size(); ++other) {
      if (other == silent || other == rank()) continue;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          leave_at - std::chrono::steady_clock::now());
      if (left.count() > 0) detail::read_key(store_, last_key(other), left);
    }
    ZP_THROW(words);
  }

  static std::string failure_key(int rank) { return c10::str("failed/", rank); }
  // There once a rank asks nothing more of the store.
  static std::string last_key(int rank) { return c10::str("parted/", rank); }

  // Constant after construction.
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::milliseconds deadline_;
  const int store_server_;

  // Owned by the calling thread.
  uint64_t next_sequence_ = 0;
  std::vector<uint64_t> pairs_sent_ = std::vector<uint64_t>(static_cast<size_t>(size()));
  std::vector<uint64_t> pairs_received_ = std::vector<uint64_t>(static_cast<size_t>(size()));

  // Owned by the progress thread.
  std::vector<at::Tensor> staging_;  // 2 x (size - 1) segments
  detail::TrafficCounter sent_;
  GlooLink link_;
  detail::Watch watch_;

  detail::ProgressThread progress_;  // last: its thread uses everything above
};

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(const GlooOptions& options) {
  return std::make_unique<GlooCommunicator>(options);
}

}  // namespace zeropage::comm
