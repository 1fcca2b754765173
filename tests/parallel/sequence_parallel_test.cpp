// The sequence cut over the ranks that share slices of layers: what passes between them, what a rank keeps, and what
// is refused. That it trains as the whole module does is in tensor_parallel_test.cpp and norm_over_slices_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/parallel/tensor_modules.h"
#include "zeropage/parallel_layers.h"
#include "zeropage/zeropage.h"

namespace zeropage::sequence_parallel_test {
namespace {

using namespace zeropage::tensor_modules;
using namespace zeropage::testing;
using parallel::Slices;
using ::testing::HasSubstr;

// ---- the functions ----

TEST(SequenceFunctionsTest, OfGatherAndScatterAreEachOthersGradientAlsoOfUnevenSlices) {
  run_ranks(3, [](World& world) {
    const auto ranks = parallel::ranks_of(world);
    const Slices slices(7, 1, 3, "a test");
    const int rank = world.rank();
    const torch::Tensor numbers = torch::arange(42.0).view({2, 7, 3});
    for (const int64_t dim : {1, -2}) {
      const auto own = [&](const torch::Tensor& whole) {
        return whole.narrow(1, slices.begin(rank), slices.size(rank));
      };
      const torch::Tensor slice = own(numbers).clone().requires_grad_();
      const torch::Tensor whole = parallel::gather_to_ranks(slice, slices, ranks, "a test", dim);
      EXPECT_TRUE(torch::equal(whole, numbers));
      (whole * (numbers + rank)).sum().backward();
      EXPECT_TRUE(torch::equal(slice.grad(), own(3 * numbers + (0 + 1 + 2))));

      const torch::Tensor part = (numbers * (rank + 1)).requires_grad_();
      const torch::Tensor sum = parallel::scatter_from_ranks(part, slices, ranks, "a test", dim);
      EXPECT_TRUE(torch::equal(sum, own(numbers * (1 + 2 + 3))));
      EXPECT_EQ(sum.storage().nbytes(), sum.nbytes()) << "the other ranks' slices are gone";
      (sum * own(numbers)).sum().backward();
      EXPECT_TRUE(torch::equal(part.grad(), numbers));
    }
  });
}

TEST(SequenceFunctionsTest, SplitASequenceAndBringItBack) {
  run_ranks(2, [](World& world) {
    const torch::Tensor x = torch::arange(24.0).view({2, 6, 2}).requires_grad_();
    const torch::Tensor slice = parallel::split_sequence(x, 1, world);
    EXPECT_TRUE(torch::equal(slice, x.narrow(1, 3 * world.rank(), 3)));
    const torch::Tensor back = parallel::gather_sequence(slice, 1, world);
    EXPECT_TRUE(torch::equal(back, x));
    (back * x.detach()).sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), x.detach()));
  });
}

// ---- what a rank sends and keeps ----

struct Sent {
  int64_t gathered = 0, scattered = 0, reduced = 0;
  friend bool operator==(const Sent&, const Sent&) = default;
};

Sent operator-(const comm::WireTraffic& now, const comm::WireTraffic& before) {
  return {now.all_gather.bytes - before.all_gather.bytes,
          now.reduce_scatter.bytes - before.reduce_scatter.bytes,
          now.all_reduce.bytes - before.all_reduce.bytes};
}

// In forward and in backward.
std::pair<Sent, Sent> sent_by_blocks(bool in_a_region) {
  std::pair<Sent, Sent> sent;
  run_ranks(2, [&](World& world) {
    Sequence module(world);
    module->to(torch::kDouble);
    const auto now = [&] { return world.communicator().wire_traffic(); };
    const auto before = now();
    CheckpointOptions whole_repetition;
    whole_repetition.early_stop = false;
    const torch::Tensor hidden =
        in_a_region ? checkpoint(
                          whole_repetition, [&](const torch::Tensor& ids) { return module(ids); },
                          ids_of(1))
                    : module(ids_of(1));
    const auto after = now();
    hidden.square().sum().backward();
    if (world.rank() == 0) sent = {after - before, now() - after};
  });
  return sent;
}

TEST(SequenceTrafficTest, IsAGatherBeforeEachColumnAndAScatterAfterEachRow) {
  constexpr int64_t kHalf = 3 * kLength * kWidth * 8 / 2;  // of an activation, to the other rank
  constexpr int64_t kNorm = 2 * kWidth * 8;
  // Forward: two columns gather; two rows and the embedding scatter.
  const Sent forward{2 * kHalf, 3 * kHalf, 0};
  // Backward: the counterparts of these, and two columns gather their inputs again for their weights.
  const Sent backward{(3 + 2) * kHalf, 2 * kHalf, 2 * kNorm};
  EXPECT_EQ(sent_by_blocks(false), std::make_pair(forward, backward));
  const Sent twice{backward.gathered + forward.gathered, backward.scattered + forward.scattered,
                   backward.reduced};
  EXPECT_EQ(sent_by_blocks(true), std::make_pair(forward, twice));
}

template <typename Sliced>
int64_t bytes_kept_for_backward(const World& world) {
  Sliced module(world);
  module->to(torch::kDouble);
  const torch::Tensor ids = ids_of(1);
  const memory::Ledger& ledger = *memory::Ledger::current();
  const int64_t before = ledger.now().activations();
  const torch::Tensor hidden = module(ids);
  return ledger.now().activations() - before;
}

TEST(SequenceMemoryTest, IsTheRanksShareOfWhatLiesBetweenTheLayers) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      const int64_t whole = bytes_kept_for_backward<Explicit>(world);
      const int64_t cut = bytes_kept_for_backward<Sequence>(world);
      // The norms' inputs and outputs, and the blocks' output; and of each norm two numbers a token.
      constexpr int64_t kTokens = 3 * kLength;
      constexpr int64_t kBetween = (5 * kTokens * kWidth + 2 * 2 * kTokens) * 8;
      EXPECT_EQ(whole - cut, kBetween - kBetween / ranks);
    });
  }
}

// ---- norms without parameters, and what is refused ----

TEST(SequenceParallelLayerNormTest, WithoutParametersSendsNothing) {
  run_ranks(2, [](World& world) {
    const torch::nn::LayerNormOptions options =
        torch::nn::LayerNormOptions({4}).elementwise_affine(false);
    parallel::SequenceParallelLayerNorm norm(options, world);
    EXPECT_TRUE(norm->parameters().empty());
    const torch::Tensor x = torch::arange(8.0).view({1, 2, 4});
    EXPECT_TRUE(torch::equal(norm(x), torch::nn::LayerNorm(options)(x)));
    EXPECT_EQ(c10::str(norm), "zeropage::SequenceParallelLayerNorm([4])");
  });
}

TEST(SequenceRefusalTest, OfLengthsAndDimensionsThatCannotBeCut) {
  run_ranks(2, [](World& world) {
    const torch::Tensor odd = torch::ones({2, 5, 4});
    EXPECT_THAT(error_of([&] { parallel::split_sequence(odd, 1, world); }),
                HasSubstr("split_sequence: expected a sequence whose length 2 ranks divide, got 5 "
                          "in dimension 1 of sizes [2, 5, 4]; pad it"));
    for (const int64_t dim : {-1, 2, 3}) {
      EXPECT_THAT(error_of([&] { parallel::split_sequence(odd, dim, world); }),
                  HasSubstr(c10::str("expected a tensor with the sequence in dimension ", dim)));
    }
    parallel::LinearOptions options(4, 6);
    options.sequence_dim = 1;
    parallel::RowParallelLinear row(options, world);
    EXPECT_THAT(error_of([&] {
                  row(torch::ones({2, 5, 2}));
                }),
                HasSubstr("RowParallelLinear(4, 6): expected a sequence whose length"));
    parallel::ColumnParallelLinear column(options, world);
    EXPECT_THAT(error_of([&] {
                  column(torch::ones({2, 4}));
                }),
                HasSubstr("ColumnParallelLinear(4, 6): expected a tensor with the sequence"));
    const auto whole = parallel::ranks_of(world);
    const Slices slices(4, 1, 2, "a test");
    EXPECT_THAT(error_of([&] { parallel::scatter_from_ranks(odd, slices, whole, "a test", 1); }),
                HasSubstr("a test: expected 4 elements in dimension 1, got sizes [2, 5, 4]"));
    EXPECT_THAT(error_of([&] { parallel::gather_to_ranks(odd, slices, whole, "a test", 1); }),
                HasSubstr("a test: expected a slice of 2 elements in dimension 1, got sizes"));
  });
}

// ---- random numbers ----

struct Drawn {
  torch::Tensor before, own, after;
};

// Ranks are threads and have one generator, so they take turns.
std::vector<Drawn> drawn_by(int ranks, const std::function<Drawn(const World&)>& draw) {
  std::vector<Drawn> drawn(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    for (int turn = 0; turn < ranks; ++turn) {
      if (turn == world.rank()) {
        torch::manual_seed(7);
        drawn[static_cast<size_t>(turn)] = draw(world);
      }
      world.communicator().barrier("a turn").wait();
    }
  });
  return drawn;
}

torch::Tensor mask() {
  return torch::dropout(torch::ones({64}), 0.5, /*train=*/true);
}

TEST(RandomOfRankTest, DiffersBetweenRanksWithinItsScopeAlone) {
  const auto drawn = drawn_by(3, [](const World& world) {
    Drawn own;
    own.before = mask();
    {
      const parallel::RandomOfRank scope(world);
      own.own = mask();
    }
    own.after = mask();
    return own;
  });
  for (size_t rank = 1; rank < drawn.size(); ++rank) {
    EXPECT_TRUE(torch::equal(drawn[rank].before, drawn[0].before));
    EXPECT_TRUE(torch::equal(drawn[rank].after, drawn[0].after));
    EXPECT_FALSE(torch::equal(drawn[rank].own, drawn[rank - 1].own));
  }
  EXPECT_FALSE(torch::equal(drawn[0].own, drawn[0].before));
  EXPECT_FALSE(torch::equal(drawn[0].after, drawn[0].before));
}

TEST(RandomOfRankTest, DiffersFromScopeToScopeAndRepeatsInARegion) {
  const auto drawn = drawn_by(2, [](const World& world) {
    Drawn own;
    const auto in_scope = [&](const torch::Tensor& x) {
      const parallel::RandomOfRank scope(world);
      return torch::dropout(x, 0.5, /*train=*/true);
    };
    own.before = in_scope(torch::ones({64}));
    const torch::Tensor x = torch::ones({64}).requires_grad_();
    own.own = checkpoint(in_scope, x);
    own.own.sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), own.own.detach())) << "the mask of forward";
    own.after = mask();
    return own;
  });
  EXPECT_FALSE(torch::equal(drawn[0].before, drawn[0].own));
  EXPECT_TRUE(torch::equal(drawn[0].after, drawn[1].after));
}

}  // namespace
}  // namespace zeropage::sequence_parallel_test
