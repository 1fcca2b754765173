// For tests that run on a CUDA device: skipped, with the reason, where there is none.
#pragma once

#include <filesystem>

#include <gtest/gtest.h>
#include <torch/cuda.h>

#include "optim/cuda/fused_step.h"

namespace zeropage::testing {

// A machine that has a device which LibTorch cannot use does not skip: the test fails.
template <typename Base = ::testing::Test>
class NeedsCuda : public Base {
 protected:
  void SetUp() override {
    if (!optim::cuda::is_built()) GTEST_SKIP() << "built without CUDA";
    if (torch::cuda::is_available()) return;
    constexpr const char* kDriver = "/dev/nvidiactl";
    if (!std::filesystem::exists(kDriver)) GTEST_SKIP() << "no CUDA device: no " << kDriver;
    FAIL() << "LibTorch finds no CUDA device, but there is " << kDriver
           << "; see whether the driver is new enough for CUDA 13 (nvidia-smi), and whether "
              "CUDA_VISIBLE_DEVICES hides the devices";
  }
};

}  // namespace zeropage::testing
