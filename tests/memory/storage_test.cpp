#include "memory/storage.h"

#include <cmath>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace zeropage::memory::storage_test {
namespace {

TEST(StorageTest, MovesValuesAndKeepsEveryAlias) {
  const auto tensor = torch::arange(6, torch::kFloat32).view({2, 3});
  const auto row = tensor[1];
  const auto flat = torch::zeros({32});
  move_storage_into(tensor, flat, 16);
  EXPECT_EQ(tensor.data_ptr(), static_cast<float*>(flat.data_ptr()) + 16);
  EXPECT_EQ(row.data_ptr(), static_cast<float*>(flat.data_ptr()) + 19);
  EXPECT_TRUE(torch::equal(flat.narrow(0, 16, 6), torch::arange(6, torch::kFloat32)));
  flat[17] = 42;
  EXPECT_EQ(tensor[0][1].item<float>(), 42);
}

TEST(StorageTest, KeepsTensorsSavedByAutogradRight) {
  const auto weight = torch::ones({3}, torch::requires_grad());
  const auto x = torch::full({3}, 2.0, torch::requires_grad());
  const auto loss = (weight * x).sum();
  move_storage_into(weight, torch::zeros({16}), 0);
  loss.backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::ones({3})));
}

TEST(StorageTest, LeavesAFlatBufferAliveAsLongAsATensorLivesInIt) {
  const auto tensor = torch::full({4}, 7.0);
  move_storage_into(tensor, torch::zeros({16}), 4);
  EXPECT_TRUE(torch::equal(tensor, torch::full({4}, 7.0)));
}

TEST(StorageTest, CountsTheWholeStorageOfAView) {
  EXPECT_EQ(storage_numel(torch::zeros({4, 5}).narrow(0, 1, 2)), 20);
}

TEST(StorageTest, MovesATensorWithoutMemoryAndKeepsEverySize) {
  const auto on_meta = torch::TensorOptions().device(torch::kMeta);
  const auto tensor = torch::empty({2, 3}, on_meta);
  const auto flat = torch::empty({32}, on_meta);
  move_storage_into(tensor, flat, 16);
  EXPECT_EQ(tensor.data_ptr(), nullptr);
  EXPECT_EQ(storage_numel(tensor), 6);
  const auto slot = tensor_in(flat.storage(), tensor, 16, tensor.scalar_type());
  EXPECT_EQ(slot.storage_offset(), 16);
  EXPECT_EQ(slot.sizes(), tensor.sizes());
  EXPECT_TRUE(slot.is_meta() && slot.is_alias_of(flat));
  EXPECT_EQ(storage_numel(flat), 32);
}

TEST(StorageTest, WritesWhatAnExpandedDimensionRepeatsOnce) {
  const auto column = torch::zeros({3, 1});
  const auto tensor = column.expand({2, 3, 4});
  const auto values = torch::tensor({1.0, std::nan(""), 3.0}, torch::kDouble).view({3, 1});
  write_values(tensor, values.expand({2, 3, 4}).contiguous(), "buffer \"mask\"");
  EXPECT_TRUE(torch::allclose(column, values.to(torch::kFloat), 0, 0, /*equal_nan=*/true));
  const auto others = torch::arange(24, torch::kFloat).view({2, 3, 4});
  try {
    write_values(tensor, others, "buffer \"mask\"");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::Error& error) {
    const std::string words = error.what_without_backtrace();
    EXPECT_NE(words.find("buffer \"mask\": dimension 0 is expanded"), std::string::npos) << words;
  }
  EXPECT_EQ(column[2].item<float>(), 3);
  const auto on_meta = torch::empty({3, 1}, torch::kMeta).expand({3, 4});
  write_values(on_meta, on_meta.contiguous(), "buffer \"mask\"");
}

TEST(StorageTest, RefusesToWritePastTheEnd) {
  EXPECT_THROW(move_storage_into(torch::zeros({10}), torch::zeros({16}), 7), c10::Error);
}

}  // namespace
}  // namespace zeropage::memory::storage_test
