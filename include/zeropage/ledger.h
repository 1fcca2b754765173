// `Ledger`: bytes by kind and tier, and the table of them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <c10/core/DeviceType.h>

// The ledger: bytes by kind and device, now and at the peak.
//
// Every byte that LibTorch's CPU allocator hands out is charged to one ledger under one kind, so
// the kinds always add up to the allocator's figure. What nobody named is kActivationAndOther.
//
// Which ledger: the calling thread's current one. A process has one ledger for all its threads;
// where ranks are threads of one process, each runs under a LedgerScope of its own. A block is
// discharged from the ledger that it was charged to, whichever thread frees it.
//
// Which kind: the innermost KindScope of the calling thread. `assign` renames a tensor's bytes
// later.
//
// Lifetime: ledgers are shared; one lives as long as any block charged to it. Thread-safe
// throughout.

namespace zeropage::memory {

class MemoryLimitScope;

enum class Kind : uint8_t {
  kParameter,
  kGradient,
  kOptimizerState,
  kMasterWeights,
  kBucket,
  kStaging,
  kActivation,           // made by a wrapped forward
  kActivationOffloaded,  // activations that left for the host or a file until backward
  kRecompute,            // made while a forward is repeated in backward
  kActivationAndOther,
};
inline constexpr size_t kKindCount = 10;

// Where those bytes are that a training step would otherwise hold on the device.
enum class Tier : uint8_t {
  kDevice,
  kHost,  // of a host device too: memory apart from what its operators work on
  kNvme,
};
inline constexpr size_t kTierCount = 3;

// "device", "host", "nvme".
std::string_view name(Tier tier);

// The kind's name in tables and JSON: "optimizer_state".
std::string_view name(Kind kind);

// Bytes by kind on one device.
struct Breakdown {
  std::array<int64_t, kKindCount> bytes{};

  int64_t operator[](Kind kind) const { return bytes[static_cast<size_t>(kind)]; }
  int64_t& operator[](Kind kind) { return bytes[static_cast<size_t>(kind)]; }
  int64_t total() const;
  // What is held between steps: parameters, optimizer state, master weights, and gradients as long as they are there,
  // which is from backward to zero_grad().
  int64_t persistent() const;
  // What forward and backward hold besides: activations that are here, recomputed ones, and what
  // nobody named, such as the gradients of activations.
  int64_t activations() const;
};

// Bytes by tier, and by kind in each.
struct TierBytes {
  std::array<Breakdown, kTierCount> by_tier{};

  const Breakdown& operator[](Tier tier) const { return by_tier[static_cast<size_t>(tier)]; }
  Breakdown& operator[](Tier tier) { return by_tier[static_cast<size_t>(tier)]; }
  TierBytes& operator+=(const TierBytes& other);
};

// What somebody counted on that a rank would hold at the peak of a step, to compare with where memory runs out.
struct ExpectedPeak {
  std::string counted_by = {};  // "fit()"
  Breakdown on_device = {};
  Breakdown on_host = {};                 // offloaded to the host
  std::vector<std::string> options = {};  // of the run that is meant (describe(Options))
};

class EventSinkSlot;

class Ledger {
 public:
  // owner: its name in errors and tables, such as "rank 3/8"; "" for a process without ranks.
  explicit Ledger(std::string owner = "");
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // The ledger of the process, which threads without a LedgerScope charge.
  static const std::shared_ptr<Ledger>& process();
  // The ledger that the calling thread charges.
  static const std::shared_ptr<Ledger>& current();
  // The sum of all ledgers of this process on the host. Equals host_allocated_bytes() plus what was
  // charged by hand.
  static int64_t host_bytes_of_all_ledgers();

  std::string owner() const;
  void set_owner(std::string owner);

  Breakdown now(c10::DeviceType device = c10::DeviceType::CPU) const;
  // The breakdown at the moment when the device's total was highest.
  Breakdown at_peak(c10::DeviceType device = c10::DeviceType::CPU) const;
  // The most that Breakdown::activations() was.
  int64_t activation_peak(c10::DeviceType device = c10::DeviceType::CPU) const;
  // Starts new peaks from what is held now.
  void reset_peak();
  // The most that Breakdown::activations() was since the last call. For one caller, who follows a
  // step from event to event; does not touch the other peaks.
  int64_t take_recent_activation_peak(c10::DeviceType device = c10::DeviceType::CPU);

  // For bytes that LibTorch's allocator did not hand out (a mapping of ours). Charge and discharge
  // in pairs. block: tells blocks apart for an event sink. Throws c10::OutOfMemoryError, and
  // charges nothing, where that would pass a limit (memory/memory_limit.h).
  void charge(Kind kind, int64_t bytes, c10::DeviceType device = c10::DeviceType::CPU,
              const void* block = nullptr);
  void discharge(Kind kind, int64_t bytes, c10::DeviceType device = c10::DeviceType::CPU,
                 const void* block = nullptr);
  // The same for bytes in a tier away from the device, which count to no device's total.
  void charge_offloaded(Tier tier, Kind kind, int64_t bytes);
  void discharge_offloaded(Tier tier, Kind kind, int64_t bytes);
  Breakdown offloaded(Tier tier) const;
  Breakdown offloaded_at_peak(Tier tier) const;
  // Renames bytes without passing through a higher total.
  void rename(Kind from, Kind to, int64_t bytes, c10::DeviceType device = c10::DeviceType::CPU,
              const void* block = nullptr);

  // What ran out last on this ledger, in a line; "" where nothing did, or the script has gone on since. Other ranks are told
  // of it if this one ends.
  void note_shortage(std::string words) const;
  std::string shortage() const;

  // What a forecast says of the run that this rank is about to begin; nothing: no forecast does. Errors about memory show it
  // beside what is held.
  void expect(std::optional<ExpectedPeak> peak);
  std::optional<ExpectedPeak> expected() const;

  // The sink that gets the events of these bytes, and of the rank whose ledger this is.
  EventSinkSlot& sink() { return *sink_; }

 private:
  friend class MemoryLimitScope;

  struct Sums {
    Breakdown now;
    Breakdown at_peak;
    int64_t total = 0;
    int64_t peak = 0;
    int64_t activations = 0;
    int64_t activation_peak = 0;
    int64_t recent_activation_peak = 0;

    void add(Kind kind, int64_t bytes);
    void note_peaks();
  };
  // index: of the account. Charges, or discharges what is less than 0.
  void change(size_t index, Kind kind, int64_t bytes, const void* block);

  const std::unique_ptr<EventSinkSlot> sink_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::string owner_;
  std::array<Sums, 5> accounts_;  // by Account (zeropage/event_sink.h)
  std::vector<MemoryLimitScope*> scopes_;
  bool is_limited_ = false;  // by any of them
  mutable std::string shortage_;
  std::optional<ExpectedPeak> expected_;
};

// Bytes that LibTorch's CPU allocator has handed out and not got back, counted apart from any
// ledger.
int64_t host_allocated_bytes();

// Gives the operating system what is free: idle mappings and the heap's free pages. For a program
// that holds much less than before.
void return_idle_memory();

// Bytes on the host of all ledgers of this process that LibTorch's allocator did not hand out: segments of collectives,
// mappings of others, all that somebody charged by Ledger::charge(). Threads: any.
int64_t host_bytes_charged_by_hand();

// While it lives, the calling thread charges `ledger`.
class LedgerScope {
 public:
  explicit LedgerScope(std::shared_ptr<Ledger> ledger);
  ~LedgerScope();
  LedgerScope(const LedgerScope&) = delete;
  LedgerScope& operator=(const LedgerScope&) = delete;

 private:
  std::shared_ptr<Ledger> before_;
};

// While it lives, what the calling thread allocates is of this kind.
class KindScope {
 public:
  explicit KindScope(Kind kind);
  ~KindScope();
  KindScope(const KindScope&) = delete;
  KindScope& operator=(const KindScope&) = delete;

 private:
  Kind before_;
};

// The kind that the calling thread's allocations have now.
Kind current_kind();

// Renames the bytes of a tensor's storage and moves them to the calling thread's ledger. False if
// LibTorch's allocator did not hand that storage out while the ledger was there (from_blob, a
// page): then nothing is changed.
bool assign(const at::Tensor& tensor, Kind kind);

// The ledger's table, for people: a row a kind, a column a rank, the formula beside it.
struct MemoryColumn {
  std::string title = {};  // "rank 0"
  Breakdown breakdown;     // bytes
  // The bytes among them that live from step to step. The breakdown cannot tell: a parameter that
  // is whole only while an operator uses it has the same kind.
  int64_t persistent_bytes = 0;
};

// A row behind the kinds, as of bytes that the ledger does not know.
struct MemoryRow {
  std::string label = {};
  std::vector<int64_t> bytes = {};  // by column
};

// Rows of kinds that no column has are left out; "persistent", "total" and then `rows` close the table.
// `formula` is the last column, with "-" where no formula speaks: of activations, and so of the
// total. None: no such column.
std::string memory_table(std::span<const MemoryColumn> columns,
                         const std::optional<MemoryColumn>& formula = std::nullopt,
                         std::span<const MemoryRow> rows = {});

}  // namespace zeropage::memory
