#include "comm/gloo/gloo_communicator.h"

#include <algorithm>
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
#include "comm/gloo/watched_link.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/communicator.h"
#include "zeropage/ledger.h"

namespace zeropage::comm {
namespace {

using detail::bytes_of;
using detail::Call;
using detail::for_each_other;
using detail::kSegmentBytes;
using detail::Operation;
using detail::Slices;
using Exchange = detail::GlooLink::Exchange;

class GlooCommunicator final : public Communicator {
 public:
  explicit GlooCommunicator(const detail::WatchedLink::Options& options)
      : Communicator(options.rank, options.size),
        calls_(options.size, options.names),
        link_(options) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }

  ~GlooCommunicator() override { link_.abort(); }

  std::string_view transport() const override { return "gloo"; }
  std::vector<int> lost_ranks() override { return link_.lost_peers(); }
  std::shared_ptr<detail::Watch> watch() const override { return link_.watch(); }

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
                     rounds_.reduce_everywhere(call, tensor, op, ranks_, rank());
                   } else {
                     const Slices slices = even_slices(tensor);
                     reduce_slices(call, tensor, slices, op);
                     all_gather_slices(call, tensor, slices);
                   }
                 });
  }

  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override {
    return start(Operation::kBroadcast, tensor, std::move(what),
                 [this, tensor, root](const Call& call) {
                   rounds_.broadcast(call, tensor, ranks_, rank(), root);
                 });
  }

  Pending start_reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string what) override {
    return start(Operation::kReduce, tensor, std::move(what),
                 [this, tensor, op, root](const Call& call) {
                   if (call.bytes <= detail::kSmallBytes) {
                     reduce_slices(call, tensor, Slices::all_at(root, tensor.numel()), op);
                     return;
                   }
                   const Slices slices = even_slices(tensor);
                   const at::Tensor own = slices.of(tensor, rank());
                   const detail::KeptSlice kept(own, rank() != root);
                   reduce_slices(call, tensor, slices, op);
                   messages_.gather(call, own, tensor, slices, root);
                   kept.put_back();
                 });
  }

  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override {
    const Slices slices = slices_at(tensor, root);
    return launch(rooted(Operation::kGather, tensor, slices, std::move(what)), tensor,
                  [this, tensor, root, slices](const Call& call) {
                    messages_.gather(call, tensor, tensor, slices, root);
                  });
  }

  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override {
    const Slices slices = slices_at(tensor, root);
    return launch(rooted(Operation::kScatter, tensor, slices, std::move(what)), tensor,
                  [this, tensor, root, slices](const Call& call) {
                    messages_.scatter(call, tensor, tensor, slices, root);
                  });
  }

  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string what) override {
    return start(Operation::kAllToAll, given, std::move(what),
                 [this, given, received](const Call& call) {
                   const Slices slices = even_slices(given);
                   detail::copy_bytes(slices.of(received, rank()), slices.of(given, rank()));
                   messages_.exchange(call, given, received, slices);
                 });
  }

  Pending start_barrier(std::string what) override {
    return start(Operation::kBarrier, at::empty({0}, at::kByte), std::move(what),
                 [this](const Call& call) { rounds_.disseminate(call, ranks_, rank()); });
  }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    return launch(calls_.send(tensor, to_rank, std::move(what)), tensor,
                  [this, tensor, to_rank](const Call& made) {
                    Exchange exchange(link_.messages());
                    exchange.send(tensor, to_rank, made.tag(0));
                    sent_.add(made.operation, made.bytes);
                    exchange.wait_sends();
                  });
  }

  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override {
    return launch(calls_.recv(tensor, from_rank, std::move(what)), tensor,
                  [this, tensor, from_rank](const Call& made) {
                    Exchange exchange(link_.messages());
                    exchange.wait_recv(exchange.recv(tensor, from_rank, made.tag(0)));
                  });
  }

  WireTraffic sent() const override { return sent_.total(); }

  // ---- starting ----

  template <typename Body>
  Pending start(Operation operation, const at::Tensor& tensor, std::string what, Body body) {
    return launch(calls_.collective(operation, tensor, std::move(what)), tensor, std::move(body));
  }

  // The slices of what the root has whole.
  Slices slices_at(const at::Tensor& tensor, int root) const {
    return even_slices(rank() == root ? tensor.numel() : tensor.numel() * size());
  }
  Call rooted(Operation operation, const at::Tensor& tensor, const Slices& slices,
              std::string what) {
    return calls_.collective(operation, slices.numel * static_cast<int64_t>(tensor.element_size()),
                             std::move(what));
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

  Slices even_slices(const at::Tensor& whole) const { return even_slices(whole.numel()); }
  Slices even_slices(int64_t numel) const { return Slices::even(numel, size()); }

  std::vector<int> others() const {
    std::vector<int> ranks;
    for_each_other(rank(), size(), [&](int peer) { ranks.push_back(peer); });
    return ranks;
  }

  // ---- algorithms, on the progress thread ----

  void all_gather_slices(const Call& call, const at::Tensor& whole, const Slices& slices) {
    constexpr uint64_t kRound = uint64_t{1}
                                << 32;  // apart from the rounds of a reduction before it
    Exchange exchange(link_.messages());
    std::vector<size_t> tickets;
    for_each_other(rank(), size(), [&](int peer) {
      if (slices.count(peer) > 0) {
        tickets.push_back(exchange.recv(slices.of(whole, peer), peer, call.tag(kRound)));
      }
    });
    const at::Tensor own = slices.of(whole, rank());
    if (own.numel() > 0) {
      for_each_other(rank(), size(), [&](int peer) {
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
    Exchange exchange(link_.messages());
    for (int64_t first = 0, round = 0; first < slices.slice_numel;
         first += segment_numel, ++round) {
      for_each_other(rank(), size(), [&](int peer) {
        const int64_t count = std::min(segment_numel, slices.count(peer) - first);
        if (count <= 0) return;
        const at::Tensor segment = whole.narrow(0, slices.first(peer) + first, count);
        exchange.send(segment, peer, call.tag(static_cast<uint64_t>(round)));
        sent_.add(call.operation, bytes_of(segment));
      });
    }
    const int64_t own_numel = slices.count(rank());
    const int64_t segments = base::div_ceil(own_numel, segment_numel);
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
      for_each_other(rank(), size(), [&](int peer) {
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
      for_each_other(rank(), size(), [&](int peer) {
        contributions[peer] = staging(segment, peer_index++).data_ptr();
      });
      reduce_in_rank_order(contributions, own.data_ptr(), own.numel(), whole.scalar_type(), op);
    }
    exchange.wait_sends();
  }

  at::Tensor staging_for(const at::Tensor& like, int64_t numel, int index) {
    memory::KindScope kind(memory::Kind::kStaging);
    if (staging_.empty()) staging_.resize(2 * static_cast<size_t>(size() - 1));
    at::Tensor& buffer = staging_[static_cast<size_t>(index)];
    if (!buffer.defined()) buffer = at::empty({kSegmentBytes}, at::kByte);
    return buffer.view(like.scalar_type()).narrow(0, 0, numel);
  }

  // Constant after construction.
  std::vector<int> ranks_ = std::vector<int>(static_cast<size_t>(size()));  // all of them

  // Owned by the calling thread.
  detail::CallNumbers calls_;

  // Owned by the progress thread.
  std::vector<at::Tensor> staging_;  // 2 x (size - 1) segments
  detail::TrafficCounter sent_;
  detail::WatchedLink link_;
  detail::MessageRounds rounds_{link_.messages(), sent_};
  detail::SliceMessages messages_{link_.messages(), sent_, rank(), others()};

  detail::ProgressThread progress_;  // last: its thread uses everything above
};

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(const detail::WatchedLink::Options& options) {
  return std::make_unique<GlooCommunicator>(options);
}

}  // namespace zeropage::comm
