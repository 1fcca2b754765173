// train_gpt whose optimizer state, gradients and parameters leave the device.
#include <filesystem>

#include "tests/examples/train_gpt_run.h"

namespace offload_flags_test {
namespace {

using namespace zeropage::testing;

class OffloadFlagsTest : public TrainGptTest {
 protected:
  void SetUp() override {
    TrainGptTest::SetUp();
    std::filesystem::create_directories(disk_);
  }
  void TearDown() override {
    EXPECT_TRUE(std::filesystem::is_empty(disk_)) << disk_;
    std::filesystem::remove_all(disk_);
    TrainGptTest::TearDown();
  }

  // In the build's: /tmp may be in memory.
  const std::filesystem::path disk_ =
      std::filesystem::current_path() / ("offload-flags-test-" + std::to_string(::getpid()));
  const std::string nvme = "nvme:" + disk_.string();
};

TEST_F(OffloadFlagsTest, AreSimulatedToTheByte) {
  const std::string model = "--layers 3 --d-model 64 --page-bytes 32KiB --ranks 2 ";
  for (const std::string offload :
       {"--stage 1 --offload-optimizer host", "--stage 2 --offload-optimizer host --accumulate 2",
        "--stage 3 --offload-optimizer host --offload-parameters host",
        "--stage 2 --offload-optimizer host --compute-dtype bf16"}) {
    const auto real = run(model + offload);
    const auto simulated = run(model + offload + " --communicator simulated");
    EXPECT_EQ(simulated["memory"][0]["offloaded"]["host"], real["memory"][0]["offloaded"]["host"])
        << offload;
    EXPECT_EQ(simulated["wire_bytes"], real["wire_bytes"]) << offload;
  }
  const auto on_nvme = run(model + "--stage 3 --communicator simulated --offload-optimizer " +
                           nvme + " --offload-parameters " + nvme);
  const auto& away = on_nvme["memory"][0]["offloaded"];
  EXPECT_GT(away["nvme"]["optimizer_state"], 0);
  EXPECT_GT(away["nvme"]["parameter"], 0);
  EXPECT_GT(away["host"]["gradient"], 0);
}

TEST_F(OffloadFlagsTest, ChangeNoBitAndHoldWhatTheFormulaSays) {
  const std::string model = "--layers 2 --d-model 64 --sequence 32 --ranks 2 ";
  const auto plain = run(model + "--stage 0");
  for (const std::string offload :
       {"--stage 1 --offload-optimizer host",
        "--stage 2 --offload-optimizer host --offload-step backward",
        "--stage 2 --clip-norm 1e6 --accumulate 1 --offload-optimizer host",
        "--stage 3 --offload-optimizer host --offload-parameters host"}) {
    const auto run = this->run(model + offload);
    EXPECT_EQ(run["weights_sha256"], plain["weights_sha256"]) << offload;
    for (const auto& of_rank : run["memory"]) {
      const auto& offloaded = of_rank["offloaded"];
      // Gradients that go as soon as their page is updated are not in the formula.
      const bool pass = offload.find("--offload-step backward") != std::string::npos;
      const auto held = offloaded["host_bytes"].get<int64_t>() -
                        (pass ? offloaded["host"]["gradient"].get<int64_t>() : 0);
      EXPECT_LE(held, 1.02 * offloaded["host_formula_bytes"].get<double>());
      // Without the gradient, whose shard is rounded up, the last rank may have less than an equal part.
      const double least = pass ? 0.999 : 1;
      EXPECT_GE(held, least * offloaded["host_formula_bytes"].get<double>());
      EXPECT_LE(of_rank["persistent_bytes"], 1.02 * of_rank["formula_bytes"].get<double>());
    }
  }
  const auto on_disk =
      run(model + "--stage 3 --offload-optimizer " + nvme + " --offload-parameters " + nvme);
  EXPECT_EQ(on_disk["weights_sha256"], plain["weights_sha256"]);
  const auto& offloaded = on_disk["memory"][0]["offloaded"];
  EXPECT_LE(offloaded["nvme_bytes"], 1.02 * offloaded["nvme_formula_bytes"].get<double>());
}

TEST_F(OffloadFlagsTest, SayThatALateStepIsAnotherRun) {
  const Outcome late = train_gpt(tiny("--offload-optimizer host --offload-step late"));
  EXPECT_EQ(late.exit_code, 0) << late.output;
  EXPECT_THAT(late.output, ::testing::HasSubstr("every update came one step late"));
}

TEST_F(OffloadFlagsTest, AreRefusedWhereTheyMakeNoSense) {
  expect_refused(train_gpt("--offload-optimizer disk"), "expected none, host or nvme:DIR");
  expect_refused(train_gpt("--offload-parameters host --offload-optimizer host --stage 2"),
                 "keeps parameters whole on the device; use --stage 3");
  expect_refused(train_gpt("--offload-parameters host --stage 3"), "use --offload-optimizer too");
  expect_refused(train_gpt("--offload-step late"), "are about what is offloaded");
  expect_refused(train_gpt("--stage 3 --offload-optimizer host --offload-parameters host "
                           "--offload-step late"),
                 "--offload-step late: updates beside the next forward");
  const Outcome in_memory = train_gpt(tiny("--offload-optimizer nvme:/dev/shm"));
  EXPECT_EQ(in_memory.exit_code, 1);
  EXPECT_THAT(in_memory.output, ::testing::HasSubstr("tmpfs"));
}

}  // namespace
}  // namespace offload_flags_test
