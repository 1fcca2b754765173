#include "comm/shared_memory/host_link.h"

#include <exception>
#include <utility>
#include <vector>

#include "comm/detail/peer_error.h"

namespace zeropage::comm::detail {
namespace {

using Announcement = HostSegment::Announcement;
using Board = HostSegment::Board;
using Condition = HostSegment::Condition;
using Header = HostSegment::Header;

}  // namespace

HostLink::HostLink(SharedSegment segment, const Options& options)
    : segment_(std::move(segment), static_cast<int>(options.peers.ranks.size()), options.peers.own),
      peers_(segment_, options.peers),
      wait_(segment_, peers_, options.deadline, options.ends_at_deadline),
      pairs_(segment_, peers_, wait_) {}

HostLink::~HostLink() {
  Condition present = Condition::kPresent;
  segment_.board(peers_.own())
      .condition.compare_exchange_strong(
          present, std::uncaught_exceptions() > 0 ? Condition::kGone : Condition::kLeft);
  futex_wake_all(segment_.header().meetings);
}

void HostLink::fail(const FailureReason& account) {
  const std::lock_guard lock(failing_);
  Board& ours = segment_.board(peers_.own());
  if (ours.condition.load() == Condition::kFailed) return;
  ours.account.assign(account.to_text());
  ours.condition.store(Condition::kFailed, std::memory_order_release);
  futex_wake_all(segment_.header().meetings);
}

// ---- collectives ----

void HostLink::meet(HostWait::Moment give_up_at) {
  Header& common = segment_.header();
  const uint64_t round = rounds_ + 1;
  segment_.board(peers_.own()).arrivals.store(round, std::memory_order_release);
  const uint32_t arrived = common.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
  // Counts modulo 2^32.
  if (arrived == static_cast<uint32_t>(round) * static_cast<uint32_t>(peers_.size())) {
    common.meetings.store(static_cast<uint32_t>(round), std::memory_order_seq_cst);
    if (common.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(common.meetings);
  } else {
    wait_.until(
        common.meetings,
        [&] {
          return static_cast<int32_t>(common.meetings.load(std::memory_order_acquire) -
                                      static_cast<uint32_t>(round)) >= 0;
        },
        [&] {
          std::vector<int> missing;
          for (int place = 0; place < peers_.size(); ++place) {
            if (segment_.board(place).arrivals.load(std::memory_order_acquire) < round) {
              missing.push_back(place);
            }
          }
          return missing;
        },
        give_up_at);
  }
  rounds_ = round;
}

HostLink::Session::Session(HostLink& link, const Call& call, const Details& details,
                           const void* address)
    : link_(link), give_up_at_(link.wait_.give_up_at()), number_(link.sessions_++) {
  Board& own = link.segment_.board(link.peers_.own());
  Announcement& announcement = own.announcements[number_ % 2];
  announcement = {.operation = call.operation,
                  .op = details.op,
                  .dtype = details.dtype,
                  .root = details.root < 0 ? -1 : link.peers_.names()[details.root],
                  .sequence = call.sequence,
                  .bytes = call.bytes,
                  .address = reinterpret_cast<uint64_t>(address),
                  .what = {}};
  announcement.what.assign(call.what);
  own.sessions.store(number_ + 1, std::memory_order_release);
}

std::byte* HostLink::Session::own_slot() {
  return link_.segment_.slot(link_.peers_.own(), link_.rounds_ + 1);
}

const std::byte* HostLink::Session::slot(int place) const {
  return link_.segment_.slot(place, link_.rounds_);
}

void HostLink::Session::meet() {
  link_.meet(give_up_at_);
  if (!std::exchange(met_, true)) check_announcements();
  link_.segment_.board(link_.peers_.own()).ended.store(number_ + 1, std::memory_order_release);
}

void HostLink::Session::check_announcements() const {
  const Announcement& ours = link_.segment_.board(link_.peers_.own()).announcements[number_ % 2];
  for (int place = 0; place < link_.peers_.size(); ++place) {
    const Announcement& theirs = link_.segment_.board(place).announcements[number_ % 2];
    if (theirs.agrees_with(ours)) continue;
    const std::string there = theirs.call().describe();
    const bool alike = there == ours.call().describe();
    throw PeerError::explain(
        link_.peers_.rank_of(place),
        c10::str("rank ", link_.peers_.name_of(place), " is out of step: it waits in ", there,
                 alike ? theirs.difference_from(ours) : std::string(), kSameOrder));
  }
}

void HostLink::Session::read(int place, int64_t offset, void* into, int64_t bytes) const {
  const uint64_t address = link_.segment_.board(place).announcements[number_ % 2].address;
  link_.peers_.read(place, address + static_cast<uint64_t>(offset), into, bytes);
}

}  // namespace zeropage::comm::detail
