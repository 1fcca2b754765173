// Error macros. A message says who (rank, page, parameter), what was expected, what was found, what
// to do.
//
//   ZP_CHECK(page.resident(), "page \"", page.name(), "\" is sharded; fetch it first");
//
// throws c10::Error with the message behind "[rank 3/8] " when the calling thread works for a rank.
// For the user's mistakes; a mistake of ours is TORCH_INTERNAL_ASSERT.
#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

#define ZP_CHECK(holds, ...) TORCH_CHECK(holds, ::zeropage::memory::owner_prefix(), __VA_ARGS__)
// The loop tells a compiler that does not optimise that nothing comes behind it. It never goes round.
#define ZP_THROW(...) \
  for (;;) ZP_CHECK(false, __VA_ARGS__)

namespace zeropage::memory {

// "[rank 3/8] " for a thread whose current ledger belongs to a rank, else "". The ledger defines it, which
// knows the owner and includes this header.
std::string owner_prefix();

// The message of an exception without c10's stack trace.
std::string message_of(const std::exception& error);

}  // namespace zeropage::memory
