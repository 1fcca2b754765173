// Matrices travel to their owners and back beside the work on others.
#include "zero/update/matrix_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/delays.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "zero/update/matrix_owners.h"
#include "zeropage/adafactor.h"
#include "zeropage/lamb.h"
#include "zeropage/ledger.h"
#include "zeropage/muon.h"
#include "zeropage/tensor_update.h"
#include "zeropage/zeropage.h"

namespace zeropage::matrix_exchange_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using memory::operator""_KiB;

constexpr int64_t kWidth = 128;
constexpr int kLayers = 24;
constexpr int64_t kMatrixBytes = 64_KiB;

struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    for (int layer = 0; layer < kLayers; ++layer) {
      layers.push_back(
          register_module(std::to_string(layer),
                          torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false))));
      const torch::NoGradGuard no_grad;
      layers.back()->weight.copy_(torch::randn({kWidth, kWidth}, at::detail::createCPUGenerator(
                                                                     static_cast<uint64_t>(layer)))
                                      .mul_(0.2));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = x + torch::tanh(layer(x));
    return x.square().mean();
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Deep);

Options options_of(int stage) {
  Options options;
  options.stage = stage_of(stage);
  options.page_bytes = kMatrixBytes;  // a matrix each
  return options;
}

torch::Tensor inputs_of(int step) {
  return torch::randn({3, kWidth}, at::detail::createCPUGenerator(static_cast<uint64_t>(step)));
}

template <typename A, typename O>
std::vector<torch::Tensor> trained(int ranks, int stage, const O& options,
                                   const RankOptions& rank_options = {}) {
  std::vector<torch::Tensor> result;
  run_ranks(
      ranks,
      [&](comm::World& world) {
        at::set_num_threads(1);
        DistributedDataParallel<Deep> model(Deep(), world, options_of(stage));
        Optimizer<A> optimizer(model, options);
        for (int step = 0; step < 2; ++step) {
          model(inputs_of(step)).backward();
          std::this_thread::sleep_for(std::chrono::milliseconds(3 * world.rank()));
          optimizer.step();
          optimizer.zero_grad();
        }
        const auto state = full_state(model);
        if (world.rank() != 0) return;
        for (const auto& item : state) result.push_back(item.value());
      },
      rank_options);
  return result;
}

template <typename A, typename O>
void expect_same_bits_late(const O& options) {
  RankOptions late;
  late.decorate = [](std::unique_ptr<comm::Communicator> inner) {
    return std::make_unique<DelayedCommunicator>(std::move(inner), std::chrono::milliseconds(2));
  };
  const auto expected = trained<A>(1, 0, options);
  for (const auto& [ranks, stage] : {std::pair(4, 0), std::pair(4, 1), std::pair(2, 3)}) {
    EXPECT_TRUE(same_bits(expected, trained<A>(ranks, stage, options, late)))
        << ranks << " ranks, stage " << stage;
  }
}

TEST(BucketsUnderWayTest, HaveTheSameBitsWhereMessagesAndRanksAreLate) {
  expect_same_bits_late<Muon>(MuonOptions(0.02));
  expect_same_bits_late<Lamb>(LambOptions(0.02));
  expect_same_bits_late<Adafactor>(AdafactorOptions(0.02));
}

// What it does to a matrix is up to the test.
struct Observed : TensorUpdate<torch::optim::SGDOptions> {
  static constexpr auto kReads = UpdateReads::kMatrix;
  static inline thread_local std::function<void()> on_transform;

  std::vector<std::string> states(const Options&) const override { return {}; }
  void direct(const Options&, const Elements& of) const override {
    of.directions.copy_(of.gradient);
  }
  void transform(const Options&, const at::Tensor&) const override {
    if (on_transform) on_transform();
  }
  void descend(const Options& options, const at::Tensor& values,
               const at::Tensor& directions) const override {
    values.sub_(directions, options.lr());
  }
};

TEST(BucketsUnderWayTest, TheNextIsOnItsWayWhileOneIsTransformed) {
  static thread_local int64_t begun = 0;
  RankOptions counted;
  counted.decorate = [](std::unique_ptr<comm::Communicator> inner) {
    return std::make_unique<DelayedCommunicator>(std::move(inner), std::chrono::milliseconds(1),
                                                 [](const std::string&) { ++begun; });
  };
  run_ranks(
      2,
      [&](comm::World& world) {
        DistributedDataParallel<Deep> model(Deep(), world, options_of(1));
        Optimizer<Observed> optimizer(model, torch::optim::SGDOptions(0.1));
        model(inputs_of(0)).backward();
        begun = 0;
        std::vector<int64_t> sent;
        Observed::on_transform = [&] { sent.push_back(begun); };
        optimizer.step();
        Observed::on_transform = {};
        // Three buckets, of four matrices for each rank. Before the first is transformed, a message of it and of the second have
        // left; before the second, also the first one's way back and the third's way there.
        EXPECT_EQ(sent, (std::vector<int64_t>{2, 2, 2, 2, 4, 4, 4, 4, 5, 5, 5, 5}));
        EXPECT_EQ(begun, 6);
      },
      counted);
}

// 8 matrices in a bucket: half of each is this rank's, and half of them it has as a whole.
constexpr int64_t kBucketBytes = 8 * kMatrixBytes / 2;
// The directions of three, one's matrices and answers, the next one's messages and the last one's.
constexpr int64_t kTransientBytes = 7 * kBucketBytes;

TEST(BucketsUnderWayTest, HoldAsMuchAsTheFormulaSays) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Deep> model(Deep(), world, options_of(1));
    Optimizer<Observed> optimizer(model, torch::optim::SGDOptions(0.1));
    memory::Ledger& ledger = *memory::Ledger::current();
    for (int step = 0; step < 2; ++step) {
      model(inputs_of(step)).backward();
      const int64_t before = ledger.now().total();
      ledger.reset_peak();
      optimizer.step();
      const auto most = static_cast<double>(ledger.at_peak().total() - before);
      EXPECT_NEAR(most, kTransientBytes, 0.01 * kTransientBytes) << "step " << step;
      optimizer.zero_grad();
    }
  });
}

TEST(BucketsUnderWayTest, AreCountedWhereMemoryHasALimit) {
  // Values, gradients of half, and no state.
  constexpr int64_t kPersistent = kLayers * kMatrixBytes * 3 / 2;
  run_ranks(2, [&](comm::World& world) {
    const auto error_within = [&](int64_t bytes) {
      Options options = options_of(2);
      options.device_memory_bytes = bytes;
      DistributedDataParallel<Deep> model(Deep(), world, options);
      return error_of([&] { Optimizer<Observed> optimizer(model, torch::optim::SGDOptions(0.1)); });
    };
    EXPECT_EQ(error_within(kPersistent + kTransientBytes), "");
    EXPECT_THAT(error_within(kPersistent + kTransientBytes - 1),
                HasSubstr("a step of zeropage::matrix_exchange_test"));
  });
}

TEST(MatrixBucketsTest, AreSeveralWhereRanksHaveManyMatrices) {
  const std::vector<zero::PageOfMatrices> pages(24, {.numel = 10, .matrices = {{.cost = 1}}});
  const auto count = [&](int ranks) { return zero::matrix_buckets(pages, ranks).size(); };
  EXPECT_EQ(count(1), 1U);
  EXPECT_EQ(count(2), 3U);
  EXPECT_EQ(count(3), 2U);
  EXPECT_EQ(count(4), 1U);
}

}  // namespace
}  // namespace zeropage::matrix_exchange_test
