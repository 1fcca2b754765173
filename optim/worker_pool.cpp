#include "optim/worker_pool.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <exception>
#include <mutex>
#include <omp.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/info.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>
#include <oneapi/tbb/task_scheduler_observer.h>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include "base/exact.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::optim {
namespace {

thread_local WorkerPool* pool_of_thread = nullptr;

// oneTBB starts one number of workers for all arenas of a process: the machine's cores, unless it
// is told of more. Pools together may have more, say where ranks are threads.
class WorkersOfProcess {
 public:
  // Never destroyed: a pool of static storage duration may end after us.
  static WorkersOfProcess& instance() {
    static auto* const workers = new WorkersOfProcess;
    return *workers;
  }

  // More, or fewer.
  void change(int workers) {
    const std::lock_guard lock(mutex_);
    workers_ += workers;
    // The least of the controls that are there is what counts, so the old one must go first.
    control_.reset();
    control_ = std::make_unique<tbb::global_control>(
        tbb::global_control::max_allowed_parallelism,
        static_cast<size_t>(std::max(tbb::info::default_concurrency(), 1 + workers_)));
  }

 private:
  std::mutex mutex_;
  // Guarded by mutex_.
  int workers_ = 0;
  std::unique_ptr<tbb::global_control> control_;
};

// What a part sees of its thread: as the caller left it.
class CallersView {
 public:
  explicit CallersView(WorkerPool* pool)
      : pool_(pool), ledger_(memory::Ledger::current()), kind_(memory::current_kind()) {
    std::fegetenv(&arithmetic_);
  }

  class Scope {
   public:
    explicit Scope(const CallersView& view)
        : pool_(*view.pool_),
          ledger_(view.ledger_),
          kind_(view.kind_),
          // Before it is set: a new thread's first question sets it by itself.
          intra_op_threads_(at::get_num_threads()) {
      std::fegetenv(&arithmetic_);
      std::fesetenv(&view.arithmetic_);
      omp_set_num_threads(1);
    }
    ~Scope() {
      omp_set_num_threads(intra_op_threads_);
      std::fesetenv(&arithmetic_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const WorkerPoolScope pool_;
    const memory::LedgerScope ledger_;
    const memory::KindScope kind_;
    const int intra_op_threads_;
    std::fenv_t arithmetic_;
  };

 private:
  WorkerPool* const pool_;
  const std::shared_ptr<memory::Ledger> ledger_;
  const memory::Kind kind_;
  std::fenv_t arithmetic_;
};

// Puts whoever enters the arena where the pool computes, and lets him go when he leaves. A worker of
// oneTBB serves all pools, and is born on the core of whoever it was that needed it: so it is told
// in each, and goes back to all cores.
class PlacingObserver : public tbb::task_scheduler_observer {
 public:
  PlacingObserver(tbb::task_arena& arena, const device::CoreSet& cores, Pinning pinning)
      : tbb::task_scheduler_observer(arena),
        pinning_(pinning),
        cores_(cores),
        callers_(static_cast<size_t>(arena.max_concurrency())) {
    observe(true);
  }
  // No callback is under way once this has returned.
  ~PlacingObserver() override { observe(false); }
  PlacingObserver(const PlacingObserver&) = delete;
  PlacingObserver& operator=(const PlacingObserver&) = delete;

  void on_scheduler_entry(bool is_worker) override {
    const auto slot = static_cast<size_t>(tbb::this_task_arena::current_thread_index());
    noting_errors([&] {
      if (pinning_ == Pinning::kNone) {
        if (is_worker) device::bind_this_thread(device::Machine::here().cores());
      } else if (is_worker) {
        device::bind_this_thread({cores_[slot % cores_.size()]});
      } else {
        callers_[slot].emplace(device::CoreSet{cores_[slot % cores_.size()]});
      }
    });
  }

  void on_scheduler_exit(bool is_worker) override {
    if (is_worker) {
      noting_errors([] { device::bind_this_thread(device::Machine::here().cores()); });
    } else {
      callers_[static_cast<size_t>(tbb::this_task_arena::current_thread_index())].reset();
    }
  }

  // Throws the system's refusal, where there was one: a callback cannot.
  void check() {
    const std::lock_guard lock(mutex_);
    if (refused_) std::rethrow_exception(std::exchange(refused_, nullptr));
  }

 private:
  template <typename Place>
  void noting_errors(const Place& place) {
    try {
      place();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!refused_) refused_ = std::current_exception();
    }
  }

  const Pinning pinning_;
  const device::CoreSet& cores_;
  // By slot; a slot is its thread's alone between entry and exit.
  std::vector<std::optional<device::BindingScope>> callers_;
  std::mutex mutex_;
  std::exception_ptr refused_;  // guarded by mutex_
};

device::CoreSet cores_of(const WorkerPoolOptions& options) {
  device::CoreSet cores = options.cores ? *options.cores : device::own_core_set();
  ZP_CHECK(!cores.empty(),
           "WorkerPool: cores: expected at least one core, got a core set of zero cores; "
           "memory::Machine::here().core_sets(ranks) divides those of this process");
  return cores;
}

int threads_of(const WorkerPoolOptions& options, const device::CoreSet& cores) {
  ZP_CHECK(options.threads >= 0,
           "WorkerPool: threads: expected 1 or more, or 0 for one a core, got ", options.threads);
  return options.threads > 0 ? options.threads : static_cast<int>(cores.size());
}

}  // namespace

struct WorkerPool::Arena {
  explicit Arena(const WorkerPoolOptions& options)
      : cores(cores_of(options)), threads(threads_of(options, cores)), arena(threads) {
    if (options.pinning == Pinning::kToCores) {
      // Where a core cannot be had, the maker hears of it.
      for (const device::Core& core : cores) const device::BindingScope bound({core});
    }
    arena.initialize();
    placing.emplace(arena, cores, options.pinning);
    // The caller is one of them.
    WorkersOfProcess::instance().change(threads - 1);
  }
  ~Arena() { WorkersOfProcess::instance().change(1 - threads); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const device::CoreSet cores;
  const int threads;
  tbb::task_arena arena;
  std::optional<PlacingObserver> placing;
};

WorkerPool::WorkerPool(const WorkerPoolOptions& options)
    : arena_(std::make_unique<Arena>(options)) {}

WorkerPool::~WorkerPool() = default;

int WorkerPool::threads() const {
  return arena_->threads;
}

const device::CoreSet& WorkerPool::cores() const {
  return arena_->cores;
}

void WorkerPool::parallel_for(int64_t numel, int64_t grain,
                              const std::function<void(int64_t begin, int64_t end)>& body) {
  ZP_CHECK(numel >= 0 && grain >= 1, "WorkerPool: expected numel >= 0 and grain >= 1, got ", numel,
           " and ", grain);
  if (numel == 0) return;
  const CallersView view(this);
  const int64_t parts = std::min<int64_t>(threads(), base::div_ceil(numel, grain));
  if (parts == 1) {
    const CallersView::Scope scope(view);
    return body(0, numel);
  }
  const int64_t part_numel = base::div_ceil(numel, parts);
  std::mutex mutex;
  std::exception_ptr error;  // guarded by mutex
  // The arena orders the parts after the caller and before its return; ThreadSanitizer, which does
  // not see into oneTBB, learns it from these.
  std::atomic<bool> begun = true;
  std::atomic<int64_t> ended = 0;
  const auto run_part = [&](int64_t part) {
    (void)begun.load(std::memory_order_acquire);
    try {
      const CallersView::Scope scope(view);
      const int64_t begin = part * part_numel;
      // Rounding up may leave nothing for the last.
      if (begin < numel) body(begin, std::min(numel, begin + part_numel));
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
    ended.fetch_add(1, std::memory_order_release);
  };
  arena_->arena.execute([&] {
    // A thread that waits for the rest of its loop takes no part of another's.
    tbb::this_task_arena::isolate(
        [&] { tbb::parallel_for(int64_t{0}, parts, run_part, tbb::static_partitioner()); });
  });
  (void)ended.load(std::memory_order_acquire);
  if (error) std::rethrow_exception(error);
  arena_->placing->check();
}

WorkerPoolScope::WorkerPoolScope(WorkerPool& pool)
    : before_(std::exchange(pool_of_thread, &pool)) {}

WorkerPoolScope::~WorkerPoolScope() {
  pool_of_thread = before_;
}

WorkerPool* WorkerPoolScope::current() {
  return pool_of_thread;
}

}  // namespace zeropage::optim
