// tools/check_safetensors.py: others read what state/ writes. CHECK_SAFETENSORS is how it is called.
#include "tests/examples/train_gpt_run.h"
#include "tests/harness/small_states.h"

namespace check_safetensors_test {
namespace {

using namespace zeropage::testing;
using namespace zeropage::state;
using ::testing::AllOf;
using ::testing::HasSubstr;

class CheckSafetensorsTest : public ::testing::Test {
 protected:
  static Outcome check(const std::filesystem::path& state, const std::string& flags = "") {
    return shell(CHECK_SAFETENSORS " --without-torch " + state.string() + " " + flags);
  }
  Outcome check_saved(const SmallState& state) const {
    save(state, state_);
    return check(state_);
  }
  // Exit code 1, and a last line with the words.
  static void expect_wrong(const Outcome& outcome, const std::string& words) {
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("check_safetensors: " + words));
  }

  const StateScratch scratch_;
  const std::filesystem::path state_ = scratch_ / "step-20";
};

TEST_F(CheckSafetensorsTest, TheReferenceLibraryReadsAndWritesWhatWeWrite) {
  save(trained_state(20), state_);
  const Outcome outcome = check(state_, "--round-trip");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("step 20, read by safetensors "), HasSubstr("     4 tensors "),
                    HasSubstr("    13 tensors "), HasSubstr(" MB/s, round trip\n"),
                    HasSubstr("parameters with state       4 of 4\n"),
                    HasSubstr("bits and checksums are right\n")));
}

TEST_F(CheckSafetensorsTest, EveryDtypeAndEmptyTensorsAndOddNamesAreRead) {
  SmallState odd;
  for (const Dtype dtype :
       {Dtype::kBool, Dtype::kU8, Dtype::kI8, Dtype::kI16, Dtype::kU16, Dtype::kF16, Dtype::kBF16,
        Dtype::kI32, Dtype::kU32, Dtype::kF32, Dtype::kI64, Dtype::kU64, Dtype::kF64}) {
    odd.weights.push_back({name_of(dtype), {3}, std::string(3 * size_of(dtype), '\1'), dtype});
  }
  odd.weights.push_back({"empty", {0, 7}, ""});
  odd.weights.push_back({"\u00e9 \"\\\n", {}, "abcd"});
  save(odd, state_);
  const Outcome outcome = check(state_, "--round-trip");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

TEST_F(CheckSafetensorsTest, ChecksumsAreComputedApart) {
  const std::vector<float> values((1 << 20) / sizeof(float) + 7, 1.5F);
  save({.weights = {{"w", {values.size()}, bytes_of_values(values)}}}, state_);
  EXPECT_EQ(check(state_).exit_code, 0);
  std::string bytes = bytes_in(state_ / kWeightsFile);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  put_bytes(state_ / kWeightsFile, bytes);
  expect_wrong(check(state_), "weights.safetensors: block 1: CRC-32C: expected ");
  std::string manifest = bytes_in(state_ / kManifestFile);
  put_bytes(state_ / kManifestFile,
            manifest.replace(manifest.find("\"step\": 20"), 10, "\"step\": 30"));
  expect_wrong(check(state_), "manifest.json: checksum: expected ");
}

TEST_F(CheckSafetensorsTest, StatesOfAParameterHaveItsShape) {
  SmallState state = trained_state(20);
  state.optimizer[1].shape = {3, 4};
  expect_wrong(check_saved(state),
               "optimizer.safetensors: wte.weight: shape of exp_avg: expected [4, 3], got [3, 4]");
  state = trained_state(20);
  state.optimizer[0].dtype = Dtype::kF64;
  expect_wrong(check_saved(state),
               "optimizer.safetensors: wte.weight: dtype of step: expected I64, got F64");
  state = trained_state(20);
  state.optimizer.erase(state.optimizer.begin() + 1);
  expect_wrong(check_saved(state), "optimizer.safetensors: blocks.0.out.weight: states: expected ");
  state = trained_state(20);
  state.optimizer[0].name = "other:step";
  expect_wrong(check_saved(state),
               "optimizer.safetensors: other: expected a parameter of the manifest's groups");
}

TEST_F(CheckSafetensorsTest, NamesLeadToTensors) {
  SmallState state = trained_state(20);
  state.metadata["head.weight"] = "none";
  expect_wrong(check_saved(state),
               "weights.safetensors: tied head.weight: expected another tensor");
  state = trained_state(20);
  state.content["optimizer"]["groups"][0]["parameters"].push_back("none");
  expect_wrong(check_saved(state),
               "manifest.json: group 0: expected parameters of the weights, got none");
}

TEST_F(CheckSafetensorsTest, WhatIsNoStateIsSaidInOneLine) {
  for (const char* bytes : {"", "{}", "[1, 2]"}) {
    put_bytes(scratch_ / "manifest.json", bytes);
    expect_wrong(check(scratch_.path()), "");
    EXPECT_EQ(std::ranges::count(check(scratch_.path()).output, '\n'), 1);
  }
  expect_wrong(check(scratch_ / "none"), "[Errno 2] No such file");
  EXPECT_EQ(shell(CHECK_SAFETENSORS " --often").exit_code, 2);
}

}  // namespace
}  // namespace check_safetensors_test
