// Wrapping gives every rank rank 0's values, and sends no more of them than ranks keep.
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/simulation.h"
#include "zeropage/zeropage.h"

namespace zeropage::first_values_test {
namespace {

using namespace zeropage::testing;
using comm::LinkTraffic;
using comm::Operation;
using comm::SimulatedCommunicator;
using comm::Topology;
using comm::WireTraffic;
using comm::World;
using ::testing::HasSubstr;
using memory::operator""_KiB;

// Ranks are threads, and the generator of random numbers is the process's.
std::mutex& random_numbers() {
  static std::mutex mutex;
  return mutex;
}

int64_t bytes_of_values(const WireTraffic& sent) {
  return sent.pair.bytes + sent.broadcast.bytes + sent.scatter.bytes;
}

int64_t parameter_bytes(const torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const torch::Tensor& parameter : module.parameters()) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return bytes;
}

struct Setting {
  int ranks = 2;
  int stage = 3;
  int shard_within = Options::kAllRanks;
  int64_t minimum_sharded_bytes = 0;
  bool is_cast = false;  // to bf16, with fp32 master weights
};

class FirstValuesTest : public ::testing::TestWithParam<Setting> {
 protected:
  Options options() const {
    const Setting& setting = GetParam();
    Options options;
    options.stage = stage_of(setting.stage);
    options.page_bytes = 4_KiB;
    options.shard_within = setting.shard_within;
    options.minimum_sharded_bytes = setting.minimum_sharded_bytes;
    if (setting.is_cast) options.compute_dtype = at::kBFloat16;
    return options;
  }

  template <typename M>
  void expect_rank_zeros_values() const {
    std::vector<torch::Tensor> expected;
    run_ranks(GetParam().ranks, [&](World& world) {
      M module{nullptr};
      {
        const std::lock_guard lock(random_numbers());
        torch::manual_seed(40 + static_cast<uint64_t>(world.rank()));
        module = M();
        if (world.rank() == 0) {
          for (const torch::Tensor& parameter : module->parameters()) {
            const bool is_cast = GetParam().is_cast && parameter.is_floating_point();
            expected.push_back(parameter.detach().to(is_cast ? at::kBFloat16 : at::kFloat).clone());
          }
        }
      }
      DistributedDataParallel<M> model(module, world, options());
      const GatheredParameters gathered(model);
      world.communicator().barrier("rank 0's are known").wait();
      EXPECT_TRUE(same_bits(expected, model.parameters())) << "rank " << world.rank();
    });
  }
};

TEST_P(FirstValuesTest, AreRank0s) {
  expect_rank_zeros_values<Oddball>();
  expect_rank_zeros_values<Transformer>();
}

INSTANTIATE_TEST_SUITE_P(Settings, FirstValuesTest,
                         ::testing::Values(Setting{.ranks = 2}, Setting{.ranks = 3},
                                           Setting{.ranks = 5}, Setting{.ranks = 8},
                                           Setting{.ranks = 6, .shard_within = 3},
                                           Setting{.ranks = 4, .minimum_sharded_bytes = 1024},
                                           Setting{.ranks = 3, .is_cast = true},
                                           Setting{.ranks = 3, .stage = 0},
                                           Setting{.ranks = 3, .stage = 2, .is_cast = true}));

torch::nn::Sequential layers(int count, int64_t width) {
  torch::nn::Sequential made;
  for (int layer = 0; layer < count; ++layer) made->push_back(torch::nn::Linear(width, width));
  return made;
}

TEST(FirstValuesTrafficTest, LeaveRank0OnceAtStage3) {
  constexpr int kRanks = 5;
  run_ranks(kRanks, [&](World& world) {
    std::optional<torch::nn::Sequential> module;
    {
      const std::lock_guard lock(random_numbers());
      module.emplace(layers(3, 100));
    }
    const int64_t bytes = parameter_bytes(**module);
    Options options;
    options.stage = stage_of(3);
    const DistributedDataParallel<torch::nn::Sequential> model(*module, world, options);
    const WireTraffic sent = world.communicator().wire_traffic();
    EXPECT_EQ(sent.broadcast.bytes, 0);
    EXPECT_LT(sent.pair.bytes, bytes);
    if (world.rank() == 0) {
      EXPECT_GT(sent.pair.bytes, bytes / 2) << "which others keep";
    }
  });
}

struct OutOfHost {
  int64_t bytes = 0;
  int64_t messages = 0;  // of the rank with the most
};

// What leaves rank 0's host of 8 ranks while a module is wrapped.
template <typename Wrap>
OutOfHost out_of_first_host(int ranks, const Wrap& wrap) {
  constexpr int kRanksOfHost = 8;
  OutOfHost out;
  for (int rank = 0; rank < kRanksOfHost; ++rank) {
    const World world =
        World::simulated({.rank = rank, .topology = Topology::even(ranks, kRanksOfHost)});
    wrap(world);
    int64_t messages = 0;
    const auto& figures = SimulatedCommunicator::of(world.communicator()).figures();
    for (const Operation operation :
         {Operation::kPair, Operation::kBroadcast, Operation::kScatter}) {
      const LinkTraffic& sent = figures[operation].sent;
      out.bytes += sent.between_hosts.bytes;
      messages += sent.total().messages;
    }
    out.messages = std::max(out.messages, messages);
  }
  return out;
}

Options stage3() {
  Options options;
  options.stage = stage_of(3);
  return options;
}

TEST(FirstValuesOf4096RanksTest, LeaveRank0sHostOnceAtStage3) {
  const int64_t bytes = parameter_bytes(*layers(3, 1000));
  const OutOfHost out = out_of_first_host(4096, [](const World& world) {
    // The module of a deferred one alone, so that it counts as one that has values.
    DeferredModule deferred([] { return layers(3, 1000); });
    const DistributedDataParallel<torch::nn::Sequential> model(deferred.module(), world, stage3());
  });
  EXPECT_GT(static_cast<double>(out.bytes), 0.99 * static_cast<double>(bytes));
  EXPECT_LE(static_cast<double>(out.bytes), 1.01 * static_cast<double>(bytes));
  // Six tensors, down a tree of twelve levels.
  EXPECT_LE(out.messages, 6 * 12);
}

TEST(FirstValuesOf4096RanksTest, OfADeferredModuleAreNotSent) {
  const OutOfHost out = out_of_first_host(4096, [](const World& world) {
    DeferredModule deferred([] { return layers(3, 1000); });
    const DistributedDataParallel<torch::nn::Sequential> model(std::move(deferred), world,
                                                               stage3());
  });
  EXPECT_EQ(out.bytes, 0);
}

// Each rank's plain module and its deferred one, of that seed.
class DeferredValuesTest : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int kRanks = 4;

  // Returns what rank 0 told on stderr. expected: of rank 0.
  std::string wrap(const std::function<uint64_t(int)>& seed_of, bool is_sent) const {
    std::vector<torch::Tensor> expected;
    {
      torch::manual_seed(seed_of(0));
      const Transformer plain;
      for (const torch::Tensor& parameter : plain->parameters()) {
        expected.push_back(parameter.detach().clone());
      }
    }
    ::testing::internal::CaptureStderr();
    run_ranks(kRanks, [&](World& world) {
      std::optional<DeferredModule<Transformer>> deferred;
      {
        const std::lock_guard lock(random_numbers());
        torch::manual_seed(seed_of(world.rank()));
        deferred.emplace([] { return Transformer(); });
      }
      Options options;
      options.stage = stage_of(GetParam());
      options.page_bytes = 4_KiB;
      options.broadcast_buffers = false;
      DistributedDataParallel<Transformer> model(std::move(*deferred), world, options);
      const int64_t sent = bytes_of_values(world.communicator().wire_traffic());
      if (world.rank() == 0) {
        EXPECT_EQ(sent > 0, is_sent) << sent;
      }
      const GatheredParameters gathered(model);
      EXPECT_TRUE(same_bits(expected, model.parameters())) << "rank " << world.rank();
    });
    return ::testing::internal::GetCapturedStderr();
  }
};
INSTANTIATE_TEST_SUITE_P(Stages, DeferredValuesTest, ::testing::Values(0, 1, 3));

TEST_P(DeferredValuesTest, AreSentByNobodyWhereSeedsAreAlike) {
  EXPECT_EQ(wrap([](int) { return 21; }, /*is_sent=*/false), "");
}

TEST_P(DeferredValuesTest, AreRank0sWhereARankHasAnotherSeed) {
  const std::string told = wrap([](int rank) { return rank == 2 ? 22 : 21; }, /*is_sent=*/true);
  EXPECT_THAT(told, HasSubstr("zeropage: parameter \"embedding\" and "));
  EXPECT_THAT(told, HasSubstr("rank 2 computed other values than rank 0"));
}

}  // namespace
}  // namespace zeropage::first_values_test
