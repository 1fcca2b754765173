// Lets the fake accelerator finish before a test binary ends: LibTorch's statics go then.
#pragma once

#include <gtest/gtest.h>

#include "tests/harness/fake_accelerator/fake_accelerator.h"

namespace zeropage::testing {

class FakeEnvironment final : public ::testing::Environment {
 public:
  void TearDown() override { finish_fake_work(); }
};

// One a binary; GoogleTest owns it.
inline const ::testing::Environment* const fake_environment =
    ::testing::AddGlobalTestEnvironment(new FakeEnvironment);

}  // namespace zeropage::testing
