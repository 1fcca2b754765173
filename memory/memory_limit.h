// A limit on what a ledger may hold: an allocation that would pass it throws, and charges nothing. The error
// names the kind, the phase, the owner and the page of that allocation, has the ledger's table and its last changes,
// and says what makes the step fit where somebody knows.
//
// Lifetime: in force while the scope lives, in any order with others; the lowest limit counts.
// Threads: any. Cost: without a limit one comparison an allocation. While a scope lives, each allocation and each free
// is also noted for errors, in some 13 ns.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <c10/core/DeviceType.h>

#include "zeropage/event_sink.h"
#include "zeropage/ledger.h"

namespace zeropage::memory {

// Bytes of a rank.
struct MemoryLimits {
  static constexpr int64_t kNone = 0;

  // Most bytes of tensors on `device`.
  int64_t device_bytes = kNone;
  c10::DeviceType device = c10::DeviceType::CPU;
  // Most bytes of tensors on the host, and of what is offloaded to it.
  int64_t host_bytes = kNone;

  bool any() const { return device_bytes != kNone || host_bytes != kNone; }
};

// Whether it is of what a forward and its backward make.
inline bool is_of_activations(Kind kind) {
  return kind == Kind::kActivation || kind == Kind::kRecompute || kind == Kind::kActivationAndOther;
}

// What did not fit, and where.
struct MemoryRequest {
  c10::DeviceType device = c10::DeviceType::CPU;
  Kind kind = Kind::kActivationAndOther;
  int64_t asked_bytes = 0;
  int64_t missing_bytes = 0;
  // What is offloaded to the host is counted with the tensors that are there.
  bool counts_host_tier = false;
};

// What a rank held when memory ran out.
struct MemoryShortage {
  MemoryRequest request;
  Breakdown on_device;  // tensors on request.device
  Breakdown on_host;    // offloaded to the host
  // The most that Breakdown::activations() of that device was since MemoryLimitScope::begin_activations().
  int64_t activation_peak = 0;

  // What counts of that.
  int64_t held_bytes() const {
    return on_device.total() + (request.counts_host_tier ? on_host.total() : 0);
  }
  // What there is.
  int64_t limit_bytes() const { return held_bytes() + request.asked_bytes - request.missing_bytes; }
};

// Sentences about what makes the step fit; "" for none. Called on the thread whose allocation fails, with any
// lock held: reads constants alone.
using AdviseOnMemory = std::function<std::string(const MemoryShortage&)>;

class AllocationOwners;
class LastEvents;

class MemoryLimitScope {
 public:
  // limits: may have none, for the advice alone.
  MemoryLimitScope(std::shared_ptr<Ledger> ledger, const MemoryLimits& limits,
                   AdviseOnMemory advise = nullptr);
  ~MemoryLimitScope();

  // A forward begins: MemoryShortage::activation_peak is of what follows. Returns what is held now.
  int64_t begin_activations(c10::DeviceType device);
  // That peak so far.
  int64_t activation_peak() const;

  MemoryLimitScope(const MemoryLimitScope&) = delete;
  MemoryLimitScope& operator=(const MemoryLimitScope&) = delete;

  // check_charge() (memory/charge_check.h).
  static void check(const Ledger& ledger, std::unique_lock<std::mutex>& lock, Account account,
                    Kind kind, int64_t bytes);
  // note_change() (memory/charge_check.h).
  static void note(const Ledger& ledger, Account account, Kind kind, int64_t bytes,
                   const void* block);
  // note_rename() (memory/charge_check.h).
  static void note_rename(const Ledger& ledger, Kind to, const void* block);
  // What everybody on this ledger advises.
  static std::string advice(const Ledger& ledger, const MemoryRequest& request);
  // The ledger's last changes since the oldest scope on it was made, in lines; "" where there are none.
  static std::string last_events(const Ledger& ledger);
  // The operators whose activations are held since the oldest scope with a limit was made, in lines.
  static std::string largest_owners(const Ledger& ledger);

 private:
  const std::shared_ptr<Ledger> ledger_;
  const MemoryLimits limits_;
  const std::shared_ptr<const AdviseOnMemory> advise_;  // null: none
  // Guarded by the ledger's mutex.
  const std::unique_ptr<LastEvents> last_events_;
  const std::unique_ptr<AllocationOwners> owners_;  // null without a limit
  Account activations_of_;
  int64_t activation_peak_ = 0;
};

// What the calling thread asked for: "64.0 MiB of bucket in backward (AddmmBackward0) for the gradient bucket, page "blocks.3",".
std::string describe_request(Kind kind, int64_t bytes);

// An error about memory: what happened, the ledger's tables, and the advice. The ledger keeps the first words for other
// ranks.
std::string shortage_report(const Ledger& ledger, const std::string& what,
                            const MemoryRequest& request);
// Throws c10::OutOfMemoryError with it.
[[noreturn]] void throw_shortage(const Ledger& ledger, const std::string& what,
                                 const MemoryRequest& request);

}  // namespace zeropage::memory
