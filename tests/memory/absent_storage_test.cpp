#include "memory/absent_storage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"

namespace zeropage::memory::absent_storage_test {
namespace {

using ::testing::HasSubstr;
using zeropage::testing::error_of;

c10::StorageImpl& storage_of(const torch::Tensor& tensor) {
  return *tensor.storage().unsafeGetStorageImpl();
}

c10::DataPtr memory_of(const torch::Tensor& tensor) {
  return std::move(storage_of(tensor)._mutable_data_ptr_no_checks());
}

TEST(AbsentStorageTest, TellsWhoeverLooksAtIt) {
  check_absent_storages();
  const auto tensor = torch::arange(6, torch::kFloat32).requires_grad_();
  const auto view = tensor.detach().view({2, 3});
  make_absent(storage_of(tensor), "it has left");
  EXPECT_TRUE(is_absent(storage_of(view)));
  const auto told = HasSubstr("it has left");
  EXPECT_THAT(error_of([&] { view.matmul(torch::ones({3, 2})); }), told);
  EXPECT_THAT(error_of([&] { view.index({1, 2}).item<float>(); }), told);
  EXPECT_THAT(error_of([&] { torch::ones({2, 3}).copy_(view); }), told);
  EXPECT_THAT(error_of([&] { torch::Tensor(view).fill_(1); }), told);
  EXPECT_THAT(error_of([&] { view.const_data_ptr<float>(); }), told);
  EXPECT_THAT(error_of([&] { torch::cat({view, view}); }), told);
  EXPECT_THAT(error_of([&] { view.to(torch::kBFloat16); }), told);
  EXPECT_EQ(view.t().size(0), 3);
  EXPECT_EQ(view.narrow(1, 1, 2).numel(), 4);

  make_absent(storage_of(tensor), "for ever");
  EXPECT_THAT(error_of([&] { view.sum(); }), HasSubstr("for ever"));
}

TEST(AbsentStorageTest, IsAsBeforeWithOtherMemory) {
  const auto tensor = torch::arange(6, torch::kFloat32);
  const auto version = tensor._version();
  const auto other = torch::full({6}, 2.0);
  make_absent(storage_of(tensor), "it has left");
  make_present(storage_of(tensor), memory_of(other));
  EXPECT_FALSE(is_absent(storage_of(tensor)));
  EXPECT_EQ(tensor._version(), version);
  EXPECT_EQ(tensor.sum().item<float>(), 12.0F);
  tensor.fill_(1);
  EXPECT_EQ(tensor.sum().item<float>(), 6.0F);
}

}  // namespace
}  // namespace zeropage::memory::absent_storage_test
