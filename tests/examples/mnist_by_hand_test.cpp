// MNIST by hand and with Zeropage, on digits that this test draws.
#include <cstdint>
#include <sstream>

#include "tests/examples/train_gpt_run.h"

namespace zeropage::mnist_by_hand_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

class MnistByHandTest : public TrainGptTest {
 protected:
  // 40 samples of each of ten classes: a bright bar whose place is the class, and noise.
  void SetUp() override {
    TrainGptTest::SetUp();
    std::ofstream out(path("bars.csv"));
    uint32_t noise = 1;
    for (int sample = 0; sample < 400; ++sample) {
      const int label = sample % 10;
      for (int pixel = 0; pixel < 28 * 28; ++pixel) {
        noise = noise * 1664525U + 1013904223U;
        const bool is_in_bar = pixel / 28 / 2 == label + 2;
        out << (is_in_bar ? 180 : 0) + (noise >> 26) << ',';
      }
      out << label << '\n';
    }
  }

  Outcome run(const std::string& program, const std::string& flags) const {
    return run_program(program + " --data " + path("bars.csv") + " --held-out 100 " + flags);
  }

  // The value after `key` in a run's output.
  static std::string after(const std::string& key, const Outcome& outcome) {
    const size_t at = outcome.output.find(key);
    EXPECT_NE(at, std::string::npos) << outcome.output;
    if (at == std::string::npos) return "";
    const size_t begin = at + key.size();
    return outcome.output.substr(begin, outcome.output.find('\n', begin) - begin);
  }
};

TEST_F(MnistByHandTest, HasTheBitsOfTheSameWithZeropage) {
  for (const char* flags :
       {"--ranks 1 --batch 20", "--ranks 2 --batch 20", "--ranks 3 --batch 30"}) {
    const std::string all = std::string(flags) + " --epochs 2";
    const Outcome by_hand = run(MNIST_BY_HAND, all), with_zeropage = run(MNIST_WITH_ZEROPAGE, all);
    EXPECT_EQ(by_hand.exit_code, 0) << by_hand.output;
    EXPECT_EQ(by_hand.output, with_zeropage.output) << flags;
    EXPECT_EQ(after("weights_sha256 ", by_hand).size(), 64U);
  }
}

TEST_F(MnistByHandTest, LearnsWhatItIsShown) {
  const Outcome outcome = run(MNIST_WITH_ZEROPAGE, "--ranks 2 --batch 20 --epochs 8 --lr 0.01");
  EXPECT_GT(std::stod(after("held-out accuracy ", outcome)), 90) << outcome.output;
}

TEST_F(MnistByHandTest, NamesRealDigitsWithTheSameBitsBothWays) {
  const std::string digits = EXAMPLES_FOLDER "/../datasets/mnist-5k/mnist_5k.csv.gz";
  if (!std::filesystem::exists(digits)) {
    GTEST_SKIP() << digits << " is not there; scripts/get_data.sh mnist-5k fetches it";
  }
  const std::string flags = " --ranks 2 --epochs 10 --data " + digits;
  const Outcome by_hand = shell(MNIST_BY_HAND + flags),
                with_zeropage = shell(MNIST_WITH_ZEROPAGE + flags);
  EXPECT_EQ(by_hand.output, with_zeropage.output);
  EXPECT_GT(std::stod(after("held-out accuracy ", by_hand)), 95) << by_hand.output;
}

TEST_F(MnistByHandTest, RunsUnderALauncher) {
  const std::string launched = std::string(ZP) + " run -n 2 -- " + MNIST_BY_HAND;
  const Outcome by_itself = run(MNIST_BY_HAND, "--ranks 2 --batch 20 --epochs 1");
  EXPECT_EQ(after("weights_sha256 ", run(launched, "--batch 20 --epochs 1")),
            after("weights_sha256 ", by_itself));
}

TEST_F(MnistByHandTest, WhatMakesNoSenseIsRefusedInWords) {
  const Outcome no_data =
      shell(std::string(MNIST_BY_HAND) + " --ranks 1 --data " + path("none.csv"));
  EXPECT_EQ(no_data.exit_code, 1);
  EXPECT_THAT(no_data.output, HasSubstr("there is no such file; scripts/get_data.sh fetches"));
  EXPECT_THAT(run(MNIST_BY_HAND, "--ranks 3 --batch 20").output,
              HasSubstr("--batch 20 cannot be shared by 3 ranks; give a multiple of 3"));
  std::ofstream(path("bars.csv"), std::ios::app) << "1,2,3\n";
  EXPECT_THAT(run(MNIST_BY_HAND, "--ranks 1 --batch 20").output,
              HasSubstr("line 401: expected 785 numbers as in the first line, got 3"));
}

TEST_F(MnistByHandTest, ThePageShowsTheDifferenceOfTheTwoPrograms) {
  const Outcome difference =
      shell("cd " EXAMPLES_FOLDER
            "/mnist_by_hand && diff -U1 --label by_hand.cpp --label with_zeropage.cpp "
            "by_hand.cpp with_zeropage.cpp");
  ASSERT_EQ(difference.exit_code, 1) << difference.output;
  std::ostringstream page;
  page << std::ifstream(EXAMPLES_FOLDER "/mnist_by_hand/README.md").rdbuf();
  EXPECT_THAT(page.str(), HasSubstr("```diff\n" + difference.output + "```\n"));
}

}  // namespace
}  // namespace zeropage::mnist_by_hand_test
