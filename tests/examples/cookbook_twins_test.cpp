// Each program of examples/cookbook beside the file of plain PyTorch with its name, on one process. RUN_TWINS runs all of these.
#include <map>

#include "tests/examples/cookbook_run.h"

namespace cookbook_twins_test {
namespace {

using namespace cookbook_run;

// Importing torch's optimizers takes seconds, so one process runs all twins. By name.
const std::map<std::string, std::string>& outputs_of_twins() {
  static const std::map<std::string, std::string> outputs = [] {
    const Outcome all = shell(RUN_TWINS);
    EXPECT_EQ(all.exit_code, 0) << all.output;
    std::map<std::string, std::string> by_name;
    static const std::regex part("== ([a-z_]+)\n([^=]*)");
    for (std::sregex_iterator at(all.output.begin(), all.output.end(), part), end; at != end; ++at)
      by_name[(*at)[1]] = (*at)[2];
    return by_name;
  }();
  return outputs;
}

class CookbookTwinsTest : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(folder_); }

  static void expect_as_twin(const std::string& name, const std::string& launcher,
                             const std::string& arguments, const Bounds& bounds) {
    SCOPED_TRACE(launcher + name + " " + arguments);
    const Outcome outcome = shell(launcher + program(name) + " " + arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    ASSERT_TRUE(outputs_of_twins().contains(name));
    expect_near(figures_in(outcome.output), figures_in(outputs_of_twins().at(name)), bounds);
  }

  const std::string folder_ = ::testing::TempDir() + "cookbook-twins-" + std::to_string(::getpid());
};

TEST_F(CookbookTwinsTest, DropInOptimizerHasTheLossesOfPyTorch) {
  expect_as_twin("drop_in_optimizer", ranks(2), folder_, kFp32);
}

TEST_F(CookbookTwinsTest, ShardedWrapperHasTheLossesOfPyTorch) {
  expect_as_twin("sharded_wrapper", ranks(4), folder_, kFp32);
}

TEST_F(CookbookTwinsTest, LowMemoryHasTheLossesOfPyTorchWithinTheRoundingOfBf16) {
  expect_as_twin("low_memory", "", "1500KiB", kBf16);
  expect_as_twin("low_memory", ranks(2), "1700KiB 2", kBf16);
}

TEST_F(CookbookTwinsTest, TensorParallelHasTheLossesOfPyTorch) {
  expect_as_twin("tensor_parallel", "", "", kFp32);
  expect_as_twin("tensor_parallel", ranks(4), "2", kFp32);
}

TEST_F(CookbookTwinsTest, PipelineHasTheLossesOfPyTorchOverAMeshOfThreeAxes) {
  expect_as_twin("pipeline", "", "", kFp32);
  expect_as_twin("pipeline", ranks(4), "4 1 1", kFp32);
  expect_as_twin("pipeline", ranks(8), "2 2 2", kFp32);
}

}  // namespace
}  // namespace cookbook_twins_test
