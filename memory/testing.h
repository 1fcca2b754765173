// Expectations about memory for GoogleTest, for our tests and for users' own CI.
//
//   zeropage::memory::Ledger ledger;  ...  EXPECT_PEAK_BYTES_LE(ledger, 64_MiB);
//
// A failure prints the ledger's breakdown.
#pragma once

#include <gtest/gtest.h>

#include "memory/bytes.h"
#include "memory/cpu_allocator.h"
#include "memory/ledger.h"

namespace zeropage::memory {

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

}  // namespace zeropage::memory

// The host bytes of one kind are exactly `expected_bytes`.
#define EXPECT_KIND_BYTES_EQ(ledger, kind, expected_bytes) \
  EXPECT_EQ((ledger).now()[kind], int64_t{expected_bytes}) \
      << "the ledger holds " << ::zeropage::memory::to_text((ledger).now())

// The highest total since the last reset_peak() stayed within `most_bytes`.
#define EXPECT_PEAK_BYTES_LE(ledger, most_bytes)             \
  EXPECT_LE((ledger).at_peak().total(), int64_t{most_bytes}) \
      << "at the peak: " << ::zeropage::memory::to_text((ledger).at_peak())

// Every byte has a name: all ledgers together hold what LibTorch's allocator handed out.
// REQUIRES: no other thread allocates, and nothing was charged by hand.
#define EXPECT_LEDGERS_EQUAL_ALLOCATOR()                             \
  EXPECT_EQ(::zeropage::memory::Ledger::host_bytes_of_all_ledgers(), \
            ::zeropage::memory::host_allocated_bytes())
