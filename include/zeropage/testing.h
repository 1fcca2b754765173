// Expectations on bytes for the tests of a program.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <gtest/gtest.h>

#include "zeropage/bytes.h"
#include "zeropage/ledger.h"

// A block of memory on a ledger: what an allocator keeps of each block that it hands out.

namespace zeropage::memory {

class SurvivorScope;

// Charges the calling thread's ledger, under its kind, for as long as it lives.
// Threads: any may end it; one at a time renames.
class ChargedBlock {
 public:
  ChargedBlock(int64_t bytes, c10::DeviceType device);
  ~ChargedBlock();
  ChargedBlock(const ChargedBlock&) = delete;
  ChargedBlock& operator=(const ChargedBlock&) = delete;

  int64_t bytes() const { return bytes_; }
  // On the calling thread's ledger from here on.
  void take_over(Kind kind);

 private:
  friend class SurvivorScope;

  const int64_t bytes_;
  const c10::DeviceType device_;
  Kind kind_;
  std::shared_ptr<Ledger> ledger_;
  std::atomic<SurvivorScope*> scope_;  // that this block began in, or null
};

// What the calling thread allocates while it lives is kStaging; what outlives the scope then
// becomes `survivors`. For code of others that makes state and temporaries in one go, such as an
// optimizer's first step.
class SurvivorScope {
 public:
  explicit SurvivorScope(Kind survivors);
  ~SurvivorScope();
  SurvivorScope(const SurvivorScope&) = delete;
  SurvivorScope& operator=(const SurvivorScope&) = delete;

 private:
  friend class ChargedBlock;
  struct Blocks;

  const Kind survivors_;
  const KindScope temporaries_;
  SurvivorScope* const before_;  // the enclosing one of this thread
  const std::unique_ptr<Blocks> blocks_;
};

// LibTorch's CPU allocator, wrapped so that every block is on a ledger (zeropage/ledger.h).
//
// Installed before main() in every program that has a ledger: `c10::SetCPUAllocator` with a priority
// above the default's. Each block carries a 64-byte header in front of its data (which stays 64-byte
// aligned): size, kind, ledger. The ledger counts the bytes that were asked for, as PyTorch's
// profiler does; headers are not counted.
// Installs it; later calls do nothing.
bool observe_host_memory();

// Bytes that LibTorch's CPU allocator has handed out and not got back, counted apart from any
// ledger.
int64_t host_allocated_bytes();

// Gives the operating system what is free: idle mappings and the heap's free pages. For a program
// that holds much less than before.
void return_idle_memory();

// The block that LibTorch's CPU allocator handed out, or null for memory from elsewhere (from_blob,
// a page).
ChargedBlock* host_block_of(const c10::DataPtr& data);

// Which of the ledgers' bytes LibTorch's allocator did not hand out: segments of collectives, mappings
// of others, all that somebody charged by Ledger::charge().
//
// Threads: any.
// On the host, of all ledgers of this process, charged and not discharged yet.
int64_t host_bytes_charged_by_hand();

// While it lives, what the calling thread charges and discharges is LibTorch's host allocator's.
class HostAllocatorScope {
 public:
  HostAllocatorScope();
  ~HostAllocatorScope();
  HostAllocatorScope(const HostAllocatorScope&) = delete;
  HostAllocatorScope& operator=(const HostAllocatorScope&) = delete;

 private:
  const bool before_;
};

// Expectations about memory for GoogleTest, for our tests and for users' own CI.
//
//   zeropage::memory::Ledger& ledger = *zeropage::memory::Ledger::current();
//   ledger.reset_peak();  // peaks begin with what is held now
//   const int64_t before = ledger.now().total();
//   train_step(model, optimizer);
//   EXPECT_PEAK_BYTES_LE(ledger, before + 64_MiB);
//
// The ledger is the one that the code under test charges: Ledger::current() on its thread, which is the
// process's unless a LedgerScope gives another. One that nobody charges fails the expectation; a new
// Ledger is charged under a LedgerScope alone. A failure prints the ledger's breakdown. Bytes are the
// host's, as they were asked for.
// "parameter 4.0 KiB, gradient 4.0 KiB" for a failure's message.
inline std::string to_text(const Breakdown& breakdown) {
  std::string text;
  for (size_t index = 0; index < kKindCount; ++index) {
    if (breakdown.bytes[index] == 0) continue;
    text += (text.empty() ? "" : ", ") + std::string(name(static_cast<Kind>(index))) + " " +
            format_bytes(breakdown.bytes[index]);
  }
  return text.empty() ? "nothing" : text;
}

// Fails for a ledger that nobody has charged and that the calling thread does not charge: any bound
// holds for it.
inline ::testing::AssertionResult is_charged(const Ledger& ledger) {
  const bool is_current = &ledger == Ledger::current().get();
  if (is_current || ledger.at_peak().total() > 0 || ledger.now().total() != 0) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << "nobody charges this ledger; take *Ledger::current() on the thread of the code under "
            "test, or run that under a LedgerScope of this ledger and expect within the scope";
}

inline ::testing::AssertionResult kind_bytes_are(const Ledger& ledger, Kind kind,
                                                 int64_t expected_bytes) {
  if (auto charged = is_charged(ledger); !charged) return charged;
  const Breakdown now = ledger.now();
  if (now[kind] == expected_bytes) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "expected " << expected_bytes << " bytes of " << name(kind) << ", got " << now[kind]
         << "; the ledger holds " << to_text(now);
}

inline ::testing::AssertionResult peak_is_within(const Ledger& ledger, int64_t most_bytes) {
  if (auto charged = is_charged(ledger); !charged) return charged;
  const Breakdown at_peak = ledger.at_peak();
  if (at_peak.total() <= most_bytes) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "expected at most " << most_bytes << " bytes, got "
                                       << at_peak.total() << "; at the peak: " << to_text(at_peak);
}

inline ::testing::AssertionResult ledgers_equal_allocator() {
  const int64_t of_ledgers = Ledger::host_bytes_of_all_ledgers();
  const int64_t by_hand = host_bytes_charged_by_hand();
  const int64_t allocated = host_allocated_bytes();
  if (of_ledgers - by_hand == allocated) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "all ledgers together hold " << of_ledgers << " bytes on the host, of which " << by_hand
         << " were charged by hand, but LibTorch's allocator has handed out " << allocated;
}

}  // namespace zeropage::memory

// The host bytes of one kind are exactly `expected_bytes`.
#define EXPECT_KIND_BYTES_EQ(ledger, kind, expected_bytes) \
  EXPECT_TRUE(::zeropage::memory::kind_bytes_are(ledger, kind, int64_t{expected_bytes}))

// The highest total since the last reset_peak() stayed within `most_bytes`. What was held then counts.
#define EXPECT_PEAK_BYTES_LE(ledger, most_bytes) \
  EXPECT_TRUE(::zeropage::memory::peak_is_within(ledger, int64_t{most_bytes}))

// Every byte has a name: all ledgers together hold what LibTorch's host allocator handed out, beside what
// was charged by hand, such as a world's segments in shared memory.
// REQUIRES: no other thread allocates.
#define EXPECT_LEDGERS_EQUAL_ALLOCATOR() EXPECT_TRUE(::zeropage::memory::ledgers_equal_allocator())
