#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/batches.h"
#include "zeropage/zeropage.h"

namespace zeropage::joined_batches_test {
namespace {

using namespace zeropage::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

// Batches are numbers: 100 times the rank plus which.
std::vector<int> batches_of(int rank, int count) {
  std::vector<int> batches;
  for (int batch = 0; batch < count; ++batch) batches.push_back(100 * rank + batch);
  return batches;
}

struct Seen {
  std::vector<int> batches;
  std::vector<double> weights;
};

// What each rank sees; counts: by rank.
std::vector<Seen> seen_by_ranks(const std::vector<int>& counts) {
  std::vector<Seen> seen(counts.size());
  run_ranks(static_cast<int>(counts.size()), [&](comm::World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    auto batches = batches_of(world.rank(), counts[rank]);
    for (const auto& [batch, weight] : joined(batches, world)) {
      seen[rank].batches.push_back(batch);
      seen[rank].weights.push_back(weight);
    }
  });
  return seen;
}

TEST(JoinedBatchesTest, RepeatTheLastOneWithoutWeightUntilNoRankHasOne) {
  const auto seen = seen_by_ranks({1, 3, 2});
  EXPECT_THAT(seen[0].batches, ElementsAre(0, 0, 0));
  EXPECT_THAT(seen[0].weights, ElementsAre(1, 0, 0));
  EXPECT_THAT(seen[1].batches, ElementsAre(100, 101, 102));
  EXPECT_THAT(seen[1].weights, ElementsAre(1, 1, 1));
  EXPECT_THAT(seen[2].batches, ElementsAre(200, 201, 201));
  EXPECT_THAT(seen[2].weights, ElementsAre(1, 1, 0));
}

TEST(JoinedBatchesTest, RepeatNoneWhereRanksHaveAsMany) {
  for (const int ranks : {1, 2, 3}) {
    for (const Seen& seen : seen_by_ranks(std::vector<int>(static_cast<size_t>(ranks), 2))) {
      EXPECT_THAT(seen.batches, ElementsAre(seen.batches[0], seen.batches[0] + 1));
      EXPECT_THAT(seen.weights, ElementsAre(1, 1));
    }
  }
}

TEST(JoinedBatchesTest, EndAtOnceWhereNoRankHasAny) {
  for (const int ranks : {1, 3}) {
    for (const Seen& seen : seen_by_ranks(std::vector<int>(static_cast<size_t>(ranks), 0))) {
      EXPECT_TRUE(seen.batches.empty());
    }
  }
}

TEST(JoinedBatchesTest, AreRefusedOnAllRanksWhereOneHasNone) {
  for (const int without : {0, 1, 2}) {
    run_ranks(3, [&](comm::World& world) {
      auto batches = batches_of(world.rank(), world.rank() == without ? 0 : 2);
      int seen = 0;
      EXPECT_THAT(error_of([&] {
                    for (const auto& joint : joined(batches, world)) {
                      seen += static_cast<int>(joint.weight);
                    }
                  }),
                  HasSubstr("a rank has no batch at all, and nothing to repeat while the others "
                            "train; give every rank at least one batch"));
      EXPECT_EQ(seen, 0);
      // The ranks are in step, so training may go on with other batches.
      auto one = batches_of(world.rank(), 1);
      for (const auto& joint : joined(one, world)) seen += static_cast<int>(joint.weight);
      EXPECT_EQ(seen, 1);
    });
  }
}

TEST(JoinedBatchesTest, AreCopiedSoThatARepeatedOneIsWhatItWas) {
  run_ranks(2, [](comm::World& world) {
    // An input range whose element is overwritten by the next.
    struct Source {
      struct Iterator {
        std::vector<int>* current;
        int left;
        std::vector<int>& operator*() const { return *current; }
        Iterator& operator++() {
          current->assign(3, --left);
          return *this;
        }
        bool operator!=(const Iterator& other) const { return left != other.left; }
      };
      std::vector<int> current;
      int count = 0;
      Iterator begin() {
        current.assign(3, count);
        return {&current, count};
      }
      Iterator end() { return {&current, 0}; }
    };
    Source source{.count = 1 + world.rank()};
    std::vector<int> firsts;
    for (const auto& joint : joined(source, world)) firsts.push_back(joint.batch.front());
    EXPECT_THAT(firsts, world.rank() == 0 ? ElementsAre(1, 1) : ElementsAre(2, 1));
  });
}

TEST(JoinedBatchesTest, ComeFromADataLoaderAgainInEachEpoch) {
  run_ranks(2, [](comm::World& world) {
    const int64_t samples = world.rank() == 0 ? 2 : 5;
    auto dataset = torch::data::datasets::TensorDataset(torch::arange(samples))
                       .map(torch::data::transforms::Stack<torch::data::TensorExample>());
    auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
        std::move(dataset), /*batch_size=*/2);
    for (int epoch = 0; epoch < 2; ++epoch) {
      std::vector<int64_t> sizes;
      std::vector<double> weights;
      for (const auto& [batch, weight] : joined(*loader, world)) {
        sizes.push_back(batch.data.numel());
        weights.push_back(weight);
      }
      EXPECT_THAT(sizes, world.rank() == 0 ? ElementsAre(2, 2, 2) : ElementsAre(2, 2, 1));
      EXPECT_THAT(weights, world.rank() == 0 ? ElementsAre(1, 0, 0) : ElementsAre(1, 1, 1));
    }
  });
}

Oddball make_oddball() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(7);
  return Oddball();
}

constexpr int kBatches[] = {1, 3, 2};  // by rank

// One process, which takes the mean over the batches that exist.
std::vector<torch::Tensor> train_on_what_exists() {
  Oddball net = make_oddball();
  AdamW optimizer(distinct_parameters(net), AdamWOptions(0.01));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    std::vector<torch::Tensor> losses;
    for (int rank = 0; rank < 3; ++rank) {
      if (step >= kBatches[rank]) continue;
      const Samples samples = samples_of(rank, step);
      losses.push_back(loss_of(net->forward(samples.inputs), samples));
    }
    torch::stack(losses).mean().backward();
    optimizer.step();
  }
  return net->parameters();
}

class JoinedTrainingTest : public ::testing::TestWithParam<int> {};

TEST_P(JoinedTrainingTest, EqualsTheMeanOverTheBatchesThatExist) {
  at::set_num_threads(1);
  const auto expected = train_on_what_exists();
  run_ranks(3, [&](comm::World& world) {
    Options options;
    options.stage = stage_of(GetParam());
    DistributedDataParallel<Oddball> model(make_oddball(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
    Accumulator accumulator(model);
    std::vector<Samples> batches;
    for (int step = 0; step < kBatches[world.rank()]; ++step) {
      batches.push_back(samples_of(world.rank(), step));
    }
    std::vector<double> weights;
    for (const auto& [batch, weight] : joined(batches, world)) {
      accumulator.backward(loss_of(model(batch.inputs), batch), weight);
      weights.push_back(accumulator.step(optimizer).weight);
    }
    EXPECT_THAT(weights, ElementsAre(3, 2, 1));
    const auto actual = full_state(model, world.rank());
    const auto names = make_oddball()->named_parameters().keys();
    for (size_t index = 0; index < names.size(); ++index) {
      EXPECT_TRUE(torch::allclose(expected[index], actual[names[index]], 0, 1e-6)) << names[index];
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, JoinedTrainingTest, ::testing::Values(0, 1, 2, 3));

}  // namespace
}  // namespace zeropage::joined_batches_test
