// ResNet-50 over ranks as users run it, with few channels.
#include "tests/examples/train_gpt_run.h"

namespace zeropage::model_parallel_test {
namespace {

using namespace zeropage::testing;

using ::testing::AllOf;
using ::testing::HasSubstr;

class ModelParallelTest : public TrainGptTest {
 protected:
  Outcome tiny_run(const std::string& more, int image_side = 48) const {
    return run_program(MODEL_PARALLEL
                       " --width 4 --classes 10 --batch 4 --steps 1 --rounds 1 --image-side " +
                       std::to_string(image_side) + " " + more);
  }
  nlohmann::json figures(const std::string& name) const {
    return nlohmann::json::parse(std::ifstream(path(name)));
  }
};

TEST_F(ModelParallelTest, TheNaiveWayHasTheBitsOfOneRankAndFilesAreDrawnBesideEachOther) {
  const Outcome run = tiny_run("--split-sizes 1,2 --schedule 1f1b --json " + path("a.json") +
                               " --svg " + path("a.svg"));
  ASSERT_EQ(run.exit_code, 0) << run.output;
  EXPECT_THAT(run.output, AllOf(HasSubstr("batch 4, images of 48 pixels, width 4, 2 ranks"),
                                HasSubstr("split 2")));
  nlohmann::json found = figures("a.json");
  ASSERT_EQ(found["ways"].size(), 4U);
  const double loss = found["ways"][0]["loss"];
  EXPECT_GT(loss, 0);
  EXPECT_EQ(found["ways"][1]["loss"], loss);
  for (size_t way = 0; way < 4; ++way) {
    EXPECT_GT(found["ways"][way]["images_per_second"][0], 0);
    EXPECT_GT(found["ways"][way]["peak_bytes"], 0);
    EXPECT_LT(std::abs(found["ways"][way]["loss"].get<double>() - loss), 1) << way;
  }
  // A micro-batch's batch norm sees fewer images.
  EXPECT_NE(found["ways"][2]["loss"], loss);

  found["name"] = "another";
  std::ofstream(path("b.json")) << found;
  const std::string both = path("a.json") + "," + path("b.json");
  const Outcome drawn = shell(MODEL_PARALLEL " --draw " + both + " --svg " + path("both.svg"));
  EXPECT_EQ(drawn.exit_code, 0) << drawn.output;
  EXPECT_THAT(drawn.output,
              AllOf(HasSubstr("Zeropage, ResNet-50"), HasSubstr("another, ResNet-50")));
  const auto boxes = [&](const std::string& name) {
    std::ifstream file(path(name));
    const std::string picture{std::istreambuf_iterator<char>(file), {}};
    EXPECT_THAT(picture, ::testing::StartsWith("<svg"));
    size_t count = 0;
    for (size_t at = picture.find("<rect"); at != std::string::npos;
         at = picture.find("<rect", at + 1))
      ++count;
    return count;
  };
  // The paper, and for each side a bar of each way, of the best split, and of each split.
  EXPECT_EQ(boxes("a.svg"), 1U + 3 + 2);
  EXPECT_EQ(boxes("both.svg"), 1U + 2 * (3 + 2));

  found["batch"] = 8;
  std::ofstream(path("b.json")) << found;
  const Outcome other = shell(MODEL_PARALLEL " --draw " + both);
  EXPECT_EQ(other.exit_code, 1);
  EXPECT_THAT(other.output, HasSubstr("expected figures of the same runs, got batch 4"));
}

TEST_F(ModelParallelTest, RefusesWhatMakesNoSense) {
  expect_refused(tiny_run("--split-sizes 3"), "--split-sizes 3: expected a divisor of --batch 4");
  expect_refused(tiny_run("--split-sizes 4"), "the whole batch is the naive way");
  expect_refused(tiny_run("--split-sizes 1 --ranks 1"), "--ranks 1: expected 2 or more");
  expect_refused(tiny_run("--split-sizes 2 --ranks 3 --schedule 1f1b"),
                 "schedule 1f1b: expected at least 3 micro-batches");
  expect_refused(tiny_run("--split-sizes 1", 32), "give a larger --image-side");
  expect_refused(tiny_run("--split-sizes 2 --json x --draw x"), "nothing for --json");
  std::ofstream(path("x.json")) << "{}";
  const Outcome outcome = shell(MODEL_PARALLEL " --draw " + path("x.json"));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("expected figures that --json wrote"));
}

}  // namespace
}  // namespace zeropage::model_parallel_test
