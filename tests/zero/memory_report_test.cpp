#include "zeropage/memory_report.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/ranks.h"
#include "zeropage/bytes.h"
#include "zeropage/simulation.h"
#include "zeropage/zeropage.h"

namespace zeropage::memory_report_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;
using testing::try_ranks;

torch::Tensor hold(Kind kind, int64_t bytes) {
  const KindScope scope(kind);
  return torch::empty({bytes}, torch::kByte);
}

TEST(MemoryReportTest, EveryRankGetsWhatEachHoldsAndHeldAtMost) {
  std::vector<MemoryReport> reports(3);
  run_ranks(3, [&](World& world) {
    hold(Kind::kActivation, (world.rank() + 1) * 8_MiB);  // and lets it go
    const auto state = hold(Kind::kOptimizerState, (world.rank() + 1) * 1_MiB);
    Ledger::current()->charge_offloaded(Tier::kNvme, Kind::kOptimizerState, world.rank() * 1_MiB);
    const MemoryReport report = memory_report(world);
    EXPECT_EQ(report.device, torch::kCPU);
    ASSERT_EQ(report.ranks.size(), 3U);
    for (int rank = 0; rank < 3; ++rank) {
      const RankMemory& memory = report.ranks[static_cast<size_t>(rank)];
      EXPECT_EQ(memory.held[Kind::kOptimizerState], (rank + 1) * 1_MiB);
      EXPECT_EQ(memory.held[Kind::kActivation], 0);
      EXPECT_EQ(memory.at_peak[Kind::kActivation], (rank + 1) * 8_MiB);
      EXPECT_EQ(memory.in_nvme_tier[Kind::kOptimizerState], rank * 1_MiB);
      EXPECT_EQ(memory.in_host_tier.total(), 0);
      EXPECT_EQ(memory.on_host.total(), 0) << "held is the host's";
      EXPECT_GT(memory.resident_bytes, 0);
      EXPECT_GE(memory.peak_resident_bytes, memory.resident_bytes);
    }
    Ledger::current()->discharge_offloaded(Tier::kNvme, Kind::kOptimizerState,
                                           world.rank() * 1_MiB);
    reports[static_cast<size_t>(world.rank())] = report;
  });
  EXPECT_EQ(reports[0].ranks, reports[1].ranks);
  EXPECT_EQ(reports[0].ranks, reports[2].ranks);
}

TEST(MemoryReportTest, TheModelsLedgerIsInIt) {
  run_ranks(2, [](World& world) {
    Options options;
    options.stage = Stage::kParameters;
    DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(256, 256), world, options);
    Optimizer<torch::optim::AdamW> optimizer(model, torch::optim::AdamWOptions(1e-3));
    model(torch::ones({2, 256})).sum().backward();
    optimizer.step();
    const MemoryReport report = memory_report(world);
    const RankMemory& own = report.ranks[static_cast<size_t>(world.rank())];
    EXPECT_EQ(own.held[Kind::kOptimizerState], Ledger::current()->now()[Kind::kOptimizerState]);
    const int64_t of_all =
        report.ranks[0].held[Kind::kOptimizerState] + report.ranks[1].held[Kind::kOptimizerState];
    EXPECT_EQ(of_all, 2 * 4 * 256 * 257) << "two states of each element, once over the ranks";
  });
}

MemoryReport report_of(const std::vector<int64_t>& parameter_bytes) {
  MemoryReport report;
  for (const int64_t bytes : parameter_bytes) {
    RankMemory rank;
    rank.held[Kind::kParameter] = bytes;
    rank.at_peak[Kind::kParameter] = 2 * bytes;
    rank.resident_bytes = 5_MiB;
    rank.peak_resident_bytes = 6_MiB;
    report.ranks.push_back(rank);
  }
  return report;
}

TEST(MemoryReportTest, IsATableForPeople) {
  std::ostringstream out;
  out << report_of({1_MiB, 3_MiB});
  EXPECT_EQ(out.str(),
            "memory held on cpu, by kind (2 ranks)\n"
            "                              rank 0      rank 1\n"
            "parameter                    1.0 MiB     3.0 MiB\n"
            "persistent                   1.0 MiB     3.0 MiB\n"
            "total                        1.0 MiB     3.0 MiB\n"
            "highest total                2.0 MiB     6.0 MiB\n"
            "resident                     5.0 MiB     5.0 MiB\n"
            "highest resident             6.0 MiB     6.0 MiB\n");
}

TEST(MemoryReportTest, OfManyRanksTheTableHasThoseThatHeldMost) {
  std::vector<int64_t> bytes(64, 2_MiB);
  bytes[5] = 1_MiB;
  bytes[17] = 9_MiB;
  bytes[60] = 8_MiB;
  const std::string table = report_of(bytes).to_string();
  EXPECT_THAT(table, AllOf(HasSubstr("rank 17 "), HasSubstr("rank 60"), HasSubstr("rank 0 "),
                           Not(HasSubstr("rank 5 ")), Not(HasSubstr("rank 59"))));
  EXPECT_THAT(table, HasSubstr("(the 6 ranks with the highest totals; the least of the 64 ranks is "
                               "2.0 MiB)\n"));
}

TEST(MemoryReportTest, AWorldOfOneAndASimulatedOneReportToo) {
  run_ranks(1, [](World& world) {
    const auto state = hold(Kind::kOptimizerState, 1_MiB);
    const MemoryReport report = memory_report(world);
    ASSERT_EQ(report.ranks.size(), 1U);
    EXPECT_EQ(report.ranks[0].held[Kind::kOptimizerState], 1_MiB);
    EXPECT_THAT(report.to_string(), HasSubstr("(1 rank)"));
  });
  const auto world = World::simulated({.topology = comm::Topology::even(8, 4)});
  const MemoryReport report = memory_report(world);
  ASSERT_EQ(report.ranks.size(), 8U);
  EXPECT_EQ(report.ranks[7], report.ranks[0]);
}

TEST(MemoryReportTest, ARankThatAsksAloneIsTold) {
  const auto errors = try_ranks(2, [](World& world) {
    if (world.rank() == 0) memory_report(world);
    if (world.rank() == 1) world.sum(1.0);
  });
  EXPECT_THAT(message_of(errors[0]),
              AllOf(HasSubstr("memory_report()"), HasSubstr("World::sum()")));
  EXPECT_THAT(message_of(errors[1]),
              AllOf(HasSubstr("memory_report()"), HasSubstr("World::sum()")));
}

}  // namespace
}  // namespace zeropage::memory_report_test
