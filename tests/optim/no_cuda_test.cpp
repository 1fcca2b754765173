// A build without CUDA.
#include <gtest/gtest.h>

#include "optim/cuda/fused_step.h"
#include "tests/harness/errors.h"

namespace zeropage::optim::no_cuda_test {
namespace {

TEST(WithoutCudaTest, TensorsOnCudaAreRefusedInWords) {
  if (optim::cuda::is_built()) GTEST_SKIP() << "this build has CUDA";
  EXPECT_EQ(testing::error_of([] { optim::cuda::fused_step(LionRule(), FlatStretch(), nullptr); }),
            "fused_step: its tensors are on a CUDA device, but this Zeropage was built without "
            "CUDA; build it with -DZEROPAGE_CUDA=ON (cmake --preset cuda), or keep the tensors on "
            "the CPU");
}

}  // namespace
}  // namespace zeropage::optim::no_cuda_test
