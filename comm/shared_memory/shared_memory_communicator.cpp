#include "comm/shared_memory/shared_memory_communicator.h"

#include <utility>
#include <vector>

#include "comm/detail/call.h"
#include "comm/detail/kept_slice.h"
#include "comm/detail/peer_error.h"
#include "comm/detail/progress_thread.h"
#include "comm/shared_memory/host_copies.h"
#include "comm/shared_memory/host_reduction.h"
#include "comm/shared_memory/host_slices.h"
#include "comm/shared_memory/segment_charge.h"
#include "zeropage/check.h"

namespace zeropage::comm {
namespace {

using detail::Call;
using detail::HostLink;
using detail::HostSlices;
using detail::Operation;
using detail::Slices;
using detail::Watch;
using Parts = HostSlices::Parts;
using Session = HostLink::Session;

class SharedMemoryCommunicator final : public Communicator {
 public:
  SharedMemoryCommunicator(std::unique_ptr<HostLink> link, std::shared_ptr<Watch> watch)
      : Communicator(link->peers().own(), link->peers().size()),
        calls_(link->peers().size(), link->peers().names()),
        link_(std::move(link)),
        watch_(std::move(watch)) {
    for (int place = 0; place < size(); ++place) own_slices_.push_back({place});
    if (watch_) {
      watch_->start(
          {.interrupt = [this] { link_->abort(); },
           .lost_ranks = {},  // the link looks for them itself
           .facts = {.hosts = {},
                     .state_of = [this](int rank) { return link_->peers().state_of(rank); },
                     .broadcasts_wait = true},
           .tell = [this](const detail::FailureReason& account) { link_->fail(account); }});
    }
  }

  ~SharedMemoryCommunicator() override {
    link_->abort();
    if (watch_) watch_->stop();
  }

  std::string_view transport() const override { return "shared"; }
  std::vector<int> lost_ranks() override { return link_->peers().lost_ranks(); }
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
                   reduction_.reduce_slices(session, whole, slices, op);
                 });
  }

  Pending start_all_reduce(const at::Tensor& tensor, ReduceOp op, std::string what) override {
    return start(Operation::kAllReduce, tensor, {.op = op, .dtype = tensor.scalar_type()},
                 std::move(what), [this, tensor, op](const Call& call, Session& session) {
                   if (call.bytes <= detail::kSmallBytes) {
                     sent_.add(call.operation, call.bytes * (size() - 1), size() - 1);
                     reduction_.reduce_everywhere(session, tensor, op);
                     return;
                   }
                   const Slices slices = even_slices(tensor);
                   count_reduction(call, tensor, slices);
                   count_gather(call, tensor, slices);
                   if (reduction_.goes_through_slots(call.bytes)) {
                     reduction_.reduce_through_slots(session, tensor, slices, op, /*gather=*/true);
                   } else {
                     session.meet();
                     reduction_.reduce_from_peers(session, tensor, slices, op);
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
                     reduction_.reduce_through_slots(session, tensor, slices, op, /*gather=*/false);
                     return;
                   }
                   const Slices slices = even_slices(tensor);
                   count_reduction(call, tensor, slices);
                   const detail::KeptSlice kept(slices.of(tensor, rank()), rank() != root);
                   reduction_.reduce_slices(session, tensor, slices, op);
                   Parts parts = Parts::even(tensor, size());
                   parts.own_lies_in_whole = true;
                   count_to(call, parts.bytes(rank()), root);
                   slices_.gather(session, parts, tensor, root);
                   kept.put_back();
                 });
  }

  Pending start_gather(const at::Tensor& tensor, int root, std::string what) override {
    const Parts parts = Parts::with_root(tensor, rank() == root, size());
    return start_rooted(Operation::kGather, tensor, parts, root, std::move(what),
                        [this, tensor, parts, root](const Call& call, Session& session) {
                          count_to(call, parts.bytes(rank()), root);
                          slices_.gather(session, parts, tensor, root);
                        });
  }

  Pending start_scatter(const at::Tensor& tensor, int root, std::string what) override {
    const Parts parts = Parts::with_root(tensor, rank() == root, size());
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
                   slices_.exchange(session, Parts::even(given, size()), given, received);
                 });
  }

  Pending start_barrier(std::string what) override {
    return start(Operation::kBarrier, at::empty({0}, at::kByte), {}, std::move(what),
                 [](const Call&, Session& session) { session.meet(); });
  }

  Pending start_send(const at::Tensor& tensor, int to_rank, std::string what) override {
    return launch(calls_.send(tensor, to_rank, std::move(what)), tensor,
                  [this, tensor, to_rank](const Call& made) {
                    link_->pairs().send(to_rank, made, tensor.data_ptr());
                    sent_.add(made.operation, made.bytes);
                  });
  }

  Pending start_recv(const at::Tensor& tensor, int from_rank, std::string what) override {
    return launch(calls_.recv(tensor, from_rank, std::move(what)), tensor,
                  [this, tensor, from_rank](const Call& made) {
                    link_->pairs().receive(from_rank, made, tensor.data_ptr());
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
  Pending start_rooted(Operation operation, const at::Tensor& tensor, const Parts& parts, int root,
                       std::string what, Body body) {
    return launch(calls_.collective(operation, parts.all_bytes(), std::move(what)), tensor,
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
              watch_->activity().perform(call, [&] { body(call); });
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
    const auto verdict = watch_ ? watch_->activity().verdict() : std::nullopt;
    ZP_CHECK(
        !error.aborted || verdict, call.describe(),
        ": the communicator was destroyed while this was in flight; wait for its Pending first");
    const detail::FailureReason account{error.aborted ? verdict->words : error.what(),
                                        call.describe()};
    tell_of(account, error.left);
    ZP_THROW(account.words());
  }

  void tell_of(const detail::FailureReason& account, bool of_leave = false) {
    link_->fail(account);
    if (!watch_) return;
    if (of_leave) {
      watch_->leave_group(account);
    } else {
      watch_->fail_group(account);
    }
  }

  Slices even_slices(const at::Tensor& whole) const { return Slices::even(whole.numel(), size()); }

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

  // Constant after construction.
  detail::HostCopies::Held own_slices_;  // a rank holds its own

  // Owned by the calling thread.
  detail::CallNumbers calls_;

  // Owned by the thread that performs.
  detail::TrafficCounter sent_;
  const std::unique_ptr<HostLink> link_;
  const std::shared_ptr<Watch> watch_;  // may be null
  const detail::SegmentCharge charge_{link_->bytes() / size()};
  const detail::HostCopies copies_{link_->peers()};
  const HostSlices slices_{link_->peers()};
  detail::HostReduction reduction_{link_->peers()};

  detail::ProgressThread progress_;  // last: its thread uses everything above
};

}  // namespace

std::unique_ptr<Communicator> make_shared_memory_communicator(
    std::unique_ptr<detail::HostLink> link, std::shared_ptr<detail::Watch> watch) {
  return std::make_unique<SharedMemoryCommunicator>(std::move(link), std::move(watch));
}

}  // namespace zeropage::comm
