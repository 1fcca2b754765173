#include <optional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "zeropage/batches.h"

// A user's type, in a namespace that knows nothing of ours.
namespace text {

struct Tokens {
  at::Tensor ids;
  std::optional<std::string> source;
  std::vector<at::Tensor> masks;
};

Tokens map_parts(const Tokens& batch, const auto& map) {
  return {map(batch.ids, "ids"), batch.source, map(batch.masks, "masks")};
}

}  // namespace text

namespace zeropage::accumulate::micro_batches_test {
namespace {

using ::testing::ElementsAre;
using zeropage::testing::error_of;

// [samples, 2], with the sample's number in every element.
at::Tensor numbered(int64_t samples) {
  return torch::arange(samples).unsqueeze(1).repeat({1, 2});
}

std::vector<int64_t> numbers_of(const at::Tensor& tensor) {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < tensor.size(0); ++i) numbers.push_back(tensor[i][0].item<int64_t>());
  return numbers;
}

TEST(MicroBatchesTest, DifferByAtMostOneSampleTheLongerFirst) {
  std::vector<std::vector<int64_t>> seen;
  for (const auto& micro : micro_batches(numbered(8), 3)) seen.push_back(numbers_of(micro));
  EXPECT_THAT(seen, ElementsAre(ElementsAre(0, 1, 2), ElementsAre(3, 4, 5), ElementsAre(6, 7)));
}

TEST(MicroBatchesTest, CoverEverySampleOnceWhateverTheCounts) {
  for (int64_t samples = 1; samples <= 12; ++samples) {
    const at::Tensor batch = numbered(samples);
    for (int64_t count = 1; count <= samples; ++count) {
      const auto range = micro_batches(batch, count);
      std::vector<at::Tensor> micros;
      for (const auto& micro : range) {
        EXPECT_EQ(micro.size(0), range.samples_in(static_cast<int64_t>(micros.size())));
        EXPECT_GE(micro.size(0), samples / count);
        EXPECT_LE(micro.size(0), (samples + count - 1) / count);
        micros.push_back(micro);
      }
      EXPECT_EQ(static_cast<int64_t>(micros.size()), count);
      EXPECT_TRUE(at::equal(at::cat(micros), batch)) << samples << " into " << count;
    }
  }
}

TEST(MicroBatchesTest, KnowTheirSizes) {
  const auto range = micro_batches(numbered(8), 3);
  EXPECT_EQ(range.size(), 3);
  EXPECT_EQ(range.samples(), 8);
  EXPECT_EQ(range.samples_in(0), 3);
  EXPECT_EQ(range.samples_in(2), 2);
  EXPECT_THAT(numbers_of(range[2]), ElementsAre(6, 7));
}

TEST(MicroBatchesTest, AreViewsOfTheBatch) {
  const at::Tensor batch = numbered(6);
  const auto range = micro_batches(batch, 3);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(range[i].is_alias_of(batch));
    EXPECT_EQ(range[i].data_ptr(), batch[2 * i].data_ptr());
  }
}

TEST(MicroBatchesTest, AreMadeWhenTheyAreReached) {
  at::Tensor batch = numbered(4);
  const auto range = micro_batches(batch, 2);
  EXPECT_EQ(batch.use_count(), 2);
  auto first = *range.begin();
  EXPECT_EQ(first.use_count(), 1);
  EXPECT_EQ(batch.use_count(), 3);
}

TEST(MicroBatchesTest, KeepTheTensorsAlive) {
  auto range = micro_batches(numbered(4), 2);
  at::Tensor last = range[1];
  range = micro_batches(numbered(2), 1);
  EXPECT_THAT(numbers_of(last), ElementsAre(2, 3));
}

TEST(MicroBatchesTest, PassGradientsToTheBatch) {
  const at::Tensor batch = torch::ones({5, 2}).requires_grad_();
  float factor = 0;
  for (const auto& micro : micro_batches(batch, 2)) (micro * ++factor).sum().backward();
  EXPECT_TRUE(at::equal(batch.grad().select(1, 0), torch::tensor({1.F, 1.F, 1.F, 2.F, 2.F})));
}

TEST(MicroBatchesTest, OfAnExampleAreExamples) {
  const torch::data::Example<> batch(numbered(4), torch::arange(4));
  int64_t next = 0;
  for (auto micro : micro_batches(batch, 2)) {
    static_assert(std::is_same_v<decltype(micro), torch::data::Example<>>);
    EXPECT_THAT(numbers_of(micro.data), ElementsAre(next, next + 1));
    EXPECT_TRUE(at::equal(micro.target, torch::arange(next, next + 2)));
    next += 2;
  }
  const auto without_target = micro_batches(torch::data::TensorExample(numbered(4)), 2);
  EXPECT_THAT(numbers_of(without_target[1].data), ElementsAre(2, 3));
}

TEST(MicroBatchesTest, OfNestedContainersHaveTheirShape) {
  using Nested =
      std::tuple<std::pair<at::Tensor, at::Tensor>, std::vector<at::Tensor>,
                 std::array<at::Tensor, 2>, torch::data::Example<std::vector<at::Tensor>>>;
  const at::Tensor one = numbered(3);
  const Nested batch = {{one, one}, {one, one, one}, {one, one}, {{one, one}, one}};
  const Nested micro = micro_batches(batch, 3)[1];
  const auto& [pair, vector, array, example] = micro;
  EXPECT_EQ(vector.size(), 3);
  for (const auto& tensor : {pair.first, pair.second, vector[0], vector[2], array[0], array[1],
                             example.data[1], example.target}) {
    EXPECT_THAT(numbers_of(tensor), ElementsAre(1));
  }
}

TEST(MicroBatchesTest, OfAUsersTypeAreMadeByItsOwnFunction) {
  const text::Tokens batch = {numbered(4), "a book", {numbered(4), numbered(4)}};
  for (const auto& micro : micro_batches(std::make_pair(batch, numbered(4)), 4)) {
    EXPECT_EQ(micro.first.source, "a book");
    EXPECT_EQ(micro.first.masks.size(), 2);
    EXPECT_EQ(numbers_of(micro.first.masks[1]), numbers_of(micro.second));
  }
}

TEST(MicroBatchesTest, LeaveUndefinedTensorsUndefined) {
  const auto range = micro_batches(std::make_pair(numbered(4), at::Tensor()), 2);
  EXPECT_FALSE(range[0].second.defined());
  EXPECT_THAT(numbers_of(range[0].first), ElementsAre(0, 1));
}

TEST(MicroBatchesTest, AreAForwardRange) {
  using Range = MicroBatches<at::Tensor>;
  static_assert(std::forward_iterator<Range::iterator>);
  static_assert(std::is_same_v<std::iterator_traits<Range::iterator>::iterator_category,
                               std::input_iterator_tag>);
  const auto range = micro_batches(numbered(5), 5);
  EXPECT_EQ(std::distance(range.begin(), range.end()), 5);
  auto at = range.begin();
  EXPECT_THAT(numbers_of(*at++), ElementsAre(0));
  EXPECT_THAT(numbers_of(*at), ElementsAre(1));
  EXPECT_NE(at, range.begin());
}

TEST(MicroBatchesTest, RefuseCountsThatCannotBe) {
  EXPECT_EQ(error_of([] { micro_batches(numbered(6), 0); }),
            "micro_batches: expected 1 micro-batch or more, got 0; 1 is the whole batch");
  EXPECT_EQ(error_of([] { micro_batches(numbered(6), -2); }),
            "micro_batches: expected 1 micro-batch or more, got -2; 1 is the whole batch");
  EXPECT_EQ(error_of([] { micro_batches(numbered(6), 7); }),
            "micro_batches: cannot cut 6 samples into 7 micro-batches; ask for at most one a "
            "sample, or load larger batches");
  EXPECT_EQ(error_of([] { micro_batches(numbered(6), 3)[3]; }),
            "micro_batches: expected an index from 0 to 2, got 3");
  EXPECT_EQ(error_of([] { micro_batches(numbered(6), 3)[-1]; }),
            "micro_batches: expected an index from 0 to 2, got -1");
}

TEST(MicroBatchesTest, NameTheTensorThatDoesNotAgree) {
  const std::string rule =
      "; dimension 0 counts samples and must be the same in all tensors of a batch";
  EXPECT_EQ(error_of([] { micro_batches(torch::data::Example<>(numbered(6), numbered(5)), 2); }),
            "micro_batches: batch.target has 5 samples, but batch.data has 6" + rule);
  const text::Tokens tokens = {numbered(4), {}, {numbered(4), numbered(3)}};
  EXPECT_EQ(error_of([&] { micro_batches(std::make_tuple(numbered(4), tokens), 2); }),
            "micro_batches: batch[1].masks[1] has 3 samples, but batch[0] has 4" + rule);
}

TEST(MicroBatchesTest, RefuseTensorsThatCountNoSamples) {
  EXPECT_EQ(error_of([] { micro_batches(std::make_pair(numbered(1), torch::tensor(7)), 1); }),
            "micro_batches: batch[1] has no dimensions; expected dimension 0 to count samples: "
            "stack the samples (torch::data::transforms::Stack), or unsqueeze(0) it");
  const std::string none =
      "micro_batches: the batch holds no defined tensor, so there are no samples to cut";
  EXPECT_EQ(error_of([] { micro_batches(std::vector<at::Tensor>(), 1); }), none);
  EXPECT_EQ(error_of([] { micro_batches(at::Tensor(), 1); }), none);
}

}  // namespace
}  // namespace zeropage::accumulate::micro_batches_test
