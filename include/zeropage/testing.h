// Expectations on bytes for the tests of a program: what a ledger holds, and whether that grows over steps.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "zeropage/bytes.h"
#include "zeropage/ledger.h"
#include "zeropage/profiler.h"

namespace zeropage::memory {

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

namespace zeropage::profile {

// Expectations about what a training loop holds from step to step, for GoogleTest.
//
//   EXPECT_NO_GROWTH(5, [&] { train_step(model, optimizer); });
//
// EXPECT_PEAK_BYTES_LE is for the peak of a step.
inline ::testing::AssertionResult does_not_grow(int64_t steps, const std::function<void()>& step) {
  const std::string growth = growth_over(steps, step);
  if (growth.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << growth;
}

}  // namespace zeropage::profile

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

// The ledger of the calling thread holds nothing more of after each of `steps` calls of the function, which are
// 3 or more. The failure names what grew, and who allocated it for which page.
#define EXPECT_NO_GROWTH(steps, ...) \
  EXPECT_TRUE(::zeropage::profile::does_not_grow(steps, __VA_ARGS__))
