// A block of memory on a ledger: what an allocator keeps of each block that it hands out.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <c10/core/DeviceType.h>

#include "memory/ledger.h"

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

}  // namespace zeropage::memory
