#include "memory/self_check.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

#include "tests/harness/errors.h"

namespace zeropage::memory::self_check_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::zeropage::testing::error_of;

int runs = 0;

TEST(SelfCheckTest, FindsALibTorchThatBehaves) {
  EXPECT_EQ(error_of([] { check_libtorch(); }), "");
  const c10::InferenceMode inference;
  EXPECT_EQ(error_of([] { check_libtorch(); }), "");
}

TEST(SelfCheckTest, AFailedProbeNamesTheReleaseWhatWasExpectedWhatCameAndWhatToDo) {
  SelfCheck check("sharded tests", "whole ones", [] {
    ++runs;
    expect_of_libtorch("the sum of 1 and 1", 3, 2);
  });
  runs = 0;
  const std::string error = error_of([&] { check.require(); });
  EXPECT_THAT(error, AllOf(HasSubstr("LibTorch " TORCH_VERSION), HasSubstr("sharded tests"),
                           HasSubstr("the sum of 1 and 1: expected 3, got 2"),
                           HasSubstr("use a release that README.md names, or whole ones")));
  EXPECT_EQ(error_of([&] { check.require(); }), error) << "nothing goes on after a failure";
  EXPECT_EQ(runs, 1);
}

TEST(SelfCheckTest, WhatLibTorchThrowsInAProbeIsTheFault) {
  SelfCheck check("a product", "", [] { at::matmul(at::ones({2, 3}), at::ones({2, 3})); });
  EXPECT_THAT(error_of([&] { check.require(); }),
              AllOf(HasSubstr("does not behave as Zeropage needs for a product: "),
                    HasSubstr("shapes cannot be multiplied")));
}

TEST(SelfCheckTest, TheProbesRunOnceAndMayUseWhatTheyCheck) {
  static SelfCheck check("recursion", "", [] {
    ++runs;
    check.require();
  });
  runs = 0;
  check.require();
  check.require();
  EXPECT_EQ(runs, 1);
}

TEST(SelfCheckTest, TheProbesDoNotSeeTheModesOfTheThreadThatComesFirst) {
  const c10::InferenceMode inference;
  const at::NoGradGuard no_grad;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  SelfCheck check("gradients", "", [] {
    const at::Tensor x = at::ones({2, 2}).requires_grad_();
    const at::Tensor y = at::matmul(x, x);
    expect_of_libtorch("a gradient is recorded", y.requires_grad());
    expect_of_libtorch("the dtype of a product", at::kFloat, y.scalar_type());
  });
  EXPECT_EQ(error_of([&] { check.require(); }), "");
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

}  // namespace
}  // namespace zeropage::memory::self_check_test
