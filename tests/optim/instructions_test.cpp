#include "optim/cpu/instructions.h"

#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"

namespace zeropage::optim::cpu::instructions_test {
namespace {

using zeropage::testing::error_of;

TEST(InstructionsTest, AreNamedAsLibTorchNamesItsOwn) {
  for (const Instructions set :
       {Instructions::kAnyProcessor, Instructions::kAvx2, Instructions::kAvx512}) {
    EXPECT_EQ(instructions_named(name_of(set), Instructions::kAvx512), set);
  }
  EXPECT_EQ(name_of(Instructions::kAnyProcessor), "default");
  EXPECT_EQ(name_of(Instructions::kAvx2), "avx2");
  EXPECT_EQ(name_of(Instructions::kAvx512), "avx512");
}

TEST(InstructionsTest, RefuseAnUnknownNameAndOneThatTheProcessorDoesNotHave) {
  const auto refusal = [](std::string_view text, Instructions most) {
    return error_of([&] { instructions_named(text, most); });
  };
  EXPECT_EQ(refusal("avx512", Instructions::kAvx2),
            "ZEROPAGE_CPU_CAPABILITY: expected default or avx2, which this processor has, got "
            "\"avx512\"; name one of these, or unset it for the best of them");
  EXPECT_EQ(refusal("AVX2", Instructions::kAvx512),
            "ZEROPAGE_CPU_CAPABILITY: expected default, avx2 or avx512, which this processor has, "
            "got \"AVX2\"; name one of these, or unset it for the best of them");
  EXPECT_THAT(refusal("avx2", Instructions::kAnyProcessor),
              ::testing::HasSubstr("expected default, which"));
  EXPECT_THAT(refusal("", Instructions::kAvx2), ::testing::HasSubstr("got \"\""));
}

TEST(InstructionsTest, AreNoMoreThanTheProcessorsAndThanAskedFor) {
  EXPECT_LE(best_instructions(), instructions_of_processor());
  EXPECT_EQ(usable(Instructions::kAnyProcessor), Instructions::kAnyProcessor);
  EXPECT_EQ(usable(Instructions::kAvx512), best_instructions());
}

}  // namespace
}  // namespace zeropage::optim::cpu::instructions_test
