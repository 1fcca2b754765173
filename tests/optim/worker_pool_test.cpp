#include "optim/worker_pool.h"

#include <atomic>
#include <cfenv>
#include <mutex>
#include <sched.h>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "optim/flat_norm.h"
#include "optim/fused_step.h"
#include "optim/parallel.h"
#include "optim/stochastic_rounding.h"
#include "tests/harness/errors.h"
#include "zeropage/ledger.h"

namespace zeropage::optim::worker_pool_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

cpu_set_t own_mask() {
  cpu_set_t cpus;
  EXPECT_EQ(sched_getaffinity(0, sizeof(cpus), &cpus), 0);
  return cpus;
}

WorkerPoolOptions of_threads(int threads) {
  return {.cores = device::Machine::here().cores(), .threads = threads};
}

// Each part returns only when `parts` of them are under way, so that each has a thread of its own.
class Meeting {
 public:
  explicit Meeting(int parts) : missing_(parts) {}
  void arrive() {
    --missing_;
    while (missing_ > 0) std::this_thread::yield();
  }

 private:
  std::atomic<int> missing_;
};

TEST(WorkerPoolTest, CallsTheBodyOnceForEveryElement) {
  for (const int threads : {1, 2, 3, 7}) {
    WorkerPool pool(of_threads(threads));
    EXPECT_EQ(pool.threads(), threads);
    for (const int64_t numel : {0, 1, 5, 99, 100, 101, 1000}) {
      std::vector<int> calls(static_cast<size_t>(numel), 0);
      std::atomic<int> parts = 0;
      pool.parallel_for(numel, 100, [&](int64_t begin, int64_t end) {
        ++parts;
        EXPECT_LT(begin, end);
        for (int64_t at = begin; at < end; ++at) ++calls[static_cast<size_t>(at)];
      });
      EXPECT_EQ(calls, std::vector<int>(static_cast<size_t>(numel), 1)) << numel;
      EXPECT_LE(parts, std::min<int64_t>(threads, (numel + 99) / 100)) << numel;
    }
  }
}

TEST(WorkerPoolTest, HasAsManyThreadsAsItWasToldEachOnItsCore) {
  const device::CoreSet& cores = device::Machine::here().cores();
  const cpu_set_t before = own_mask();
  constexpr int kThreads = 3;
  WorkerPool pool(of_threads(kThreads));
  for (int round = 0; round < 3; ++round) {
    std::mutex mutex;
    std::set<std::thread::id> threads;
    std::multiset<int> first_cpus;
    Meeting meeting(kThreads);
    pool.parallel_for(kThreads, 1, [&](int64_t, int64_t) {
      meeting.arrive();
      const cpu_set_t mask = own_mask();
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
      for (const device::Core& core : cores) {
        if (CPU_ISSET(core.cpus.front(), &mask)) first_cpus.insert(core.cpus.front());
      }
    });
    EXPECT_EQ(threads.size(), static_cast<size_t>(kThreads));
    std::multiset<int> expected;
    for (size_t slot = 0; slot < kThreads; ++slot) {
      expected.insert(cores[slot % cores.size()].cpus.front());
    }
    EXPECT_EQ(first_cpus, expected);
    const cpu_set_t after = own_mask();
    EXPECT_TRUE(CPU_EQUAL(&before, &after)) << "the caller is not where it was";
  }
}

TEST(WorkerPoolTest, LeavesThreadsToTheSchedulerWhereAskedTo) {
  const cpu_set_t before = own_mask();
  // Its worker is the next one's too.
  WorkerPool pinned(of_threads(2));
  Meeting of_pinned(2);
  pinned.parallel_for(2, 1, [&](int64_t, int64_t) { of_pinned.arrive(); });
  WorkerPoolOptions options = of_threads(2);
  options.pinning = Pinning::kNone;
  WorkerPool pool(options);
  Meeting meeting(2);
  pool.parallel_for(2, 1, [&](int64_t, int64_t) {
    meeting.arrive();
    const cpu_set_t mask = own_mask();
    EXPECT_TRUE(CPU_EQUAL(&before, &mask));
  });
}

TEST(WorkerPoolTest, TakesThisProcesssCoresByDefault) {
  EXPECT_EQ(WorkerPool().cores(), device::own_core_set());
  EXPECT_EQ(WorkerPool().threads(), static_cast<int>(device::own_core_set().size()));
}

TEST(WorkerPoolTest, RefusesOptionsThatMakeNoSense) {
  EXPECT_THAT(error_of([] { WorkerPool({.cores = device::CoreSet{}}); }),
              HasSubstr("a core set of zero cores"));
  EXPECT_THAT(error_of([] { WorkerPool({.threads = -1}); }), HasSubstr("or 0 for one a core"));
  EXPECT_THAT(error_of([] { WorkerPool({.cores = device::CoreSet{{.cpus = {100000}}}}); }),
              HasSubstr("does not bind a thread to the hardware threads"));
}

TEST(WorkerPoolTest, RethrowsWhatAPartThrew) {
  WorkerPool pool(of_threads(3));
  std::atomic<int> ended = 0;
  const auto run = [&] {
    pool.parallel_for(300, 100, [&](int64_t begin, int64_t) {
      if (begin == 100) throw std::runtime_error("of part 1");
      ++ended;
    });
  };
  EXPECT_EQ(error_of(run), "of part 1");
  EXPECT_EQ(ended, 2) << "the other parts run to their ends";
  EXPECT_EQ(error_of(run), "of part 1") << "and again";
}

TEST(WorkerPoolTest, RunsLoopsWithinLoopsAndOfSeveralCallersAtOnce) {
  WorkerPool pool(of_threads(3));
  WorkerPool other(of_threads(2));
  std::atomic<int64_t> sum = 0;
  const auto nested = [&] {
    pool.parallel_for(30, 10, [&](int64_t begin, int64_t end) {
      pool.parallel_for(end - begin, 2, [&](int64_t first, int64_t last) { sum += last - first; });
      other.parallel_for(end - begin, 2, [&](int64_t first, int64_t last) { sum += last - first; });
    });
  };
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) nested();
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 50 * 2 * 30);
}

TEST(WorkerPoolTest, ShowsPartsTheCallersLedgerKindArithmeticAndPool) {
  constexpr int kThreads = 3;
  WorkerPool pool(of_threads(kThreads));
  const auto ledger = std::make_shared<memory::Ledger>("rank 1/2");
  const memory::LedgerScope ledger_scope(ledger);
  const memory::KindScope kind_scope(memory::Kind::kMasterWeights);
  const int rounding = std::fegetround();
  std::fesetround(FE_TOWARDZERO);
  Meeting meeting(kThreads);
  pool.parallel_for(kThreads, 1, [&](int64_t, int64_t) {
    meeting.arrive();
    EXPECT_EQ(memory::Ledger::current(), ledger);
    EXPECT_EQ(memory::current_kind(), memory::Kind::kMasterWeights);
    EXPECT_EQ(std::fegetround(), FE_TOWARDZERO);
    EXPECT_EQ(WorkerPoolScope::current(), &pool);
    EXPECT_EQ(at::get_num_threads(), 1) << "LibTorch's loops would make threads of their own";
  });
  std::fesetround(rounding);
  Meeting again(kThreads);
  pool.parallel_for(kThreads, 1, [&](int64_t, int64_t) {
    again.arrive();
    EXPECT_EQ(std::fegetround(), rounding);
  });
  EXPECT_EQ(WorkerPoolScope::current(), nullptr);
}

TEST(WorkerPoolTest, FlushesDenormalsWhereTheCallerDoes) {
  constexpr int kThreads = 3;
  WorkerPool pool(of_threads(kThreads));
  const auto halved = [&] {
    volatile float tiny = 1e-38F;  // its half is a denormal
    std::atomic<int> zeros = 0;
    Meeting meeting(kThreads);
    pool.parallel_for(kThreads, 1, [&](int64_t, int64_t) {
      meeting.arrive();
      if (tiny * 0.25F == 0.0F) ++zeros;
    });
    return zeros.load();
  };
  EXPECT_EQ(halved(), 0);
  if (at::globalContext().setFlushDenormal(true)) {
    EXPECT_EQ(halved(), kThreads);
    at::globalContext().setFlushDenormal(false);
  }
  EXPECT_EQ(halved(), 0);
}

TEST(WorkerPoolScopeTest, SendsThisFoldersLoopsToItsPool) {
  WorkerPool outer(of_threads(2));
  WorkerPool inner(of_threads(3));
  const auto pool_of_loop = [] {
    WorkerPool* seen = nullptr;
    parallel_for(1, 1, [&](int64_t, int64_t) { seen = WorkerPoolScope::current(); });
    return seen;
  };
  EXPECT_EQ(pool_of_loop(), nullptr);
  {
    const WorkerPoolScope outer_scope(outer);
    EXPECT_EQ(pool_of_loop(), &outer);
    {
      const WorkerPoolScope inner_scope(inner);
      EXPECT_EQ(pool_of_loop(), &inner);
    }
    EXPECT_EQ(pool_of_loop(), &outer);
    std::thread([&] { EXPECT_EQ(pool_of_loop(), nullptr); }).join();
  }
  EXPECT_EQ(pool_of_loop(), nullptr);
}

// A step, a norm and a rounding: everything that they write, as one tensor.
at::Tensor everything() {
  torch::manual_seed(3);
  constexpr int64_t kNumel = 300001;
  const at::Tensor values = torch::randn({kNumel});
  const at::Tensor gradient = torch::randn({kNumel});
  const at::Tensor copy = torch::empty({kNumel}, at::kBFloat16);
  const auto options = torch::optim::AdamWOptions(1e-2);
  const auto states = make_states(options, values);
  for (const int64_t step : {1, 2}) {
    fused_step(options, step, {values, gradient, {}, states}, {.found_inf = found_inf(gradient)});
  }
  round_stochastically(values, copy, {.seed = 7, .step = 1, .tensor = 2, .first_element = 0});
  return torch::cat(
      {values, states[0], states[1], copy.to(at::kFloat),
       torch::full({1}, sum_of_squares(gradient).value(), at::kDouble).view(at::kFloat)});
}

TEST(WorkerPoolScopeTest, ChangesNoBitOfAStepANormOrARounding) {
  const at::Tensor expected = everything();
  for (const int threads : {1, 2, 3, 7}) {
    WorkerPool pool(of_threads(threads));
    const WorkerPoolScope scope(pool);
    EXPECT_TRUE(torch::equal(everything().view(at::kInt), expected.view(at::kInt))) << threads;
  }
}

}  // namespace
}  // namespace zeropage::optim::worker_pool_test
