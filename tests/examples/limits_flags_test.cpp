// train_gpt below limits of memory: what it chooses, what it refuses, and that the bits stay.
#include <filesystem>

#include "tests/examples/train_gpt_run.h"

namespace limits_flags_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

class LimitsFlagsTest : public TrainGptTest {};

const std::string kModel = "--d-model 192 --ranks 2 ";

TEST_F(LimitsFlagsTest, ChooseASettingThatKeepsBelowThemWithTheSameBits) {
  const auto plain = run(kModel + "--stage 0");
  const auto plain_peak = plain["memory"][0]["peak_bytes"].get<int64_t>();
  EXPECT_EQ(plain["fits"], "");
  for (const int64_t limit : {8 * plain_peak, plain_peak * 4 / 5}) {
    const auto fitted = run(kModel + "--device-memory " + std::to_string(limit) + "B");
    EXPECT_THAT(fitted["fits"].get<std::string>(), HasSubstr("stage "));
    EXPECT_LE(fitted["memory"][0]["peak_bytes"], limit) << fitted["fits"];
    EXPECT_EQ(fitted["weights_sha256"], plain["weights_sha256"]) << fitted["fits"];
  }
  // A state says what was chosen.
  run(kModel + "--host-memory 20GiB --save-async off --save " + path("states"));
  EXPECT_EQ(shell("grep -rqa '\"fits\"' " + path("states")).exit_code, 0);
  // What the command line says itself stays.
  EXPECT_EQ(run(kModel + "--stage 2 --host-memory 20GiB")["flags"]["stage"], 2);
  EXPECT_EQ(run("--checkpoint-activations blocks --host-memory 20GiB --communicator simulated")
                ["flags"]["checkpoint-activations"],
            "blocks");
}

TEST_F(LimitsFlagsTest, AreKeptWhereRanksShareSamplesOrExperts) {
  const std::string model = "--d-model 64 --sequence 256 --batch 8 --layers 4 --ranks 2 ";
  for (const std::string shared :
       {"--context 2 ", "--context 2 --context-form ulysses ",
        "--experts 4 --active 4 --expert-hidden 128 --expert-parallel 2 "}) {
    SCOPED_TRACE(shared);
    const auto plain = run(model + shared + "--stage 0");
    const int64_t limit = plain["memory"][0]["peak_bytes"].get<int64_t>() * 3 / 4;
    const auto fitted = run(model + shared + "--device-memory " + std::to_string(limit) + "B");
    EXPECT_LE(fitted["memory"][0]["peak_bytes"], limit) << fitted["fits"];
    EXPECT_NE(fitted["fits"], "");
    EXPECT_EQ(fitted["weights_sha256"], plain["weights_sha256"]) << fitted["fits"];
  }
  expect_refused(train_gpt("--ranks 2 --experts 4 --expert-parallel 2 --expert-travel auto "
                           "--device-memory 8GiB"),
                 "a plan of what fits has tokens that travel");
}

TEST_F(LimitsFlagsTest, AreRefusedBeforeTheFirstStepWhereNothingFits) {
  const Outcome outcome = train_gpt(tiny(kModel + "--device-memory 64KiB"));
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("no setting keeps below the limits of memory"));
  EXPECT_THAT(outcome.output, HasSubstr("nothing fits; nearest: stage "));
  const Outcome host = train_gpt(tiny("--host-memory 100MB"));
  EXPECT_EQ(host.exit_code, 1) << host.output;
  EXPECT_THAT(host.output, HasSubstr("for code, libraries and kernels alone; raise it"));
}

// Tensors alone would fit below 300 MiB with selective checkpointing, and an H100 ran out of memory so: beside 243 MiB of them its
// matrix products keep 65 MiB.
TEST_F(LimitsFlagsTest, LeaveRoomForWhatMatrixProductsKeepOnADevice) {
  const std::string model =
      "--communicator simulated --ranks 1 --d-model 256 --layers 4 --heads 4 --sequence 128 "
      "--batch 64 "
      "--compute-dtype bf16 --steps 2 --device-memory 300MiB --stage 0 ";
  const std::string cuda = model + "--device cuda ";
  const auto said = [&](const std::string& flags) {
    const Outcome outcome = train_gpt(tiny(flags));
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return outcome.output;
  };
  EXPECT_THAT(said(model), HasSubstr("fits: stage 0, checkpoint selective; "));
  EXPECT_THAT(said(cuda), HasSubstr("fits: stage 0, checkpoint blocks; "));
  EXPECT_THAT(said(cuda), HasSubstr(" reserved on device"));
  const auto memory = run(cuda)["memory"][0];
  EXPECT_LE(memory["reserved_bytes"], int64_t{300} << 20);
  EXPECT_GE(memory["reserved_bytes"], memory["peak_bytes"]);
  // Who wants that policy nonetheless has the optimizer's states elsewhere.
  EXPECT_THAT(said(cuda + "--checkpoint-activations selective"),
              HasSubstr("fits: stage 0, optimizer on host, checkpoint selective; "));
}

TEST_F(LimitsFlagsTest, AreRefusedInOneLineWhereTheyMakeNoSense) {
  const auto refused = [&](const std::string& flags, const std::string& words) {
    expect_refused(train_gpt(tiny(flags)), words);
  };
  refused("--device-memory 80G", "80GB, which is 80000000000 bytes, or 80GiB, which is");
  for (const char* flag : {"--page-bytes 64M", "--checkpoint-activations budget:64M",
                           "--host-memory 8GiB --nvme /tmp --nvme-size 64M"}) {
    refused(flag, "64MB, which is 64000000 bytes, or 64MiB, which is");
  }
  refused("--host-memory much", "expected a size such as 4096, 64KiB, 80GiB or 80GB");
  refused("--nvme /tmp", "is what may be used below --device-memory or --host-memory");
  refused("--host-memory 8GiB --nvme-size 1GB", "of no folder; use --nvme DIR");
  refused("--host-memory 8GiB --offload-optimizer host", "is chosen below --device-memory");
  refused("--host-memory 8GiB --offload-activations host", "is in no plan of what fits");
  refused("--host-memory 8GiB --checkpoint-activations budget:1MB", "is in no plan of what fits");
  refused("--host-memory 8GiB --save " + path("states"), "use --save-async off");
  refused("--host-memory 8GiB --ranks 2 --tensor 2", "is in no plan of what fits");
}

}  // namespace
}  // namespace limits_flags_test
