#include "tests/simulated/scenario.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>

namespace zeropage::simulated {
namespace {

namespace fs = std::filesystem;

// A torn copy is there for that many steps before it is needed.
constexpr int64_t kStepsToTornCopy = 2;

// Cuts a file of the newest copy in half, or makes its second half zeros. False: there is no copy.
bool tear_newest_copy(const fs::path& folder, uint64_t choice) {
  std::error_code ignored;
  fs::path newest;
  int64_t step = -1;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("step-") || name.find_first_not_of("0123456789", 5) != name.npos)
      continue;
    if (std::stoll(name.substr(5)) > step) newest = entry.path();
    step = std::max<int64_t>(step, std::stoll(name.substr(5)));
  }
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(newest, ignored)) {
    if (entry.is_regular_file(ignored)) files.push_back(entry.path());
  }
  if (files.empty()) return false;
  std::sort(files.begin(), files.end());
  const fs::path& file = files[choice / 2 % files.size()];
  const auto bytes = fs::file_size(file, ignored);
  if (ignored) return false;
  fs::resize_file(file, bytes / 2, ignored);
  if (choice % 2 == 0) fs::resize_file(file, bytes, ignored);
  return true;
}

}  // namespace

Scenario::Scenario(const RunPlan& plan)
    : plan_(plan),
      ranks_(static_cast<size_t>(plan.training.ranks)),
      happened_(plan.faults.size(), false) {}

void Scenario::start(int rank, const std::shared_ptr<RankLife>& life,
                     const std::shared_ptr<memory::Ledger>& ledger) {
  const std::lock_guard lock(mutex_);
  Rank& started = ranks_[static_cast<size_t>(rank)];
  started.life = life;
  started.ledger = ledger;
  started.dies_at = -1;
}

void Scenario::begin_generation(int rank, int generation) {
  const std::lock_guard lock(mutex_);
  Rank& of = ranks_[static_cast<size_t>(rank)];
  of.generation = generation;
  of.phase = Phase::kMeets;
  of.collectives = of.meeting_calls = of.load_calls = 0;
  if (generation <= newest_) return;
  newest_ = generation;
  file_calls_ = 0;
}

void Scenario::begin_phase(int rank, Phase phase) {
  const std::lock_guard lock(mutex_);
  ranks_[static_cast<size_t>(rank)].phase = phase;
}

Scenario::Phase Scenario::phase_of(int rank) const {
  const std::lock_guard lock(mutex_);
  return ranks_[static_cast<size_t>(rank)].phase;
}

// REQUIRES: mutex_ is held.
const Fault* Scenario::due(int rank, Where where, int64_t at) {
  for (size_t number = 0; number < plan_.faults.size(); ++number) {
    const Fault& fault = plan_.faults[number];
    const int generation =
        where == Where::kCopy ? newest_ : ranks_[static_cast<size_t>(rank)].generation;
    if (happened_[number] || fault.where != where || fault.generation != generation) continue;
    if (fault.at != at || (where != Where::kCopy && fault.rank != rank)) continue;
    happened_[number] = true;
    return &fault;
  }
  return nullptr;
}

std::shared_ptr<RankLife> Scenario::life_of(int rank) const {
  const std::lock_guard lock(mutex_);
  return ranks_[static_cast<size_t>(rank)].life;
}

void Scenario::befall(const Fault& fault, RankLife& life) {
  switch (fault.kind) {
    case FaultKind::kDeath:
    case FaultKind::kTornFile:
      life.kill();
      throw Killed();
    case FaultKind::kThrow:
      throw std::runtime_error("the loader of rank " + std::to_string(fault.rank) +
                               " has no more batches (simulated)");
    case FaultKind::kStop:
      life.hold(std::nullopt);
      life.pass_or_throw();
      return;
    case FaultKind::kStuck:
      life.stand_still();
      return;
    case FaultKind::kPartition:
      life.hold(fault.time);
      life.pass_or_throw();
      return;
    case FaultKind::kSlow:
      life.slow_down(fault.time);
      return;
    case FaultKind::kDiskFull:
      return;
  }
}

void Scenario::at_step(int rank, int64_t step, const fs::path& folder) {
  const auto life = life_of(rank);
  life->pass_or_throw();
  std::unique_lock lock(mutex_);
  Rank& of = ranks_[static_cast<size_t>(rank)];
  const bool dies_now = of.dies_at >= 0 && step >= of.dies_at;
  const Fault* const fault = due(rank, Where::kStep, step);
  lock.unlock();
  if (fault != nullptr && fault->kind == FaultKind::kTornFile) {
    tear_newest_copy(folder, plan_.seed / 7);
  }
  if (fault != nullptr) befall(*fault, *life);
  if (!dies_now) return;
  life->kill();
  throw Killed();
}

void Scenario::at_collective(int rank) {
  const auto life = life_of(rank);
  life->pass_or_throw();
  std::unique_lock lock(mutex_);
  Rank& of = ranks_[static_cast<size_t>(rank)];
  const Fault* fault = due(rank, Where::kCollective, of.collectives++);
  if (fault == nullptr && of.phase == Phase::kLoads)
    fault = due(rank, Where::kLoad, of.load_calls++);
  lock.unlock();
  if (fault != nullptr) befall(*fault, *life);
}

bool Scenario::at_store_call(int rank, const std::shared_ptr<RankLife>& life) {
  if (!life->pass()) return false;
  std::unique_lock lock(mutex_);
  Rank& of = ranks_[static_cast<size_t>(rank)];
  const Fault* fault = nullptr;
  if (of.phase == Phase::kMeets) fault = due(rank, Where::kMeeting, of.meeting_calls++);
  if (of.phase == Phase::kLoads) fault = due(rank, Where::kLoad, of.load_calls++);
  lock.unlock();
  if (fault == nullptr) return true;
  try {
    befall(*fault, *life);
  } catch (const Killed&) {
    return false;
  }
  return true;
}

testing::FaultOfCall Scenario::at_file(const std::string& call, const std::string& path) {
  const bool is_write = call == "pwrite" || call == "ftruncate" || call == "fallocate";
  const bool is_of_copy = path.find("/states/") != std::string::npos;
  std::unique_lock lock(mutex_);
  std::shared_ptr<RankLife> own;
  for (const Rank& rank : ranks_) {
    if (rank.ledger && rank.ledger == memory::Ledger::current()) own = rank.life;
  }
  testing::FaultOfCall answer;
  if (is_of_copy) {
    const Fault* const fault = due(0, Where::kCopy, file_calls_++);
    if (fault != nullptr && fault->kind == FaultKind::kDiskFull) {
      refused_writes_ = fault->writes > 0 ? fault->writes : std::numeric_limits<int64_t>::max();
    } else if (fault != nullptr) {
      Rank& victim = ranks_[static_cast<size_t>(fault->rank)];
      if (fault->kind == FaultKind::kDeath) victim.life->kill();
      if (fault->kind == FaultKind::kStop) victim.life->hold(std::nullopt);
      if (fault->kind == FaultKind::kPartition) victim.life->hold(fault->time);
      if (fault->kind == FaultKind::kSlow) victim.life->slow_down(fault->time);
      if (fault->kind == FaultKind::kTornFile) {
        victim.dies_at = victim.step + plan_.copy_every + kStepsToTornCopy;
        if (call == "pwrite") answer = {testing::Fault::kTorn, 0};
      }
    }
  }
  if (is_write && refused_writes_ > 0) {
    --refused_writes_;
    answer = {testing::Fault::kFail, ENOSPC};
  }
  lock.unlock();
  // A process that is dead or stopped does nothing; what its writing threads had begun may come to its end, as in the kernel.
  if (own && !own->pass()) return {testing::Fault::kFail, EIO};
  return answer;
}

std::vector<bool> Scenario::happened() const {
  const std::lock_guard lock(mutex_);
  return happened_;
}

int64_t Scenario::lost_steps() const {
  const std::lock_guard lock(mutex_);
  return lost_steps_;
}

void Scenario::note_resume(int rank, int64_t step) {
  const std::lock_guard lock(mutex_);
  Rank& of = ranks_[static_cast<size_t>(rank)];
  if (rank == 0 && of.step > step) lost_steps_ += of.step - step;
  of.step = step;
}

void Scenario::note_step(int rank, int64_t step) {
  const std::lock_guard lock(mutex_);
  ranks_[static_cast<size_t>(rank)].step = step;
}

}  // namespace zeropage::simulated
