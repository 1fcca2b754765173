#include "memory/charged_block.h"

#include <mutex>
#include <unordered_set>
#include <utility>

namespace zeropage::memory {
namespace {

thread_local SurvivorScope* scope_of_thread = nullptr;

// Guards every scope's blocks: one may be freed on another thread than the scope's.
std::mutex& scopes_mutex() {
  static auto* const instance = new std::mutex;
  return *instance;
}

}  // namespace

struct SurvivorScope::Blocks {
  std::unordered_set<ChargedBlock*> blocks;  // guarded by scopes_mutex()
};

ChargedBlock::ChargedBlock(int64_t bytes, c10::DeviceType device)
    : bytes_(bytes),
      device_(device),
      kind_(current_kind()),
      ledger_(Ledger::current()),
      scope_(scope_of_thread) {
  // First: it may throw, and a block that is not made must not be known to a scope.
  ledger_->charge(kind_, bytes_, device_, this);
  if (scope_of_thread != nullptr) {
    const std::lock_guard lock(scopes_mutex());
    scope_of_thread->blocks_->blocks.insert(this);
  }
}

ChargedBlock::~ChargedBlock() {
  if (scope_.load(std::memory_order_acquire) != nullptr) {
    const std::lock_guard lock(scopes_mutex());
    if (SurvivorScope* scope = scope_.load(std::memory_order_relaxed)) {
      scope->blocks_->blocks.erase(this);
    }
  }
  ledger_->discharge(kind_, bytes_, device_, this);
}

void ChargedBlock::take_over(Kind kind) {
  const std::shared_ptr<Ledger>& target = Ledger::current();
  if (ledger_ == target) {
    target->rename(kind_, kind, bytes_, device_, this);
  } else {
    // First: it may throw.
    target->charge(kind, bytes_, device_, this);
    ledger_->discharge(kind_, bytes_, device_, this);
    ledger_ = target;
  }
  kind_ = kind;
}

SurvivorScope::SurvivorScope(Kind survivors)
    : survivors_(survivors),
      temporaries_(Kind::kStaging),
      before_(std::exchange(scope_of_thread, this)),
      blocks_(std::make_unique<Blocks>()) {}

SurvivorScope::~SurvivorScope() {
  const std::lock_guard lock(scopes_mutex());
  for (ChargedBlock* block : blocks_->blocks) {
    block->ledger_->rename(block->kind_, survivors_, block->bytes_, block->device_, block);
    block->kind_ = survivors_;
    block->scope_.store(nullptr, std::memory_order_release);
  }
  scope_of_thread = before_;
}

}  // namespace zeropage::memory
