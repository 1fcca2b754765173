#include "comm/shared_memory/shared_memory_communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/detail/call.h"
#include "comm/detail/kept_slice.h"
#include "comm/detail/places.h"
#include "comm/detail/progress_thread.h"
#include "comm/reduction.h"
#include "comm/shared_memory/host_copies.h"
#include "comm/shared_memory/host_slices.h"
#include "memory/bytes.h"
#include "memory/check.h"
#include "memory/exact.h"
#include "memory/ledger.h"

namespace zeropage::comm {
namespace {

using detail::bytes_of;
using detail::Call;
using detail::for_each_other;
using detail::HostLink;
using detail::HostSlices;
using detail::Operation;
using detail::Slices;
using detail::Watch;
using memory::operator""_KiB;
using Session = HostLink::Session;

// What is read of each rank before it is reduced: with the contributions of a few ranks it stays in
// the second-level cache.
constexpr int64_t kPeerSegmentBytes = 128_KiB;

std::byte* bytes_in(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

class SharedMemoryCommunicator final : public Communicator {
 public:
  SharedMemoryCommunicator(std::unique_ptr<HostLink> link, std::shared_ptr<Watch> watch)
      : Communicator(link->own(), link->size()),
        calls_(link->size(), link->names()),
        link_(std::move(link)),
        watch_(std::move(watch)) {
    for (int place = 0; place < size(); ++place) own_slices_.push_back({place});
    if (watch_) {
      watch_->start({.interrupt = [this] { link_->abort(); },
                     .lost_ranks = {},  // the link looks for them itself
                     .facts = {.hosts = {},
                               .state_of = [this](int rank) { return link_->state_of(rank); },
                               .broadcasts_wait = true},
                     .tell = [this](const detail::Account& account) { link_->fail(account); }});
    }
    memory::Ledger::current()->charge(memory::Kind::kStaging, segment_share());
  }

  ~SharedMemoryCommunicator() override {
    link_->abort();
    if (watch_) watch_->stop();
    ledger_->discharge(memory::Kind::kStaging, segment_share());
  }

  std::string_view transport() const override { return "shared"; }
  std::vector<int> lost_ranks() override { return link_->lost_ranks(); }
  std::shared_ptr<Watch> watch() const override { return watch_; }

 private:
  Pending start_all_gather(const at::Tensor& whole, std::string what) override {
    return start(Operation::kAllGather, whole, {.dtype = whole.scalar_type()}, std::move(what),
                 [this, whole](const Call& call, Session& session) {
                   const Slices slices = even_slices(whole);
                   count_gather(call, whole, slices);
                   if (copies_.gathers_through_slots(whole, slices, own_slices_)) {
                     copies_.gather_through_slots(session, whole, slices, own_slices_);
                   } else {
                     session.meet();
                     copies_.gather_from_peers(session, whole, slices, own_slices_);
                     session.meet();
                   }
                 });
  }

  Pending start_reduce_scatter(const at::Tensor& whole, ReduceOp op, std::string what) override {
    return start(Operation::kReduceScatter, whole, {.op = op, .dtype = whole.scalar_type()},
                 std::move(what), [this, whole, op](const Call& call, Session& session) {
                   const Slices slices = even_slices(whole);
                   count_reduction(call, whole, slices);
                   reduce_own_slice(call, session, whole, slices, op);
                 });
  }

  Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) override {
    return start(Operation::kAllReduce, tensor, {.op = op, .dtype = tensor.scalar_type()},
                 std::move(what), [this, tensor, op](const Call& call, Session& session) {
                   if (call.bytes <= detail::kSmallBytes) {
                     sent_.add(call.operation, call.bytes * (size() - 1), size() - 1);
                     all_reduce_small(session, tensor, op);
                     return;
                   }
                   const Slices slices = even_slices(tensor);
                   count_reduction(call, tensor, slices);
                   count_gather(call, tensor, slices);
                   if (call.bytes <= HostLink::kSlotBytes || !link_->reads_peers()) {
                     reduce_through_slots(session, tensor, slices, op, /*gather=*/true);
                   } else {
                     session.meet();
                     reduce_from_peers(session, tensor, slices, op);
                     session.meet();
                     copies_.gather_from_peers(session, tensor, slices, own_slices_);
                     session.meet();
                   }
                 });
  }

  Pending start_broadcast(const at::Tensor& tensor, int root, std::string what) override {
    return start(Operation::kBroadcast, tensor, {.dtype = tensor.scalar_type(), .root = root},
                 std::move(what), [this, tensor, root](const Call& call, Session& session) {
                   if (rank() == root) {
                     sent_.add(call.operation, call.bytes * (size() - 1), size() - 1);
                   }
                   copies_.broadcast(session, tensor, root);
                 });
  }

  Pending start_reduce(const at::Tensor& tensor, ReduceOp op, int root, std::string what) override {
    return start(Operation::kReduce, tensor,
                 {.op = op, .dtype = tensor.scalar_type(), .root = root}, std::move(what),
                 [this, tensor, op, root](const Call& call, Session& session) {
                   if (call.bytes <= detail::kSmallBytes) {
                     const Slices slices = Slices::all_at(root, tensor.numel());
                     count_reduction(call, tensor, slices);
                     reduce_through_slots(session, tensor, slices, op, /*gather=*/false);
                     return;
                   }
                   const Slices slices = even_slices(tensor);
                   count_reduction(call, tensor, slices);
                   const detail::KeptSlice kept(slices.of(tensor, rank()), rank() != root);
                   reduce_own_slice(call, session, tensor, slices, op);
                   HostSlices::Parts parts = parts_of(tensor, slices);
                   parts.own_lies_in_whole = true;
                   count_to(call, parts.bytes(rank()), root);
                   slices_.gather(session, parts, tensor, root);
                   kept.put_back();
                 });
  }

  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override {
    const HostSlices::Parts parts = parts_of(tensor, slices_at(tensor, root));
    return start_rooted(Operation::kGather, tensor, parts, root, std::move(what),
                        [this, tensor, parts, root](const Call& call, Session& session) {
                          count_to(call, parts.bytes(rank()), root);
                          slices_.gather(session, parts, tensor, root);
                        });
  }

  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override {
    const HostSlices::Parts parts = parts_of(tensor, slices_at(tensor, root));
    return start_rooted(Operation::kScatter, tensor, parts, root, std::move(what),
                        [this, tensor, parts, root](const Call& call, Session& session) {
                          if (rank() == root) count_reduction(call, tensor, parts.slices);
                          slices_.scatter(session, parts, tensor, root);
                        });
  }

  Pending start_all_to_all(const at::Tensor& given, const at::Tensor& received,
                           std::string what) override {
    return start(Operation::kAllToAll, given, {.dtype = given.scalar_type()}, std::move(what),
                 [this, given, received](const Call& call, Session& session) {
                   const Slices slices = even_slices(given);
                   count_reduction(call, given, slices);
                   detail::copy_bytes(slices.of(received, rank()), slices.of(given, rank()));
                   slices_.exchange(session, parts_of(given, slices), given, received);
                 });
  }

  Pending start_barrier(std::string what) override {
    return start(Operation::kBarrier, at::empty({0}, at::kByte), {}, std::move(what),
                 [](const Call&, Session& session) { session.meet(); });
  }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    return launch(calls_.send(tensor, to_rank, std::move(what)), tensor,
                  [this, tensor, to_rank](const Call& made) {
                    link_->send(to_rank, made, tensor.data_ptr());
                    sent_.add(made.operation, made.bytes);
                  });
  }

  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override {
    return launch(calls_.recv(tensor, from_rank, std::move(what)), tensor,
                  [this, tensor, from_rank](const Call& made) {
                    link_->receive(from_rank, made, tensor.data_ptr());
                  });
  }

  WireTraffic sent() const override { return sent_.total(); }

  // ---- starting ----

  template <typename Body>
  Pending start(Operation operation, const at::Tensor& tensor, const HostLink::Details& details,
                std::string what, Body body) {
    const Call call = calls_.collective(operation, tensor, std::move(what));
    return launch(call, tensor, [this, tensor, details, body = std::move(body)](const Call& made) {
      Session session(*link_, made, details, tensor.data_ptr());
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
                    Session session(*link_, made, {.dtype = tensor.scalar_type(), .root = root},
                                    tensor.data_ptr());
                    body(made, session);
                  });
  }

  template <typename Body>
  Pending launch(Call call, const at::Tensor& tensor, Body body) {
    return progress_.run(
        [this, call = std::move(call), body = std::move(body)] {
          try {
            if (watch_) {
              watch_->perform(call, [&] { body(call); });
            } else {
              body(call);
            }
          } catch (const detail::PeerError& error) {
            fail(call, error);
          } catch (const std::exception& error) {
            tell_of({memory::message_of(error), call.describe()});
            throw;
          }
        },
        {tensor});
  }

  [[noreturn]] void fail(const Call& call, const detail::PeerError& error) {
    const auto verdict = watch_ ? watch_->verdict() : std::nullopt;
    ZP_CHECK(
        !error.aborted || verdict, call.describe(),
        ": the communicator was destroyed while this was in flight; wait for its Pending first");
    const detail::Account account{error.aborted ? verdict->words : error.what(), call.describe()};
    tell_of(account);
    ZP_THROW(account.words());
  }

  void tell_of(const detail::Account& account) {
    link_->fail(account);
    if (watch_) watch_->tell_kin(account);
  }

  Slices even_slices(const at::Tensor& whole) const { return Slices::even(whole.numel(), size()); }
  // The slices of what the root has whole.
  Slices slices_at(const at::Tensor& tensor, int root) const {
    return Slices::even(rank() == root ? tensor.numel() : tensor.numel() * size(), size());
  }
  static HostSlices::Parts parts_of(const at::Tensor& tensor, const Slices& slices) {
    return {.slices = slices, .element_bytes = static_cast<int64_t>(tensor.element_size())};
  }

  // ---- counting ----

  void count_gather(const Call& call, const at::Tensor& whole, const Slices& slices) {
    const int64_t own_bytes = slices.count(rank()) * static_cast<int64_t>(whole.element_size());
    if (own_bytes > 0) sent_.add(call.operation, own_bytes * (size() - 1), size() - 1);
  }

  void count_reduction(const Call& call, const at::Tensor& whole, const Slices& slices) {
    for (int peer = 0; peer < size(); ++peer) {
      const int64_t bytes = slices.count(peer) * static_cast<int64_t>(whole.element_size());
      if (peer != rank() && bytes > 0) sent_.add(call.operation, bytes);
    }
  }

  void count_to(const Call& call, int64_t bytes, int root) {
    if (rank() != root && bytes > 0) sent_.add(call.operation, bytes);
  }

  void reduce_own_slice(const Call& call, Session& session, const at::Tensor& whole,
                        const Slices& slices, ReduceOp op) {
    if (call.bytes <= HostLink::kSlotBytes || !link_->reads_peers()) {
      reduce_through_slots(session, whole, slices, op, /*gather=*/false);
      return;
    }
    session.meet();
    reduce_from_peers(session, whole, slices, op);
    session.meet();
  }

  // ---- straight from the peers' memory ----

  void reduce_from_peers(const Session& session, const at::Tensor& whole, const Slices& slices,
                         ReduceOp op) {
    const auto element_bytes = static_cast<int64_t>(whole.element_size());
    const int64_t segment_numel = kPeerSegmentBytes / element_bytes;
    const int64_t end = slices.first(rank()) + slices.count(rank());
    std::byte* staging = this->staging();
    std::vector<const void*> contributions(static_cast<size_t>(size()));
    for (int64_t first = slices.first(rank()); first < end; first += segment_numel) {
      const int64_t numel = std::min(segment_numel, end - first);
      std::byte* own = bytes_in(whole) + first * element_bytes;
      contributions[static_cast<size_t>(rank())] = own;
      std::byte* next = staging;
      for_each_other(rank(), size(), [&](int peer) {
        session.read(peer, first * element_bytes, next, numel * element_bytes);
        contributions[static_cast<size_t>(peer)] = std::exchange(next, next + kPeerSegmentBytes);
      });
      reduce_in_rank_order(contributions, own, numel, whole.scalar_type(), op);
    }
  }

  // ---- through slots ----

  // A round takes a piece of every slice: the ranks put theirs down, each reduces its own slice's,
  // and puts the result down if all want it.
  void reduce_through_slots(Session& session, const at::Tensor& whole, const Slices& slices,
                            ReduceOp op, bool gather) const {
    const auto element_bytes = static_cast<int64_t>(whole.element_size());
    const int64_t round_numel = HostLink::kSlotBytes / element_bytes / size();
    std::vector<const void*> contributions(static_cast<size_t>(size()));
    int64_t first = 0;
    do {
      const auto numel_of = [&](int place) {
        return std::clamp<int64_t>(slices.count(place) - first, 0, round_numel);
      };
      const auto place_of = [&](int place) {
        return bytes_in(whole) + (slices.first(place) + first) * element_bytes;
      };
      for_each_other(rank(), size(), [&](int peer) {
        if (numel_of(peer) == 0) return;
        copy_bytes(session.own_slot() + peer * round_numel * element_bytes, place_of(peer),
                   numel_of(peer) * element_bytes);
      });
      session.meet();
      if (numel_of(rank()) > 0) {
        for (int place = 0; place < size(); ++place) {
          contributions[static_cast<size_t>(place)] =
              session.slot(place) + rank() * round_numel * element_bytes;
        }
        contributions[static_cast<size_t>(rank())] = place_of(rank());
        reduce_in_rank_order(contributions, place_of(rank()), numel_of(rank()), whole.scalar_type(),
                             op);
      }
      if (gather) {
        if (numel_of(rank()) > 0) {
          copy_bytes(session.own_slot(), place_of(rank()), numel_of(rank()) * element_bytes);
        }
        session.meet();
        for_each_other(rank(), size(), [&](int peer) {
          if (numel_of(peer) == 0) return;
          copy_bytes(place_of(peer), session.slot(peer), numel_of(peer) * element_bytes);
        });
      }
      first += round_numel;
    } while (first < slices.slice_numel);
  }

  void all_reduce_small(Session& session, const at::Tensor& tensor, ReduceOp op) const {
    if (tensor.numel() > 0) copy_bytes(session.own_slot(), bytes_in(tensor), bytes_of(tensor));
    session.meet();
    std::vector<const void*> contributions;
    for (int place = 0; place < size(); ++place) contributions.push_back(session.slot(place));
    reduce_in_rank_order(contributions, tensor.data_ptr(), tensor.numel(), tensor.scalar_type(),
                         op);
  }

  // One segment a peer.
  std::byte* staging() {
    if (!staging_.defined()) {
      const memory::KindScope kind(memory::Kind::kStaging);
      staging_ = at::empty({(size() - 1) * kPeerSegmentBytes}, at::kByte);
    }
    return bytes_in(staging_);
  }

  // The segment is counted once a host, in equal parts.
  int64_t segment_share() const { return link_->bytes() / size(); }

  // Constant after construction.
  const std::shared_ptr<memory::Ledger> ledger_ = memory::Ledger::current();
  detail::HostCopies::Held own_slices_;  // a rank holds its own

  // Owned by the calling thread.
  detail::CallNumbers calls_;

  // Owned by the thread that performs.
  at::Tensor staging_;
  detail::TrafficCounter sent_;
  const std::unique_ptr<HostLink> link_;
  const std::shared_ptr<Watch> watch_;  // may be null
  const detail::HostCopies copies_{*link_};
  const HostSlices slices_{*link_, all_ranks(link_->size())};

  detail::ProgressThread progress_;  // last: its thread uses everything above
};

}  // namespace

std::unique_ptr<Communicator> make_shared_memory_communicator(
    std::unique_ptr<detail::HostLink> link, std::shared_ptr<detail::Watch> watch) {
  return std::make_unique<SharedMemoryCommunicator>(std::move(link), std::move(watch));
}

}  // namespace zeropage::comm
