// A build without NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/devices/nccl_communicator.h"
#include "tests/harness/errors.h"

namespace zeropage::comm::no_nccl_test {
namespace {

TEST(NoNcclTest, SaysSoAndWhichBuildHasIt) {
  if (has_nccl()) GTEST_SKIP() << "this build has NCCL";
  EXPECT_THAT(testing::error_of([] { make_nccl_communicator(nullptr, {}); }),
              ::testing::HasSubstr("this build of Zeropage has no NCCL; build the preset cuda"));
}

}  // namespace
}  // namespace zeropage::comm::no_nccl_test
