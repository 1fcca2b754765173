// train_gpt on CUDA, as users run it. Only where the machine has no device of NVIDIA's may a case be
// skipped: where there is one, training that fails is a failure.
#include <cctype>

#include "tests/examples/train_gpt_run.h"

namespace train_gpt_cuda_test {
namespace {

using namespace zeropage::testing;

// The driver makes /dev/nvidia0 and so on, in containers too.
bool has_device_node() {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", none)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("nvidia") && name.size() > 6 && std::isdigit(name[6]) != 0) return true;
  }
  return false;
}

class TrainGptCudaTest : public TrainGptTest {
 protected:
  void SetUp() override {
    TrainGptTest::SetUp();
    if (!has_device_node()) GTEST_SKIP() << "no CUDA device: /dev has no nvidia0, nvidia1, ...";
  }
  nlohmann::json run(const std::string& flags) const {
    const Outcome outcome = train_gpt(tiny("--device cuda --page-bytes 16KiB " + flags));
    EXPECT_EQ(outcome.exit_code, 0) << flags << "\n" << outcome.output;
    return outcome.exit_code == 0 ? json() : nlohmann::json();
  }
  void expect_the_same_bits(const std::string& flags) const {
    nlohmann::json first;
    for (const int stage : {0, 1, 2, 3}) {
      const auto run = this->run("--deterministic --stage " + std::to_string(stage) + " " + flags);
      ASSERT_TRUE(run.is_object()) << "stage " << stage;
      if (first.is_null()) first = run["weights_sha256"];
      EXPECT_EQ(run["weights_sha256"], first) << "stage " << stage;
    }
  }
};

TEST_F(TrainGptCudaTest, TrainsOnOneRank) {
  EXPECT_TRUE(run("").is_object());
}

TEST_F(TrainGptCudaTest, TrainsOnTwoRanksThatAreForked) {
  EXPECT_TRUE(run("--ranks 2").is_object());
}

TEST_F(TrainGptCudaTest, GivesTheSameBitsAtEveryStageOnOneRank) {
  expect_the_same_bits("");
  expect_the_same_bits("--compute-dtype bf16");
}

// Through the host, where the ranks share a device.
TEST_F(TrainGptCudaTest, GivesTheSameBitsAtEveryStageOnTwoRanks) {
  expect_the_same_bits("--ranks 2");
  expect_the_same_bits("--ranks 2 --compute-dtype bf16 --optimizer lion");
}

TEST_F(TrainGptCudaTest, OffloadsTheOptimizerToTheSameBits) {
  const auto expected = run("--deterministic")["weights_sha256"];
  for (const std::string step : {"step", "backward"}) {
    EXPECT_EQ(
        run("--deterministic --offload-optimizer host --offload-step " + step)["weights_sha256"],
        expected)
        << step;
  }
}

TEST_F(TrainGptCudaTest, WritesASnapshotOfTheAllocator) {
  const auto run = this->run("--memory-snapshot " + path("snapshot.pickle"));
  ASSERT_TRUE(run.is_object());
  EXPECT_GT(std::filesystem::file_size(path("snapshot.pickle")), 1000U);
  EXPECT_GT(run["memory"][0]["reserved_bytes"], 0);
}

#ifdef DRIVER_STAND_IN
// The stand-in is a libcuda.so.1 that notes who loads it; whoever asks CUDA anything does.
TEST_F(TrainGptTest, LoadsTheDriverInItsRanksOnly) {
  const Outcome outcome =
      shell("ZEROPAGE_DRIVER_LOG=" + path("loads") + " LD_LIBRARY_PATH=" DRIVER_STAND_IN " " +
            train_gpt_program() + " " + tiny("--device cpu --ranks 2"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  std::ifstream log(path("loads"));
  std::vector<int> parents;
  for (int pid = 0, parent = 0; log >> pid >> parent;) parents.push_back(parent);
  // Two ranks of one launcher: loaded before the fork it would be there once, for a child of the shell.
  ASSERT_EQ(parents.size(), 2U);
  EXPECT_EQ(parents[0], parents[1]);
}
#endif

}  // namespace
}  // namespace train_gpt_cuda_test
