#include "zeropage/ledger.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "memory/charge_check.h"
#include "memory/charged_block.h"
#include "zeropage/check.h"
#include "zeropage/event_sink.h"

namespace zeropage::memory {

static_assert(kAccountCount == 5, "the size of Ledger::accounts_");

namespace {

// Never destroyed: blocks are freed during static destruction too.
struct Registry {
  std::mutex mutex;
  std::unordered_set<const Ledger*> ledgers;  // guarded by mutex
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

std::shared_ptr<Ledger>& current_slot() {
  thread_local std::shared_ptr<Ledger> current = Ledger::process();
  return current;
}

Account account_of(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return Account::kHost;
  // A process has one kind of accelerator.
  return device == c10::DeviceType::Meta ? Account::kMeta : Account::kAccelerator;
}

Account account_of(Tier tier) {
  TORCH_INTERNAL_ASSERT(tier != Tier::kDevice, "the device's bytes have their own account");
  return tier == Tier::kHost ? Account::kHostTier : Account::kNvmeTier;
}

constexpr size_t index_of(Account account) {
  return static_cast<size_t>(account);
}

thread_local Kind kind_of_thread = Kind::kActivationAndOther;

thread_local bool allocator_charges = false;
std::atomic<int64_t> host_bytes_by_hand{0};

void note_by_hand(int64_t bytes, c10::DeviceType device) {
  if (allocator_charges || device != c10::DeviceType::CPU) return;
  host_bytes_by_hand.fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace

int64_t host_bytes_charged_by_hand() {
  return host_bytes_by_hand.load(std::memory_order_relaxed);
}

HostAllocatorScope::HostAllocatorScope() : before_(std::exchange(allocator_charges, true)) {}

HostAllocatorScope::~HostAllocatorScope() {
  allocator_charges = before_;
}

std::string owner_prefix() {
  const std::string owner = Ledger::current()->owner();
  return owner.empty() ? owner : "[" + owner + "] ";
}

std::string_view name(Kind kind) {
  static constexpr std::array<std::string_view, kKindCount> kNames = {
      "parameter", "gradient",   "optimizer_state",      "master_weights", "bucket",
      "staging",   "activation", "activation_offloaded", "recompute",      "activation_and_other"};
  return kNames[static_cast<size_t>(kind)];
}

std::string_view name(Tier tier) {
  static constexpr std::array<std::string_view, kTierCount> kNames = {"device", "host", "nvme"};
  return kNames[static_cast<size_t>(tier)];
}

TierBytes& TierBytes::operator+=(const TierBytes& other) {
  for (size_t tier = 0; tier < by_tier.size(); ++tier) {
    for (size_t kind = 0; kind < kKindCount; ++kind) {
      by_tier[tier].bytes[kind] += other.by_tier[tier].bytes[kind];
    }
  }
  return *this;
}

int64_t Breakdown::total() const {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

int64_t Breakdown::persistent() const {
  return (*this)[Kind::kParameter] + (*this)[Kind::kGradient] + (*this)[Kind::kOptimizerState] +
         (*this)[Kind::kMasterWeights];
}

int64_t Breakdown::activations() const {
  return (*this)[Kind::kActivation] + (*this)[Kind::kRecompute] +
         (*this)[Kind::kActivationAndOther];
}

void Ledger::Sums::add(Kind kind, int64_t bytes) {
  now[kind] += bytes;
  total += bytes;
  if (kind == Kind::kActivation || kind == Kind::kRecompute || kind == Kind::kActivationAndOther) {
    activations += bytes;
  }
}

void Ledger::Sums::note_peaks() {
  if (total > peak) {
    peak = total;
    at_peak = now;
  }
  activation_peak = std::max(activation_peak, activations);
  recent_activation_peak = std::max(recent_activation_peak, activations);
}

Ledger::Ledger(std::string owner)
    : sink_(std::make_unique<EventSinkSlot>()), owner_(std::move(owner)) {
  std::lock_guard lock(registry().mutex);
  registry().ledgers.insert(this);
}

Ledger::~Ledger() {
  std::lock_guard lock(registry().mutex);
  registry().ledgers.erase(this);
}

const std::shared_ptr<Ledger>& Ledger::process() {
  static auto* const instance = new std::shared_ptr<Ledger>(std::make_shared<Ledger>());
  return *instance;
}

const std::shared_ptr<Ledger>& Ledger::current() {
  return current_slot();
}

std::shared_ptr<EventSink> current_sink() {
  return Ledger::current()->sink().get();
}

int64_t Ledger::host_bytes_of_all_ledgers() {
  std::lock_guard lock(registry().mutex);
  int64_t sum = 0;
  for (const Ledger* ledger : registry().ledgers) sum += ledger->now().total();
  return sum;
}

std::string Ledger::owner() const {
  std::lock_guard lock(mutex_);
  return owner_;
}

void Ledger::set_owner(std::string owner) {
  std::lock_guard lock(mutex_);
  owner_ = std::move(owner);
}

Breakdown Ledger::now(c10::DeviceType device) const {
  std::lock_guard lock(mutex_);
  return accounts_[index_of(account_of(device))].now;
}

Breakdown Ledger::at_peak(c10::DeviceType device) const {
  std::lock_guard lock(mutex_);
  return accounts_[index_of(account_of(device))].at_peak;
}

int64_t Ledger::activation_peak(c10::DeviceType device) const {
  std::lock_guard lock(mutex_);
  return accounts_[index_of(account_of(device))].activation_peak;
}

void Ledger::reset_peak() {
  std::lock_guard lock(mutex_);
  for (Sums& account : accounts_) {
    account.at_peak = account.now;
    account.peak = account.total;
    account.activation_peak = account.activations;
  }
}

int64_t Ledger::take_recent_activation_peak(c10::DeviceType device) {
  std::lock_guard lock(mutex_);
  Sums& account = accounts_[index_of(account_of(device))];
  return std::exchange(account.recent_activation_peak, account.activations);
}

void Ledger::change(size_t index, Kind kind, int64_t bytes, const void* block) {
  std::unique_lock lock(mutex_);
  if (is_limited_ && bytes > 0) {
    check_charge(*this, lock, static_cast<Account>(index), kind, bytes);
  }
  Sums& sums = accounts_[index];
  sums.add(kind, bytes);
  if (bytes > 0) sums.note_peaks();
  if (!scopes_.empty()) note_change(*this, static_cast<Account>(index), kind, bytes, block);
  if (sink_->empty()) return;
  if (const auto sink = sink_->get()) {
    sink->on_ledger({bytes < 0 ? LedgerEvent::What::kDischarge : LedgerEvent::What::kCharge,
                     static_cast<Account>(index), kind, kind, std::abs(bytes), sums.total, block});
  }
}

void Ledger::charge(Kind kind, int64_t bytes, c10::DeviceType device, const void* block) {
  change(index_of(account_of(device)), kind, bytes, block);
  note_by_hand(bytes, device);
}

void Ledger::discharge(Kind kind, int64_t bytes, c10::DeviceType device, const void* block) {
  note_by_hand(-bytes, device);
  change(index_of(account_of(device)), kind, -bytes, block);
}

void Ledger::charge_offloaded(Tier tier, Kind kind, int64_t bytes) {
  change(index_of(account_of(tier)), kind, bytes, /*block=*/nullptr);
}

void Ledger::discharge_offloaded(Tier tier, Kind kind, int64_t bytes) {
  change(index_of(account_of(tier)), kind, -bytes, /*block=*/nullptr);
}

Breakdown Ledger::offloaded(Tier tier) const {
  std::lock_guard lock(mutex_);
  return accounts_[index_of(account_of(tier))].now;
}

Breakdown Ledger::offloaded_at_peak(Tier tier) const {
  std::lock_guard lock(mutex_);
  return accounts_[index_of(account_of(tier))].at_peak;
}

void Ledger::note_shortage(std::string words) const {
  const std::lock_guard lock(mutex_);
  shortage_ = std::move(words);
}

void Ledger::expect(std::optional<ExpectedPeak> peak) {
  const std::lock_guard lock(mutex_);
  expected_ = std::move(peak);
}

std::optional<ExpectedPeak> Ledger::expected() const {
  const std::lock_guard lock(mutex_);
  return expected_;
}

std::string Ledger::shortage() const {
  const std::lock_guard lock(mutex_);
  return shortage_;
}

void Ledger::rename(Kind from, Kind to, int64_t bytes, c10::DeviceType device, const void* block) {
  const std::lock_guard lock(mutex_);
  const Account account = account_of(device);
  Sums& sums = accounts_[index_of(account)];
  sums.add(from, -bytes);
  sums.add(to, bytes);
  sums.note_peaks();
  if (!scopes_.empty()) note_rename(*this, to, block);
  if (sink_->empty()) return;
  if (const auto sink = sink_->get()) {
    sink->on_ledger({LedgerEvent::What::kRename, account, to, from, bytes, sums.total, block});
  }
}

LedgerScope::LedgerScope(std::shared_ptr<Ledger> ledger)
    : before_(std::exchange(current_slot(), std::move(ledger))) {}

LedgerScope::~LedgerScope() {
  current_slot() = std::move(before_);
}

KindScope::KindScope(Kind kind) : before_(std::exchange(kind_of_thread, kind)) {}

KindScope::~KindScope() {
  kind_of_thread = before_;
}

Kind current_kind() {
  return kind_of_thread;
}

}  // namespace zeropage::memory
