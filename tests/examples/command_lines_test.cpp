// What all programs have in common: how a command line that makes no sense ends.
#include <algorithm>
#include <string>
#include <vector>

#include "tests/examples/train_gpt_run.h"

namespace zeropage::command_lines_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::vector<std::string> kPrograms = {
    SHAPES,         COLLECTIVES_TOUR, MEMORY_PROFILE, MNIST_BY_HAND, MNIST_WITH_ZEROPAGE,
    MODEL_PARALLEL, TRAIN_RESNET,     TRAIN_GPT,      ZP_PLAN,       ZP};

TEST(CommandLinesTest, MistakesEndWithTwoAndHelpWithZero) {
  for (const std::string& program : kPrograms) {
    const Outcome unknown = run_program(program + " --no-such-flag 1");
    EXPECT_EQ(unknown.exit_code, 2) << program << '\n' << unknown.output;
    EXPECT_THAT(unknown.output, Not(IsEmpty())) << program;
    const Outcome help = run_program(program + " --help");
    EXPECT_EQ(help.exit_code, 0) << program << '\n' << help.output;
    EXPECT_THAT(help.output, HasSubstr("--help")) << program;
  }
  EXPECT_EQ(run_program(std::string(ZP) + " --version").exit_code, 0);
}

TEST(CommandLinesTest, SayOfABadNumberWhatIsExpectedAndNotTheLargestDouble) {
  for (const auto& [flags, words] : std::vector<std::pair<std::string, std::string>>{
           {std::string(MNIST_BY_HAND) + " --lr 0", "--lr: 0: expected a number above 0"},
           {std::string(MODEL_PARALLEL) + " --steps -3", "--steps: -3: expected a number above 0"},
           {std::string(TRAIN_RESNET) + " --lr nan", "--lr: nan: expected a number above 0"},
           {std::string(TRAIN_RESNET) + " --weight-decay -1", "-1: expected 0 or more"},
           {std::string(TRAIN_GPT) + " --steps 0", "--steps: 0: expected a number above 0"}}) {
    const Outcome outcome = run_program(flags);
    EXPECT_EQ(outcome.exit_code, 2) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(words)) << flags;
    EXPECT_LT(outcome.output.size(), 250U) << outcome.output;
  }
}

}  // namespace
}  // namespace zeropage::command_lines_test
