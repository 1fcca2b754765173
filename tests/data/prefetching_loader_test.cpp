#include "zeropage/data/prefetching_loader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "zeropage/data/random.h"
#include "zeropage/ledger.h"
#include "zeropage/saving.h"

namespace zeropage::prefetching_loader_test {
namespace {

using namespace zeropage::testing;
using data::DistributedSampler;
using data::LastBatch;
using data::Order;
using data::PrefetchingLoader;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What all ranks take of the rest of the epoch, batch by batch: [batch][rank].
std::vector<std::vector<std::vector<int64_t>>> drawn(std::vector<DistributedSampler>& ranks) {
  std::vector<std::vector<std::vector<int64_t>>> batches;
  while (true) {
    std::vector<std::vector<int64_t>> of_ranks;
    for (DistributedSampler& sampler : ranks) {
      if (auto samples = sampler.next()) of_ranks.push_back(*samples);
    }
    if (of_ranks.empty()) return batches;
    EXPECT_EQ(of_ranks.size(), ranks.size()) << "all ranks have as many batches";
    batches.push_back(of_ranks);
  }
}

std::vector<DistributedSampler> samplers(int64_t samples, int ranks, int64_t batch,
                                         LastBatch last = LastBatch::kShared,
                                         Order order = Order::kShuffled) {
  std::vector<DistributedSampler> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.emplace_back(
        samples,
        data::SamplerOptions{
            .rank = rank, .ranks = ranks, .batch = batch, .order = order, .last = last, .seed = 3});
  }
  return all;
}

std::vector<int64_t> flat(const std::vector<std::vector<std::vector<int64_t>>>& batches) {
  std::vector<int64_t> samples;
  for (const auto& of_ranks : batches) {
    for (const auto& of_rank : of_ranks)
      samples.insert(samples.end(), of_rank.begin(), of_rank.end());
  }
  return samples;
}

std::vector<int64_t> in_order(std::vector<int64_t> samples) {
  std::sort(samples.begin(), samples.end());
  return samples;
}

std::vector<int64_t> all_of(int64_t samples) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < samples; ++i) all.push_back(i);
  return all;
}

TEST(DistributedSamplerTest, EverySampleComesOnceAtAnyNumberOfRanksAndBatch) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (const int64_t batch : {1, 3, 50}) {
      auto all = samplers(101, ranks, batch);
      const auto batches = drawn(all);
      EXPECT_EQ(in_order(flat(batches)), all_of(101)) << ranks << " ranks, batches of " << batch;
      EXPECT_EQ(static_cast<int64_t>(batches.size()), all[0].batches());
      for (size_t i = 0; i + 1 < batches.size(); ++i) {
        for (const auto& of_rank : batches[i])
          EXPECT_EQ(static_cast<int64_t>(of_rank.size()), batch);
      }
      const auto [least, most] =
          std::minmax_element(batches.back().begin(), batches.back().end(),
                              [](const auto& a, const auto& b) { return a.size() < b.size(); });
      EXPECT_LE(most->size() - least->size(), 1U);
    }
  }
}

TEST(DistributedSamplerTest, TheOrderIsOfSeedAndEpochAndTheSameForEqualGlobalBatches) {
  auto two = samplers(96, 2, 6), four = samplers(96, 4, 3);
  const auto first_epoch = flat(drawn(two));
  EXPECT_EQ(first_epoch, flat(drawn(four)));
  for (auto& sampler : two) sampler.set_epoch(1);
  const auto second_epoch = flat(drawn(two));
  EXPECT_NE(first_epoch, second_epoch);
  for (auto& sampler : two) sampler.set_epoch(0);
  EXPECT_EQ(flat(drawn(two)), first_epoch);
  for (auto& sampler : two) sampler.restart();
  EXPECT_EQ(flat(drawn(two)), first_epoch);
  auto as_they_are = samplers(10, 2, 3, LastBatch::kShared, Order::kAsTheyAre);
  EXPECT_EQ(flat(drawn(as_they_are)), all_of(10));
}

TEST(DistributedSamplerTest, DropsWhatFillsNoBatchOnAllRanksWhereAsked) {
  auto all = samplers(101, 3, 8, LastBatch::kDropped);
  const auto samples = in_order(flat(drawn(all)));
  EXPECT_EQ(samples.size(), 96U);
  EXPECT_EQ(std::set<int64_t>(samples.begin(), samples.end()).size(), 96U);
  EXPECT_EQ(all[0].batches(), 4);
  EXPECT_THAT(error_of([] { samplers(5, 2, 3, LastBatch::kDropped); }),
              HasSubstr("5 samples do not fill a batch of 3 on 2 ranks"));
}

TEST(DistributedSamplerTest, GoesOnInMidEpochAtAnotherNumberOfRanksWithEverySampleOnce) {
  for (const auto& [before, after] : {std::pair(2, 4), std::pair(4, 2), std::pair(3, 1)}) {
    auto first = samplers(1000, before, 16);
    for (auto& sampler : first) sampler.set_epoch(2);
    std::vector<std::vector<std::vector<int64_t>>> had(5);
    for (auto& batch : had) {
      for (auto& sampler : first) batch.push_back(*sampler.next());
    }
    const std::string saved = RunExtra::of(first[0]).save();
    EXPECT_EQ(saved, RunExtra::of(first.back()).save()) << "alike on all ranks";

    auto second = samplers(1000, after, 10);
    for (auto& sampler : second) {
      RunExtra::of(sampler).load(saved);
      sampler.set_epoch(sampler.epoch());  // as the loop does
    }
    EXPECT_EQ(second[0].epoch(), 2);
    EXPECT_EQ(second[0].position(), 5 * 16 * before);
    auto all = flat(had);
    const auto rest = flat(drawn(second));
    all.insert(all.end(), rest.begin(), rest.end());
    EXPECT_EQ(in_order(all), all_of(1000));
    auto uninterrupted = samplers(1000, 1, 1);
    uninterrupted[0].set_epoch(2);
    EXPECT_EQ(all, flat(drawn(uninterrupted))) << "and in the order of the epoch";
  }
}

TEST(DistributedSamplerTest, RefusesWhatWouldTrainOnNothingOrOnOtherSamples) {
  auto all = samplers(10, 1, 5);
  drawn(all);
  EXPECT_THAT(error_of([&] { all[0].next(); }), HasSubstr("epoch 0 has ended; call set_epoch(1)"));
  const std::string saved = RunExtra::of(all[0]).save();
  DistributedSampler longer(11, {.seed = 3}), other(10, {.seed = 4});
  EXPECT_THAT(error_of([&] { RunExtra::of(longer).load(saved); }),
              HasSubstr("the state is of 10 samples, this data set has 11"));
  EXPECT_THAT(error_of([&] { RunExtra::of(other).load(saved); }),
              HasSubstr("the state has seed 3 and shuffles, this sampler has seed 4"));
  EXPECT_THAT(error_of([] { DistributedSampler(10, {.rank = 2, .ranks = 2}); }),
              HasSubstr("there is no rank 2 of 2"));
  EXPECT_THAT(error_of([] { DistributedSampler(0, {}); }), HasSubstr("at least one sample, got 0"));
  EXPECT_THAT(error_of([] { DistributedSampler(1, {.batch = 0}); }),
              HasSubstr("batch of at least 1"));
}

// A batch whose values tell its samples and epoch, and that is done sooner the later it comes.
PrefetchingLoader::Batch told(const std::vector<int64_t>& samples, int64_t epoch) {
  const auto late = samples.empty() ? 0 : data::SampleRandom(1, epoch, samples[0]).below(3);
  std::this_thread::sleep_for(std::chrono::milliseconds(late));
  const auto target = torch::tensor(samples, torch::kLong);
  return {target.to(torch::kFloat) + 1000.0 * static_cast<double>(epoch), target};
}

std::vector<int64_t> rest_of(PrefetchingLoader& loader) {
  std::vector<int64_t> samples;
  while (auto batch = loader.next()) {
    EXPECT_TRUE(batch->data.equal(batch->target.to(torch::kFloat) +
                                  1000.0 * static_cast<double>(loader.epoch())));
    for (int64_t i = 0; i < batch->target.numel(); ++i)
      samples.push_back(batch->target[i].item<int64_t>());
  }
  return samples;
}

TEST(PrefetchingLoaderTest, TheOrderIsTheSamplersWithAnyNumberOfThreads) {
  auto expected = samplers(103, 1, 4);
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    expected[0].set_epoch(epoch);
    const auto order = flat(drawn(expected));
    for (const int threads : {0, 1, 3}) {
      PrefetchingLoader loader(samplers(103, 1, 4)[0], told, {.threads = threads, .ahead = 5});
      loader.set_epoch(epoch);
      EXPECT_EQ(rest_of(loader), order) << threads << " threads";
    }
  }
}

TEST(PrefetchingLoaderTest, ASavedOneGoesOnAfterTheLastBatchThatWasGivenOut) {
  auto expected = samplers(100, 1, 4);
  const auto order = flat(drawn(expected));
  for (const int threads : {0, 3}) {
    PrefetchingLoader loader(samplers(100, 1, 4)[0], told, {.threads = threads, .ahead = 8});
    std::vector<int64_t> samples;
    for (int i = 0; i < 7; ++i) {
      const auto batch = loader.next();
      for (int64_t k = 0; k < 4; ++k) samples.push_back(batch->target[k].item<int64_t>());
    }
    EXPECT_EQ(loader.position(), 28);
    const std::string saved = RunExtra::of(loader).save();
    PrefetchingLoader resumed(samplers(100, 1, 4)[0], told, {.threads = threads, .ahead = 8});
    resumed.next();
    RunExtra::of(resumed).load(saved);
    const auto rest = rest_of(resumed);
    samples.insert(samples.end(), rest.begin(), rest.end());
    EXPECT_EQ(samples, order);
    resumed.restart();
    EXPECT_EQ(rest_of(resumed), order);
  }
}

TEST(PrefetchingLoaderTest, MakesNoMoreThanAheadAndChargesTheMakersLedger) {
  const auto ledger = std::make_shared<memory::Ledger>("the rank");
  const memory::LedgerScope scope(ledger);
  std::atomic<int> made = 0;
  std::atomic<int> elsewhere = 0;
  PrefetchingLoader loader(
      samplers(100, 1, 1)[0],
      [&](const std::vector<int64_t>&, int64_t) {
        ++made;
        elsewhere += memory::Ledger::current() == ledger ? 0 : 1;
        return PrefetchingLoader::Batch{torch::zeros({256}), torch::zeros({1})};
      },
      {.threads = 2, .ahead = 3});
  for (int given = 1; given <= 5; ++given) {
    const auto batch = loader.next();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_LE(made, given + 3);
    EXPECT_GT(ledger->now().total(), 0);
  }
  EXPECT_EQ(elsewhere, 0);
}

TEST(PrefetchingLoaderTest, AnErrorComesInItsBatchsPlaceAndStays) {
  for (const int threads : {0, 3}) {
    PrefetchingLoader loader(samplers(12, 1, 1, LastBatch::kShared, Order::kAsTheyAre)[0],
                             [](const std::vector<int64_t>& samples, int64_t epoch) {
                               if (samples[0] == 5) throw std::runtime_error("sample 5 is broken");
                               return told(samples, epoch);
                             },
                             {.threads = threads});
    for (int i = 0; i < 5; ++i) EXPECT_EQ(loader.next()->target.item<int64_t>(), i);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(error_of([&] { loader.next(); }), "sample 5 is broken");
    }
    EXPECT_EQ(loader.position(), 5);
    loader.restart();
    EXPECT_EQ(loader.next()->target.item<int64_t>(), 0);
  }
  EXPECT_THAT(error_of([] { PrefetchingLoader(samplers(1, 1, 1)[0], told, {.ahead = 0}); }),
              HasSubstr("at least 1 batch ahead, got 0"));
}

TEST(SampleRandomTest, IsOfSeedEpochAndSampleAlone) {
  data::SampleRandom one(1, 2, 3), same(1, 2, 3);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(one.next(), same.next());
  std::set<uint64_t> first;
  for (const auto& [seed, epoch, sample] :
       {std::tuple(1, 2, 3), std::tuple(2, 2, 3), std::tuple(1, 3, 3), std::tuple(1, 2, 4),
        std::tuple(1, 3, 2), std::tuple(2, 1, 3)}) {
    first.insert(data::SampleRandom(static_cast<uint64_t>(seed), epoch, sample).next());
  }
  EXPECT_EQ(first.size(), 6U);
  double sum = 0;
  for (int64_t sample = 0; sample < 10000; ++sample)
    sum += data::SampleRandom(1, 0, sample).uniform();
  EXPECT_NEAR(sum / 10000, 0.5, 0.02);
  // The numbers published for a state of 0 (Steele et al. 2014), so that other languages draw the same.
  EXPECT_EQ(data::splitmix64(0), 0xE220A8397B1DCDAFULL);
}

}  // namespace
}  // namespace zeropage::prefetching_loader_test
