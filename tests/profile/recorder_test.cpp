#include "profile/recorder.h"

#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "profile/report/growth.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "zeropage/profile.h"
#include "zeropage/profiler.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::recorder_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using memory::KindScope;
using memory::Ledger;
using profile::Change;
using profile::Profile;
using profile::Profiler;
using profile::RankProfile;
using profile::StepProfile;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr auto kHost = static_cast<uint8_t>(memory::Account::kHost);

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(16, 40));
    down = register_module("down", torch::nn::Linear(40, 16));
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// [batch, 7] -> [batch, 7]
struct NetImpl : torch::nn::Module {
  explicit NetImpl(checkpointing::EveryBlocks regions) : every(regions) {
    in = register_module("in", torch::nn::Linear(7, 16));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int layer = 0; layer < 4; ++layer) blocks->push_back(Block());
    out = register_module("out", torch::nn::Linear(16, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return out(checkpointing::checkpoint_each<Block>(blocks, every, in(x)));
  }
  checkpointing::EveryBlocks every;
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Net);

using Model = DistributedDataParallel<Net>;

void train_step(Model& model, torch::optim::Optimizer& optimizer, int rank, int step) {
  const Samples samples = samples_of(rank, step);
  optimizer.zero_grad();
  loss_of(model(samples.inputs), samples).backward();
  optimizer.step();
}

Options paged(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = 8192;
  return options;
}

// ---- the ledger's events ----

// Compares the ledger with the allocator at every event.
class Witness final : public memory::EventSink {
 public:
  explicit Witness(Ledger& ledger)
      : others_(memory::host_allocated_bytes() + memory::host_bytes_charged_by_hand() -
                ledger.now().total()) {}

  void on_ledger(const memory::LedgerEvent& event) override {
    if (event.account != memory::Account::kHost) return;
    ++events;
    const int64_t allocator =
        memory::host_allocated_bytes() + memory::host_bytes_charged_by_hand() - others_;
    if (event.total != allocator) ++wrong;
  }
  void on_page(const memory::PageEvent& /*event*/) override {}
  void on_span(const memory::Span& /*span*/) override {}

  int64_t events = 0;
  int64_t wrong = 0;

 private:
  const int64_t others_;  // of ledgers that do not change meanwhile
};

class Witnessed {
 public:
  explicit Witnessed(const std::shared_ptr<Ledger>& ledger)
      : ledger_(ledger), witness_(std::make_shared<Witness>(*ledger)) {
    ledger_->sink().exchange(witness_);
  }
  ~Witnessed() { ledger_->sink().exchange(nullptr); }
  const Witness& operator*() const { return *witness_; }

 private:
  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<Witness> witness_;
};

TEST(LedgerEventsTest, TotalEqualsTheAllocatorsAtEachOfTenThousandRandomEvents) {
  const auto ledger = std::make_shared<Ledger>("rank 0/1");
  const memory::LedgerScope scope(ledger);
  const Witnessed witnessed(ledger);
  std::mt19937 random(7);
  std::vector<at::Tensor> live;
  const auto any = [&](size_t most) {
    return std::uniform_int_distribution<size_t>(0, most)(random);
  };
  while ((*witnessed).events < 10000) {
    const KindScope kind(static_cast<Kind>(any(memory::kKindCount - 1)));
    const size_t what = any(9);
    if (what < 5 || live.empty()) {
      live.push_back(at::empty({static_cast<int64_t>(1 + any(600'000))}, at::kByte));
    } else if (what < 9) {
      std::swap(live[any(live.size() - 1)], live.back());
      live.pop_back();
    } else {
      memory::assign(live[any(live.size() - 1)], static_cast<Kind>(any(memory::kKindCount - 1)));
    }
    if (live.size() > 200) live.resize(20);
  }
  EXPECT_EQ((*witnessed).wrong, 0) << "of " << (*witnessed).events << " events";
}

TEST(LedgerEventsTest, TotalEqualsTheAllocatorsAtEachEventOfARealStep) {
  run_ranks(1, [](comm::World& world) {
    Model model(Net(checkpointing::EveryBlocks::each()), world, paged(3));
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    train_step(model, optimizer, 0, 0);
    const Witnessed witnessed(Ledger::current());
    train_step(model, optimizer, 0, 1);
    EXPECT_GT((*witnessed).events, 100);
    EXPECT_EQ((*witnessed).wrong, 0) << "of " << (*witnessed).events << " events";
  });
}

// ---- timelines ----

struct Recorded {
  Profile profile;                    // joined, on rank 0
  memory::Breakdown at_peak;          // of rank 0's last step, by the ledger
  std::vector<torch::Tensor> values;  // of rank 0's parameters in the end
};

Recorded record(int ranks, int stage, checkpointing::EveryBlocks regions, int steps,
                profile::ProfilerOptions options) {
  Recorded recorded;
  std::mutex mutex;
  run_ranks(ranks, [&](comm::World& world) {
    std::unique_lock lock(mutex);
    torch::manual_seed(3);
    Net net(regions);
    lock.unlock();
    Model model(net, world, paged(stage));
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-2));
    Profiler profiler(world, options);
    for (int step = 0; step < steps; ++step) {
      Ledger::current()->reset_peak();
      const auto scope = profiler.step(step);
      train_step(model, optimizer, world.rank(), step);
    }
    const memory::Breakdown at_peak = Ledger::current()->at_peak();
    Profile joined = profiler.join();
    std::vector<torch::Tensor> values;
    {
      const GatheredParameters gathered(model);
      for (const auto& parameter : model.parameters()) values.push_back(parameter.detach().clone());
    }
    if (world.rank() != 0) return;
    recorded = {std::move(joined), at_peak, std::move(values)};
  });
  return recorded;
}

struct Setting {
  int stage;
  bool recomputes;
};
void PrintTo(const Setting& setting, std::ostream* out) {
  *out << "stage " << setting.stage << (setting.recomputes ? ", recomputed" : "");
}

class TimelineTest : public ::testing::TestWithParam<Setting> {};

TEST_P(TimelineTest, AddsUpToTheLedgersPeakToTheByte) {
  const auto [stage, recomputes] = GetParam();
  const auto regions =
      recomputes ? checkpointing::EveryBlocks::each() : checkpointing::EveryBlocks::none();
  const Recorded recorded = record(2, stage, regions, 3, {.first_step = 1, .last_step = 2});
  ASSERT_EQ(recorded.profile.ranks.size(), 2U);
  const StepProfile& step = recorded.profile.ranks[0].steps.back();
  const profile::Moment peak = profile::peak_of(step, kHost);
  EXPECT_EQ(peak.total, recorded.at_peak.total());
  for (size_t kind = 0; kind < memory::kKindCount; ++kind) {
    EXPECT_EQ(peak.by_kind[kind], recorded.at_peak.bytes[kind])
        << memory::name(static_cast<Kind>(kind));
  }
}

TEST_P(TimelineTest, StepsFollowEachOther) {
  const auto [stage, recomputes] = GetParam();
  const Recorded recorded =
      record(2, stage, checkpointing::EveryBlocks::none(), 3, {.first_step = 1, .last_step = 2});
  for (const RankProfile& rank : recorded.profile.ranks) {
    profile::Moment end;
    profile::walk(rank.steps[0], kHost, [&](const profile::Moment& moment) { end = moment; });
    // Between the steps this loop resets the peak, and allocates nothing.
    EXPECT_EQ(end.by_kind, rank.steps[1].before[kHost]);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, TimelineTest,
                         ::testing::Values(Setting{0, false}, Setting{0, true}, Setting{1, false},
                                           Setting{1, true}, Setting{2, false}, Setting{2, true},
                                           Setting{3, false}, Setting{3, true}));

// "activation of aten::addmm, page \"\", forward" for each allocation.
std::set<std::string> allocations(const Profile& profile, const RankProfile& rank) {
  std::set<std::string> texts;
  for (const Change& change : rank.steps[0].changes) {
    if (change.bytes < 0) continue;
    texts.insert(profile.kinds[change.kind] + " of " + rank.names[change.owner] + ", page \"" +
                 rank.names[change.page] + "\", " + profile::name(change.phase));
  }
  return texts;
}

TEST(RecorderTest, NamesOwnerPageKindAndPhaseOfAllocations) {
  const Recorded recorded =
      record(2, 3, checkpointing::EveryBlocks::none(), 2, {.first_step = 1, .last_step = 1});
  const std::set<std::string> found = allocations(recorded.profile, recorded.profile.ranks[1]);
  for (const char* expected : {"activation of aten::addmm, page \"\", forward",
                               "parameter of page fetch, page \"blocks.1\", forward",
                               "parameter of page fetch, page \"blocks.1\", backward",
                               "bucket of gradient bucket, page \"blocks.1\", backward",
                               "activation_and_other of AddmmBackward0, page \"\", backward"}) {
    EXPECT_THAT(found, ::testing::Contains(expected));
  }
}

TEST(RecorderTest, KeepsPagesCollectivesAndWaits) {
  const Recorded recorded =
      record(2, 3, checkpointing::EveryBlocks::none(), 2, {.first_step = 1, .last_step = 1});
  const RankProfile& rank = recorded.profile.ranks[0];
  const StepProfile& step = rank.steps[0];
  std::vector<profile::PageRecord::What> of_page;
  for (const auto& record : step.pages) {
    if (rank.names[record.page] == "blocks.1") of_page.push_back(record.what);
  }
  using What = profile::PageRecord::What;
  // Forward, backward, and the gradient of the page after it is let go or before.
  EXPECT_THAT(of_page, ::testing::IsSupersetOf({What::kFetching, What::kResident, What::kEvicted,
                                                What::kFetching, What::kResident, What::kEvicted,
                                                What::kReducing, What::kReduced}));
  int gathers = 0, scatters = 0;
  for (const auto& span : step.spans) {
    if (span.what != profile::SpanRecord::What::kCollective) continue;
    const std::string& of = rank.names[span.of];
    EXPECT_LE(span.begin_ns, span.end_ns);
    if (rank.names[span.name] == "all_gather" && of.find("\"blocks.1\"") != std::string::npos) {
      ++gathers;
      EXPECT_GT(span.bytes, 0);
    }
    if (rank.names[span.name] == "reduce_scatter" && of.find("\"blocks.1\"") != std::string::npos) {
      ++scatters;
    }
  }
  EXPECT_EQ(gathers, 2);
  EXPECT_EQ(scatters, 1);
}

// ---- only what was chosen ----

TEST(ProfilerTest, LooksAtNothingBeforeAndAfterTheChosenSteps) {
  run_ranks(1, [](comm::World& world) {
    Profiler profiler(world, {.first_step = 2, .last_step = 3});
    for (int step = 0; step < 6; ++step) {
      {
        const auto scope = profiler.step(step);
        EXPECT_EQ(Ledger::current()->sink().empty(), step != 2 && step != 3) << step;
        at::empty({100});
      }
      EXPECT_EQ(Ledger::current()->sink().empty(), step != 2) << "behind step " << step;
    }
    const Profile profile = profiler.join();
    ASSERT_EQ(profile.ranks[0].steps.size(), 2U);
    EXPECT_EQ(profile.ranks[0].steps[0].step, 2);
    EXPECT_EQ(profile.ranks[0].steps[1].changes.size(), 2U);  // an allocation and its end
  });
}

TEST(ProfilerTest, LooksAtNothingBehindTheChosenStepsThoughTheLastOfThemDidNotCome) {
  run_ranks(1, [](comm::World& world) {
    Profiler profiler(world, {.first_step = 2, .last_step = 5});
    for (int step = 0; step < 10; step += 2) {
      const auto scope = profiler.step(step);
      EXPECT_EQ(Ledger::current()->sink().empty(), step != 2 && step != 4) << step;
    }
    EXPECT_EQ(profiler.join().ranks[0].steps.size(), 2U);
  });
}

TEST(ProfilerTest, LeavesTheBitsAsTheyAre) {
  const auto none = checkpointing::EveryBlocks::none();
  const Recorded with = record(2, 3, none, 3, {.first_step = 0, .last_step = 2});
  const Recorded without = record(2, 3, none, 3, {.first_step = 9, .last_step = 9});
  ASSERT_EQ(with.values.size(), without.values.size());
  for (size_t index = 0; index < with.values.size(); ++index) {
    EXPECT_TRUE(torch::equal(with.values[index], without.values[index])) << index;
  }
}

TEST(ProfilerTest, RefusesASecondOneAndStepsThatAreNone) {
  run_ranks(1, [](comm::World& world) {
    Profiler first(world, {.first_step = 0, .last_step = 1});
    Profiler second(world, {.first_step = 0, .last_step = 1});
    {
      const auto scope = first.step(0);
      EXPECT_THAT(error_of([&] { static_cast<void>(second.step(0)); }),
                  ::testing::HasSubstr("another Profiler is recording"));
      EXPECT_THAT(error_of([&] { static_cast<void>(first.step(1)); }),
                  ::testing::HasSubstr("still being recorded"));
    }
    EXPECT_THAT(error_of([&] { static_cast<void>(first.step(0)); }),
                ::testing::HasSubstr("number steps upwards"));
    EXPECT_THAT(error_of([&] { Profiler(world, {.first_step = 3, .last_step = 2}); }),
                ::testing::HasSubstr("first_step 3 and last_step 2"));
  });
}

// ---- leaks ----

TEST(GrowthTest, APlantedLeakIsNamedWithOwnerAndPage) {
  run_ranks(1, [](comm::World& world) {
    Model model(Net(checkpointing::EveryBlocks::none()), world, paged(3));
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    std::vector<at::Tensor> leaked;
    Profiler profiler(world, {.first_step = 1, .last_step = 4});
    for (int step = 0; step < 5; ++step) {
      const auto scope = profiler.step(step);
      train_step(model, optimizer, 0, step);
      const memory::OwnerScope owner("cache of blocks", "blocks.1");
      const KindScope kind(Kind::kStaging);
      leaked.push_back(at::empty({256}, at::kFloat));
    }
    const auto growth = profile::growth_of(profiler.join());
    ASSERT_EQ(growth.size(), 1U) << growth[1].to_string();
    EXPECT_EQ(growth[0].to_string(),
              "rank 0 holds 1024 bytes more of staging on the host at the end of each step, "
              "allocated by cache of blocks for page \"blocks.1\" (1024 bytes grew to 4096 in 3 "
              "steps)");
  });
}

TEST(GrowthTest, AnOutputThatIsKeptIsNamedByItsOperator) {
  std::vector<at::Tensor> kept;
  const auto x = torch::ones({8, 8});
  EXPECT_NONFATAL_FAILURE(EXPECT_NO_GROWTH(4, [&] { kept.push_back(torch::mm(x, x)); }),
                          "256 bytes more of activation_and_other on the host at the end of each "
                          "step, allocated by aten::mm");
}

TEST(GrowthTest, ATrainingLoopThatKeepsNothingDoesNotGrow) {
  run_ranks(2, [](comm::World& world) {
    Model model(Net(checkpointing::EveryBlocks::each()), world, paged(2));
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    int step = 0;
    EXPECT_NO_GROWTH(4, [&] { train_step(model, optimizer, world.rank(), step++); });
  });
}

TEST(GrowthTest, TwoStepsTellNothing) {
  EXPECT_THAT(error_of([] { profile::growth_over(2, [] {}); }),
              ::testing::HasSubstr("expected 3 steps or more"));
}

}  // namespace
}  // namespace zeropage::recorder_test
