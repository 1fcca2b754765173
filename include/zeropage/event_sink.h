// An interface that gets the events of a rank's bytes, pages and messages while a step is recorded
// (profile/recorder.h).
//
// A sink is put on a rank's ledger. Everything that works for the rank finds it there: the ledger itself, the
// pagers, the communicators, the copy engine, the named ranges of the code. Without one, each of these
// costs a relaxed load of a pointer.
//
// Lifetime: whoever calls a sink keeps it alive for as long as the call.
// Threads: any may call. on_ledger() is called under the ledger's mutex, in the order in which its bytes
// change, so it must neither use a ledger nor allocate a tensor.
// Times are of std::chrono::steady_clock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

namespace zeropage::memory {

enum class Kind : uint8_t;

// Where bytes are counted. A ledger has a total of each.
enum class Account : uint8_t { kHost, kAccelerator, kMeta, kHostTier, kNvmeTier };
inline constexpr size_t kAccountCount = 5;

// A change of one total. Its kind is that of the bytes from here on.
struct LedgerEvent {
  enum class What : uint8_t { kCharge, kDischarge, kRename };

  What what;
  Account account;
  Kind kind;
  Kind kind_before;  // of a rename; else `kind`
  int64_t bytes;
  int64_t total;      // of the account, afterwards
  const void* block;  // tells live blocks apart; null for bytes that are charged by hand
};

// What becomes of a page, or of its gradient.
enum class PageChange : uint8_t {
  kFetching,  // on its way to this rank
  kResident,  // whole here
  kEvicted,   // only the shard is left
  kReducing,  // its gradient travels
  kReduced,
};

struct PageEvent {
  PageChange change;
  std::string_view pages;  // of what: "parameter", "gradient"
  std::string_view page;
  int64_t bytes;  // of the whole page; 0: not known
};

// A stretch of time that has ended.
struct Span {
  enum class What : uint8_t {
    kRange,       // of the code (device/named_range.h)
    kCollective,  // on the wire; of an accelerator the moment when it was enqueued
    kCopy,        // between a device and a tier; of an accelerator likewise
    kWait,        // a thread of the host stood still
  };
  using Time = std::chrono::steady_clock::time_point;

  What what;
  std::string_view name;  // "all_gather", "DistributedDataParallel::forward"
  std::string_view of;    // what it moved or waited for, such as a page; "": not known
  int64_t bytes = 0;
  Time begin;
  Time end;
};

class EventSink {
 public:
  virtual ~EventSink() = default;
  EventSink(const EventSink&) = delete;
  EventSink& operator=(const EventSink&) = delete;

  virtual void on_ledger(const LedgerEvent& event) = 0;
  virtual void on_page(const PageEvent& event) = 0;
  virtual void on_span(const Span& span) = 0;

 protected:
  EventSink() = default;
};

// A place for one sink.
class EventSinkSlot {
 public:
  bool empty() const { return !taken_.load(std::memory_order_relaxed); }
  // Null: there is none.
  std::shared_ptr<EventSink> get() const {
    if (empty()) return nullptr;
    const std::lock_guard lock(mutex_);
    return sink_;
  }
  // Returns what was there.
  std::shared_ptr<EventSink> exchange(std::shared_ptr<EventSink> sink) {
    const std::lock_guard lock(mutex_);
    taken_.store(sink != nullptr, std::memory_order_relaxed);
    return std::exchange(sink_, std::move(sink));
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<EventSink> sink_;  // guarded by mutex_
  std::atomic<bool> taken_{false};
};

// The sink of the calling thread's ledger; null: none.
std::shared_ptr<EventSink> current_sink();

// Names the owner of what the calling thread allocates and waits for, while it lives: a part of the code, and a
// page of it.
// Both outlive it. Ends in reverse order on the thread that made it.
class OwnerScope {
 public:
  explicit OwnerScope(const char* owner, std::string_view page = {});
  ~OwnerScope();
  OwnerScope(const OwnerScope&) = delete;
  OwnerScope& operator=(const OwnerScope&) = delete;

  struct Owner {
    const char* name = "";
    std::string_view page;
  };
  // The owner that the innermost scope of the calling thread names.
  static Owner current();

 private:
  const Owner before_;
};

// Reports the time from its construction to its end to the calling thread's sink.
class SpanScope {
 public:
  // name: outlives it.
  SpanScope(Span::What what, const char* name) : what_(what), name_(name), sink_(current_sink()) {
    if (sink_) begin_ = std::chrono::steady_clock::now();
  }
  ~SpanScope() {
    if (sink_) end();
  }
  SpanScope(const SpanScope&) = delete;
  SpanScope& operator=(const SpanScope&) = delete;

 private:
  void end() const;

  const Span::What what_;
  const char* const name_;
  const std::shared_ptr<EventSink> sink_;
  Span::Time begin_;
};

}  // namespace zeropage::memory
