#include "memory/memory_limit.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include "memory/allocation_owners.h"
#include "memory/charge_check.h"
#include "memory/last_events.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::memory {
namespace {

// Kinds with the most bytes: "parameter 1.2 GiB, activation 300.0 MiB".
std::string largest_kinds(const Breakdown& bytes) {
  constexpr size_t kShown = 3;
  std::vector<Kind> kinds;
  for (size_t index = 0; index < kKindCount; ++index) {
    if (bytes.bytes[index] > 0) kinds.push_back(static_cast<Kind>(index));
  }
  std::sort(kinds.begin(), kinds.end(),
            [&](Kind left, Kind right) { return bytes[left] > bytes[right]; });
  std::string text;
  for (size_t index = 0; index < std::min(kShown, kinds.size()); ++index) {
    text += c10::str(index == 0 ? "" : ", ", name(kinds[index]), " ",
                     format_bytes(bytes[kinds[index]]));
  }
  return text;
}

// By how much which kind passes what was counted on, of what is held and asked for; the most first.
std::string beyond_expected(const ExpectedPeak& expected, const Breakdown& counted,
                            const Breakdown& held, const MemoryRequest& request) {
  Breakdown with_request = held;
  with_request[request.kind] += request.asked_bytes;
  std::vector<std::pair<int64_t, Kind>> beyond;
  for (size_t index = 0; index < kKindCount; ++index) {
    const int64_t bytes = with_request.bytes[index] - counted.bytes[index];
    if (bytes > 0) beyond.emplace_back(bytes, static_cast<Kind>(index));
  }
  std::sort(beyond.rbegin(), beyond.rend());
  std::string text = c10::str(expected.counted_by, " had counted on ",
                              format_bytes(counted.total()), " at the peak");
  for (size_t index = 0; index < beyond.size(); ++index) {
    const auto [bytes, kind] = beyond[index];
    text +=
        c10::str(index == 0 ? "; with what is asked for there is more of " : ", ", name(kind), " (",
                 format_bytes(with_request[kind]), ", counted ", format_bytes(counted[kind]), ")");
  }
  return text + (beyond.empty() ? "; no kind has more than that\n" : "\n");
}

Account account_limited_as(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return Account::kHost;
  return device == c10::DeviceType::Meta ? Account::kMeta : Account::kAccelerator;
}

// Whose table is shown: with what is offloaded to the host goes the host's.
c10::DeviceType shown_device(Account account) {
  if (account == Account::kMeta) return c10::DeviceType::Meta;
  return account == Account::kAccelerator ? c10::DeviceType::PrivateUse1 : c10::DeviceType::CPU;
}

}  // namespace

MemoryLimitScope::MemoryLimitScope(std::shared_ptr<Ledger> ledger, const MemoryLimits& limits,
                                   AdviseOnMemory advise)
    : ledger_(std::move(ledger)),
      limits_(limits),
      advise_(advise ? std::make_shared<const AdviseOnMemory>(std::move(advise)) : nullptr),
      last_events_(std::make_unique<LastEvents>()),
      owners_(limits.any() ? std::make_unique<AllocationOwners>() : nullptr),
      activations_of_(account_limited_as(limits.device)) {
  const std::lock_guard lock(ledger_->mutex_);
  ledger_->scopes_.push_back(this);
  ledger_->is_limited_ |= limits_.any();
}

MemoryLimitScope::~MemoryLimitScope() {
  const std::lock_guard lock(ledger_->mutex_);
  std::erase(ledger_->scopes_, this);
  ledger_->is_limited_ =
      std::any_of(ledger_->scopes_.begin(), ledger_->scopes_.end(),
                  [](const MemoryLimitScope* scope) { return scope->limits_.any(); });
}

void MemoryLimitScope::check(const Ledger& ledger, std::unique_lock<std::mutex>& lock,
                             Account account, Kind kind, int64_t bytes) {
  const auto held_in = [&](Account other) {
    return ledger.accounts_[static_cast<size_t>(other)].total;
  };
  const auto refuse = [&](const char* memory, const char* option, int64_t held, int64_t limit,
                          bool counts_host_tier) {
    lock.unlock();
    const int64_t missing = held + bytes - limit;
    throw_shortage(ledger,
                   c10::str(describe_request(kind, bytes), " would pass the limit of ", memory,
                            " memory: ", format_bytes(held), " of ", format_bytes(limit),
                            " a rank are held (options.", option, "), so ", format_bytes(missing),
                            " are missing"),
                   {.device = shown_device(account),
                    .kind = kind,
                    .asked_bytes = bytes,
                    .missing_bytes = missing,
                    .counts_host_tier = counts_host_tier});
  };
  const bool on_host = account == Account::kHost || account == Account::kHostTier;
  for (const MemoryLimitScope* const scope : ledger.scopes_) {
    const MemoryLimits& limits = scope->limits_;
    if (limits.device_bytes != MemoryLimits::kNone &&
        account == account_limited_as(limits.device)) {
      const int64_t held = held_in(account);
      if (bytes > limits.device_bytes - held) {
        refuse("device", "device_memory_bytes", held, limits.device_bytes,
               /*counts_host_tier=*/false);
      }
    }
    if (limits.host_bytes != MemoryLimits::kNone && on_host) {
      const int64_t held = held_in(Account::kHost) + held_in(Account::kHostTier);
      if (bytes > limits.host_bytes - held) {
        refuse("host", "host_memory_bytes", held, limits.host_bytes, /*counts_host_tier=*/true);
      }
    }
  }
}

void check_charge(const Ledger& ledger, std::unique_lock<std::mutex>& lock, Account account,
                  Kind kind, int64_t bytes) {
  MemoryLimitScope::check(ledger, lock, account, kind, bytes);
}

void MemoryLimitScope::note(const Ledger& ledger, Account account, Kind kind, int64_t bytes,
                            const void* block) {
  // The oldest one has seen most, and one is enough.
  ledger.scopes_.front()->last_events_->note(account, kind, bytes, OwnerScope::current());
  if (block != nullptr) {
    for (MemoryLimitScope* const scope : ledger.scopes_) {
      if (!scope->owners_) continue;
      if (bytes < 0) scope->owners_->free(block);
      if (bytes > 0 && is_of_activations(kind)) scope->owners_->take(block, bytes);
    }
  }
  if (bytes < 0) return;
  const int64_t activations = ledger.accounts_[static_cast<size_t>(account)].activations;
  for (MemoryLimitScope* const scope : ledger.scopes_) {
    if (scope->activations_of_ != account) continue;
    scope->activation_peak_ = std::max(scope->activation_peak_, activations);
  }
}

int64_t MemoryLimitScope::begin_activations(c10::DeviceType device) {
  const std::lock_guard lock(ledger_->mutex_);
  activations_of_ = account_limited_as(device);
  activation_peak_ = ledger_->accounts_[static_cast<size_t>(activations_of_)].activations;
  // Who begins a forward has gone on.
  ledger_->shortage_.clear();
  return activation_peak_;
}

int64_t MemoryLimitScope::activation_peak() const {
  const std::lock_guard lock(ledger_->mutex_);
  return activation_peak_;
}

void note_change(const Ledger& ledger, Account account, Kind kind, int64_t bytes,
                 const void* block) {
  MemoryLimitScope::note(ledger, account, kind, bytes, block);
}

// What becomes a gradient or a state is no activation any more.
void MemoryLimitScope::note_rename(const Ledger& ledger, Kind to, const void* block) {
  if (block == nullptr || is_of_activations(to)) return;
  for (MemoryLimitScope* const scope : ledger.scopes_) {
    if (scope->owners_) scope->owners_->free(block);
  }
}

void note_rename(const Ledger& ledger, Kind to, const void* block) {
  MemoryLimitScope::note_rename(ledger, to, block);
}

std::string MemoryLimitScope::largest_owners(const Ledger& ledger) {
  constexpr size_t kShown = 10;
  const std::lock_guard lock(ledger.mutex_);
  for (const MemoryLimitScope* const scope : ledger.scopes_) {
    if (scope->owners_) return scope->owners_->describe(kShown);
  }
  return "";
}

std::string MemoryLimitScope::last_events(const Ledger& ledger) {
  const std::lock_guard lock(ledger.mutex_);
  return ledger.scopes_.empty() ? "" : ledger.scopes_.front()->last_events_->describe();
}

std::string MemoryLimitScope::advice(const Ledger& ledger, const MemoryRequest& request) {
  std::vector<std::pair<std::shared_ptr<const AdviseOnMemory>, int64_t>> asked;
  {
    const std::lock_guard lock(ledger.mutex_);
    for (const MemoryLimitScope* const scope : ledger.scopes_) {
      if (scope->advise_) asked.emplace_back(scope->advise_, scope->activation_peak_);
    }
  }
  MemoryShortage shortage{.request = request,
                          .on_device = ledger.now(request.device),
                          .on_host = ledger.offloaded(Tier::kHost)};
  std::string text;
  for (const auto& [advise, activation_peak] : asked) {
    shortage.activation_peak = activation_peak;
    text += (*advise)(shortage);
  }
  return text;
}

std::string describe_request(Kind kind, int64_t bytes) {
  std::string text = c10::str(format_bytes(bytes), " of ", name(kind));
  std::string by = describe(operator_label());
  // The node is there on the thread that runs backward.
  if (const auto node = torch::autograd::get_current_node()) {
    text += " in backward";
    by = node->name() + (by.empty() ? "" : ", ") + by;
  } else if (kind == Kind::kActivation) {
    text += " in forward";
  } else if (kind == Kind::kActivationAndOther && operator_label().phase == StepPhase::kLoss) {
    text += " between forward and backward, as of the loss,";
  }
  if (!by.empty()) text += " (" + by + ")";
  const OwnerScope::Owner owner = OwnerScope::current();
  if (*owner.name != '\0') text += c10::str(" for the ", owner.name);
  if (!owner.page.empty()) text += c10::str(", page \"", owner.page, "\",");
  return text;
}

std::string shortage_report(const Ledger& ledger, const std::string& what,
                            const MemoryRequest& request) {
  const c10::DeviceType device = request.device;
  ledger.note_shortage(what);
  const Breakdown now = ledger.now(device);
  const Breakdown at_peak = ledger.at_peak(device);
  const Breakdown on_host = ledger.offloaded(Tier::kHost);
  std::vector<MemoryColumn> columns = {{"now", now, now.persistent()},
                                       {"at the peak", at_peak, at_peak.persistent()}};
  if (on_host.total() > 0) columns.push_back({"on host", on_host, on_host.persistent()});
  const std::optional<ExpectedPeak> expected = ledger.expected();
  Breakdown counted;
  if (expected) {
    counted = expected->on_device;
    for (size_t kind = 0; kind < kKindCount && device == c10::DeviceType::CPU; ++kind) {
      counted.bytes[kind] += expected->on_host.bytes[kind];
    }
    columns.push_back({expected->counted_by, counted, counted.persistent()});
  }
  std::string text = memory_table(columns);
  const std::string who = ledger.owner();
  text = (who.empty() ? "" : "[" + who + "] ") + what + "\n" + text;
  Breakdown held = now;
  for (size_t kind = 0; kind < kKindCount && device == c10::DeviceType::CPU; ++kind) {
    held.bytes[kind] += on_host.bytes[kind];
  }
  text += "most is held by: " + largest_kinds(held) + "\n";
  if (expected) text += beyond_expected(*expected, counted, held, request);
  const std::string owners = MemoryLimitScope::largest_owners(ledger);
  if (!owners.empty()) text += "activations are held by operators, the largest first:\n" + owners;
  const std::string last = MemoryLimitScope::last_events(ledger);
  if (!last.empty()) text += "the last changes, the newest at the end:\n" + last;
  const std::string advice = MemoryLimitScope::advice(ledger, request);
  text += advice.empty() ? "use more ranks, a higher stage, smaller pages or a smaller batch\n"
                         : advice;
  return text;
}

[[noreturn]] void throw_shortage(const Ledger& ledger, const std::string& what,
                                 const MemoryRequest& request) {
  C10_THROW_ERROR(OutOfMemoryError, shortage_report(ledger, what, request));
}

}  // namespace zeropage::memory
