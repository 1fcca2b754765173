#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "offload/nvme_heap.h"
#include "tests/harness/errors.h"
#include "zeropage/activation_offload.h"
#include "zeropage/ledger.h"

namespace zeropage::nvme_activations_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using zeropage::testing::error_of;

constexpr int64_t kBatch = 256;
constexpr int64_t kWidth = 128;

class NvmeActivationsTest : public ::testing::Test {
 protected:
  NvmeActivationsTest() {
    torch::manual_seed(0);
    folder_ = std::filesystem::current_path() / ("activations-test-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
    model_ = torch::nn::Sequential();
    for (int layer = 0; layer < 6; ++layer) {
      model_->push_back(torch::nn::Linear(kWidth, kWidth));
      model_->push_back(torch::nn::Tanh());
    }
    input_ = torch::randn({kBatch, kWidth});
  }
  ~NvmeActivationsTest() override { std::filesystem::remove_all(folder_); }

  checkpointing::ActivationOffloadOptions options(int64_t writing_bytes, int64_t staging_bytes) {
    checkpointing::ActivationOffloadOptions options;
    options.staging_bytes = staging_bytes;
    store_.reset();  // it has the file
    store_ = std::make_shared<NvmeActivations>(
        NvmeActivationsOptions{.directory = folder_, .rank = 3, .writing_bytes = writing_bytes});
    options.store = store_;
    return options;
  }

  torch::Tensor forward(checkpointing::ActivationOffload& offload) {
    const checkpointing::ActivationScope scope(offload);
    return model_->forward(input_).square().sum();
  }
  std::vector<torch::Tensor> take_gradients() {
    std::vector<torch::Tensor> gradients;
    for (const auto& parameter : model_->parameters())
      gradients.push_back(parameter.grad().clone());
    model_->zero_grad();
    return gradients;
  }

  std::string folder_;
  torch::nn::Sequential model_{nullptr};
  torch::Tensor input_;
  std::shared_ptr<NvmeActivations> store_;
};

TEST_F(NvmeActivationsTest, ChangeNoBitWhateverIsOnItsWay) {
  model_->forward(input_).square().sum().backward();
  const auto expected = take_gradients();
  for (const int64_t bytes : {int64_t{1}, int64_t{300} << 10, int64_t{64} << 20}) {
    checkpointing::ActivationOffload offload(options(bytes, bytes));
    for (int step = 0; step < 3; ++step) {
      forward(offload).backward();
      const auto gradients = take_gradients();
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(torch::equal(gradients[i], expected[i]));
      }
    }
    EXPECT_EQ(store_->heap().held_bytes(), 0);
    const auto statistics = store_->heap().statistics();
    EXPECT_GE(statistics.bytes_written, 3 * 5 * kBatch * kWidth * 4);
    EXPECT_GE(statistics.bytes_read, 3 * 4 * kBatch * kWidth * 4);
    EXPECT_THAT(to_string(offload.statistics()),
                HasSubstr("in " + folder_ + "/rank-3.activations"));
    EXPECT_GT(offload.statistics().fetched_ahead_bytes, 0);
  }
}

TEST_F(NvmeActivationsTest, LeaveHostMemoryBetweenForwardAndBackward) {
  const auto ledger = std::make_shared<memory::Ledger>();
  const memory::LedgerScope scope(ledger);
  const int64_t one = kBatch * kWidth * 4;
  checkpointing::ActivationOffload offload(options(/*writing_bytes=*/2 * one, one));
  const auto loss = forward(offload);
  EXPECT_GE(store_->heap().held_bytes(), 5 * one);
  EXPECT_LE(ledger->now()[memory::Kind::kActivationOffloaded], 2 * one + 8192);
  loss.backward();
}

TEST_F(NvmeActivationsTest, ADamagedActivationStopsBackwardWithItsName) {
  checkpointing::ActivationOffload offload(options(0, 0));
  const auto loss = forward(offload);
  {
    std::fstream file(store_->heap().path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(3 * kBatch * kWidth * 4 + 17);
    file.put(static_cast<char>(0x5A));
  }
  EXPECT_THAT(error_of([&] { loss.backward(); }),
              AllOf(HasSubstr("activations: reading record "), HasSubstr("/rank-3.activations"),
                    HasSubstr("expected checksum")));
}

TEST_F(NvmeActivationsTest, TheFileIsGoneWithTheLastGraph) {
  torch::Tensor loss;
  {
    checkpointing::ActivationOffload offload(options(0, 0));
    loss = forward(offload);
    store_.reset();
  }
  EXPECT_FALSE(std::filesystem::is_empty(folder_));
  loss.backward();
  loss.reset();
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

}  // namespace
}  // namespace zeropage::nvme_activations_test
