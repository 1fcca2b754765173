#include "comm/devices/nccl_environment.h"

#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

namespace zeropage::comm::nccl_environment_test {
namespace {

const char* const kVariables[] = {"TORCH_NCCL_ASYNC_ERROR_HANDLING",
                                  "TORCH_NCCL_RETHROW_CUDA_ERRORS",
                                  "TORCH_NCCL_ENABLE_MONITORING",
                                  "TORCH_NCCL_DUMP_ON_TIMEOUT",
                                  "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
                                  "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
                                  "TORCH_FR_BUFFER_SIZE",
                                  "TORCH_NCCL_TRACE_BUFFER_SIZE"};

class NcclEnvironmentTest : public ::testing::Test {
 protected:
  NcclEnvironmentTest() { unset_all(); }
  ~NcclEnvironmentTest() override { unset_all(); }

  static void unset_all() {
    for (const char* variable : kVariables) unsetenv(variable);
  }
  static std::string value_of(const char* variable) {
    const char* const value = std::getenv(variable);
    return value == nullptr ? "unset" : value;
  }
};

TEST_F(NcclEnvironmentTest, SwitchesC10dsWatchdogAndItsDumpsOff) {
  detail::leave_nccl_errors_to_us();
  for (const char* variable : kVariables) {
    // LibTorch warns of the older name of the recorder's variable.
    const bool is_old_name = std::string(variable) == "TORCH_NCCL_TRACE_BUFFER_SIZE";
    EXPECT_EQ(value_of(variable), is_old_name ? "unset" : "0") << variable;
  }
}

TEST_F(NcclEnvironmentTest, KeepsWhatTheUserHasSet) {
  for (const char* variable : kVariables) setenv(variable, "17", /*overwrite=*/1);
  detail::leave_nccl_errors_to_us();
  for (const char* variable : kVariables) EXPECT_EQ(value_of(variable), "17") << variable;
}

TEST_F(NcclEnvironmentTest, KeepsARecorderThatHasItsOlderName) {
  setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "500", /*overwrite=*/1);
  detail::leave_nccl_errors_to_us();
  EXPECT_EQ(value_of("TORCH_FR_BUFFER_SIZE"), "unset");
}

}  // namespace
}  // namespace zeropage::comm::nccl_environment_test
