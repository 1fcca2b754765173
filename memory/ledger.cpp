#include "memory/ledger.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "memory/charge_check.h"
#include "memory/charged_by_hand.h"
#include "memory/check.h"

namespace zeropage::memory {
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

void Ledger::Account::add(Kind kind, int64_t bytes) {
  now[kind] += bytes;
  total += bytes;
  if (kind == Kind::kActivation || kind == Kind::kRecompute || kind == Kind::kActivationAndOther) {
    activations += bytes;
  }
}

void Ledger::Account::note_peaks() {
  if (total > peak) {
    peak = total;
    at_peak = now;
  }
  activation_peak = std::max(activation_peak, activations);
  recent_activation_peak = std::max(recent_activation_peak, activations);
}

Ledger::Ledger(std::string owner) : owner_(std::move(owner)) {
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

int64_t Ledger::host_bytes_of_all_ledgers() {
  std::lock_guard lock(registry().mutex);
  int64_t sum = 0;
  for (const Ledger* ledger : registry().ledgers) sum += ledger->now().total();
  return sum;
}

size_t Ledger::index_of(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return 0;
  // A process has one kind of accelerator.
  return device == c10::DeviceType::Meta ? 2 : 1;
}

size_t Ledger::index_of(Tier tier) {
  TORCH_INTERNAL_ASSERT(tier != Tier::kDevice, "the device's bytes have their own account");
  return static_cast<size_t>(tier) - 1;
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
  return accounts_[index_of(device)].now;
}

Breakdown Ledger::at_peak(c10::DeviceType device) const {
  std::lock_guard lock(mutex_);
  return accounts_[index_of(device)].at_peak;
}

int64_t Ledger::activation_peak(c10::DeviceType device) const {
  std::lock_guard lock(mutex_);
  return accounts_[index_of(device)].activation_peak;
}

void Ledger::reset_peak() {
  std::lock_guard lock(mutex_);
  const auto reset = [](Account& account) {
    account.at_peak = account.now;
    account.peak = account.total;
    account.activation_peak = account.activations;
  };
  std::for_each(accounts_.begin(), accounts_.end(), reset);
  std::for_each(offloaded_.begin(), offloaded_.end(), reset);
}

int64_t Ledger::take_recent_activation_peak(c10::DeviceType device) {
  std::lock_guard lock(mutex_);
  Account& account = accounts_[index_of(device)];
  return std::exchange(account.recent_activation_peak, account.activations);
}

void Ledger::charge(Kind kind, int64_t bytes, c10::DeviceType device) {
  std::unique_lock lock(mutex_);
  if (is_limited_) check_charge(*this, lock, device, kind, bytes);
  note_by_hand(bytes, device);
  Account& account = accounts_[index_of(device)];
  account.add(kind, bytes);
  account.note_peaks();
}

void Ledger::discharge(Kind kind, int64_t bytes, c10::DeviceType device) {
  note_by_hand(-bytes, device);
  std::lock_guard lock(mutex_);
  accounts_[index_of(device)].add(kind, -bytes);
}

void Ledger::charge_offloaded(Tier tier, Kind kind, int64_t bytes) {
  std::unique_lock lock(mutex_);
  if (is_limited_ && tier == Tier::kHost) {
    check_charge(*this, lock, std::nullopt, kind, bytes);
  }
  Account& account = offloaded_[index_of(tier)];
  account.add(kind, bytes);
  account.note_peaks();
}

void Ledger::discharge_offloaded(Tier tier, Kind kind, int64_t bytes) {
  std::lock_guard lock(mutex_);
  offloaded_[index_of(tier)].add(kind, -bytes);
}

Breakdown Ledger::offloaded(Tier tier) const {
  std::lock_guard lock(mutex_);
  return offloaded_[index_of(tier)].now;
}

Breakdown Ledger::offloaded_at_peak(Tier tier) const {
  std::lock_guard lock(mutex_);
  return offloaded_[index_of(tier)].at_peak;
}

void Ledger::rename(Kind from, Kind to, int64_t bytes, c10::DeviceType device) {
  std::lock_guard lock(mutex_);
  Account& account = accounts_[index_of(device)];
  account.add(from, -bytes);
  account.add(to, bytes);
  account.note_peaks();
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
