// The command lines that users type, as they type them: exit codes, one-line errors, the JSON, the
// launchers.
#include <set>

#include "tests/examples/train_gpt_run.h"

namespace train_gpt_test {
namespace {

using namespace zeropage::testing;
using ::testing::HasSubstr;

TEST_F(TrainGptTest, RefusesBadCommandLinesInOneLine) {
  expect_refused(train_gpt("--no-such-flag 1"), "--no-such-flag");
  expect_refused(train_gpt("--stage 7"), "expected 0, 1, 2 or 3");
  expect_refused(train_gpt("--lr nan"), "--lr nan");
  expect_refused(train_gpt("--ranks 0"), "--ranks");
  expect_refused(train_gpt("--heads 3 --d-model 32"), "does not divide --d-model 32");
  expect_refused(train_gpt("--optimizer rprop"), "--optimizer");
  expect_refused(train_gpt("--peak-tflops -1"), "--peak-tflops -1: expected a number > 0");
  expect_refused(train_gpt("--page-bytes 3"), "expected 4.0 KiB or more");
  expect_refused(train_gpt("--stage 3 --parameter-budget some"), "--parameter-budget");
  expect_refused(train_gpt("--stage 2 --parameter-budget 1MiB"), "only stage 3 shards parameters");
  expect_refused(train_gpt("--stage 1 --prefetch off"), "only stage 3 fetches parameters");
  expect_refused(train_gpt("--stage 3 --prefetch maybe"), "--prefetch");
  expect_refused(train_gpt("--deferred perhaps"), "--deferred");
}

TEST_F(TrainGptTest, RefusesCudaWithTheReasonWhereThereIsNone) {
  const std::string hidden = "CUDA_VISIBLE_DEVICES= " TRAIN_GPT " ";
  expect_refused(shell(hidden + "--device cuda --ranks 2 --steps 1"), "CUDA");
  expect_refused(shell(hidden + "--memory-snapshot x"),
                 "--memory-snapshot: is of CUDA's allocator");
  expect_refused(shell(hidden + "--communicator nccl"), "moves tensors between CUDA devices");
}

// In every build: who asks for a driver notes it, with or without one.
TEST_F(TrainGptTest, AsksNoDriverBeforeItForksItsRanks) {
  const Outcome outcome =
      shell("ZEROPAGE_STRICT_FORK=1 " + train_gpt_program() + " " + tiny("--device cpu --ranks 2"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

TEST_F(TrainGptTest, TrainsInBfloat16WithMasterWeightsToTheSameBitsAtEveryStage) {
  std::string first;
  for (const int stage : {0, 1, 2, 3}) {
    const Outcome outcome =
        train_gpt(tiny("--ranks 2 --compute-dtype bf16 --stage " + std::to_string(stage)));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    const auto run = json();
    if (first.empty()) first = run["weights_sha256"];
    EXPECT_EQ(run["weights_sha256"], first) << "stage " << stage;
    const auto& memory = run["memory"][0];
    EXPECT_GT(memory["at_peak"]["master_weights"], 0);
    // Slots of 64 bytes and shards of 256 elements weigh on so small a model.
    EXPECT_NEAR(memory["persistent_bytes"].get<double>(), memory["formula_bytes"].get<double>(),
                0.1 * memory["formula_bytes"].get<double>());
  }
}

TEST_F(TrainGptTest, TrainsWithSmallStatesToTheSameBitsAtEveryStage) {
  std::string first;
  for (const int stage : {0, 1, 3}) {
    const Outcome outcome = train_gpt(
        tiny("--ranks 2 --compute-dtype bf16 --low-precision-update split --optimizer-state 8bit "
             "--stage " +
             std::to_string(stage)));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    if (first.empty()) first = json()["weights_sha256"];
    EXPECT_EQ(json()["weights_sha256"], first) << "stage " << stage;
    EXPECT_EQ(json()["flags"]["optimizer-state"], "8bit");
  }
}

TEST_F(TrainGptTest, TellsTheUtilisationOfAPeakThatIsKnown) {
  const Outcome outcome = train_gpt(tiny("--peak-tflops 0.5 --optimizer lion"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("MFU "));
  const auto run = json();
  const double flops = 6 * run["parameters"].get<double>() + 12 * 2 * 32 * 32;
  EXPECT_NEAR(run["mfu"].get<double>(), run["tokens_per_second"].get<double>() * flops / 0.5e12,
              1e-9);
  ASSERT_EQ(train_gpt(tiny("")).exit_code, 0);
  EXPECT_FALSE(json().contains("mfu")) << "a CPU's peak is not known";
}

TEST_F(TrainGptTest, HasOneHashOfOptimizersOfWholeTensorsAtEveryStage) {
  for (const std::string optimizer : {"muon", "lamb", "adafactor"}) {
    std::set<std::string> hashes;
    for (const std::string setting :
         {"--ranks 1 --accumulate 2", "--ranks 2 --stage 0", "--ranks 2 --stage 3"}) {
      const Outcome outcome =
          train_gpt(tiny("--world-invariant --optimizer " + optimizer + " " + setting));
      ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
      hashes.insert(json()["weights_sha256"].get<std::string>());
    }
    EXPECT_EQ(hashes.size(), 1U) << optimizer;
  }
}

TEST_F(TrainGptTest, RefusesDataThatItCannotTrainOn) {
  expect_refused(train_gpt("--data /no/such/file"), "/no/such/file: cannot be read");
  std::ofstream(path("empty.txt"));
  expect_refused(train_gpt("--data " + path("empty.txt")), "is empty");
  std::ofstream(path("short.txt")) << std::string(100, 'x');
  expect_refused(train_gpt("--sequence 64 --data " + path("short.txt")),
                 "too few for --sequence 64");
}

TEST_F(TrainGptTest, RefusesVariablesThatContradictEachOther) {
  expect_refused(shell("RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29999 " TRAIN_GPT),
                 "contradict each other");
  expect_refused(shell("RANK=0 " TRAIN_GPT), "WORLD_SIZE is not");
  expect_refused(
      shell("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29999 " TRAIN_GPT " --ranks 3"),
      "started 2 ranks");
}

TEST_F(TrainGptTest, WritesEveryFigure) {
  const Outcome outcome = train_gpt(tiny("--ranks 2 --sample 10"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("held-out loss"));
  EXPECT_THAT(outcome.output, HasSubstr("optimizer_state"));
  EXPECT_THAT(outcome.output, HasSubstr("sample, after the |:"));
  const nlohmann::json json = this->json();
  EXPECT_EQ(json["loss"].size(), 3U);
  EXPECT_EQ(json["step_seconds"].size(), 3U);
  EXPECT_EQ(json["flags"]["ranks"], 2);
  EXPECT_EQ(json["flags"]["compute-dtype"], "fp32");
  EXPECT_GT(json["tokens_per_second"], 0);
  EXPECT_EQ(json["weights_sha256"].get<std::string>().size(), 64U);
  ASSERT_EQ(json["memory"].size(), 2U);
  for (const auto& rank : json["memory"]) {
    EXPECT_GT(rank["rss_peak_bytes"], rank["rss_base_bytes"]);
    EXPECT_LE(rank["persistent_bytes"], 1.2 * rank["formula_bytes"].get<double>())
        << "padding of a tiny model";
    EXPECT_GE(rank["peak_bytes"], rank["persistent_bytes"]);
  }
  EXPECT_FALSE(json.contains("paging"));
}

TEST_F(TrainGptTest, GivesTheSameWeightsAtEveryStageAndPageSize) {
  std::string first;
  for (const char* more :
       {"--stage 0", "--stage 1", "--stage 1 --page-bytes 4KiB", "--stage 0 --page-bytes 64KiB",
        "--stage 2", "--stage 2 --page-bytes 4KiB --deferred on", "--stage 3",
        "--stage 3 --deferred off", "--stage 3 --page-bytes 4KiB",
        "--stage 3 --page-bytes 8KiB --prefetch off",
        "--stage 3 --page-bytes 8KiB --parameter-budget 60KiB",
        "--stage 3 --page-bytes 8KiB --parameter-budget 1MiB"}) {
    const Outcome outcome = train_gpt(tiny(std::string("--ranks 3 ") + more));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    const std::string hash = json()["weights_sha256"];
    if (first.empty()) first = hash;
    EXPECT_EQ(hash, first) << more;
  }
}

TEST_F(TrainGptTest, HasTheSameNormsAndClippedWeightsForAnyPageSize) {
  const auto one_page = run("--ranks 2 --stage 1 --clip-norm 0.1 --page-bytes 4MiB");
  const auto many = run("--ranks 2 --stage 3 --clip-norm 0.1 --page-bytes 4KiB");
  for (const char* key : {"gradient_norm", "weights_sha256"}) EXPECT_EQ(many[key], one_page[key]);
}

TEST_F(TrainGptTest, RaisesItsLearningRateInEqualParts) {
  const auto first_of_four = run("--steps 1 --warmup-steps 4 --lr 0.004");
  EXPECT_EQ(first_of_four["weights_sha256"],
            run("--steps 1 --warmup-steps 0 --lr 0.001")["weights_sha256"]);
  EXPECT_EQ(run("--steps 2 --warmup-steps 1")["weights_sha256"],
            run("--steps 2 --warmup-steps 0")["weights_sha256"]);
  EXPECT_NE(run("--steps 2 --warmup-steps 2")["weights_sha256"],
            run("--steps 2 --warmup-steps 0")["weights_sha256"]);
}

TEST_F(TrainGptTest, EndsAfterSoManySecondsAsItsFirstStepsSay) {
  const auto ended = run("--ranks 2 --steps 1000000 --seconds 0.5");
  EXPECT_GE(ended["loss"].size(), 5U);
  EXPECT_LT(ended["loss"].size(), 100000U);
  // At --steps at the latest, and not before its first steps told anything.
  EXPECT_EQ(run("--steps 7 --seconds 3600")["loss"].size(), 7U);
  EXPECT_EQ(run("--steps 7 --seconds 1e-9")["loss"].size(), 5U);
  expect_refused(train_gpt("--seconds -1"), "--seconds -1: expected a finite number >= 0");
  expect_refused(train_gpt("--seconds 1 --report r.json"), "say with --profile-steps");
}

TEST_F(TrainGptTest, SaysWhatPagingCost) {
  const Outcome outcome = train_gpt(tiny("--ranks 2 --stage 3 --page-bytes 16KiB"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("step 1 (recorded)"));
  EXPECT_THAT(outcome.output, HasSubstr("later steps, mean"));
  const nlohmann::json paging = json()["paging"];
  const nlohmann::json by_step = json()["paging_by_step"];
  ASSERT_EQ(by_step.size(), 3U);
  EXPECT_EQ(by_step[0]["prefetched"], 0);
  EXPECT_EQ(by_step[2]["faults"], 1);
  EXPECT_GT(by_step[2]["prefetched"], 2);
  EXPECT_GT(paging["bytes_gathered"], 3 * 4 * json()["parameters"].get<int64_t>());
  EXPECT_GT(paging["wait_seconds"], 0);
  EXPECT_EQ(paging["evictions"], paging["faults"].get<int>() + paging["prefetched"].get<int>());
}

TEST_F(TrainGptTest, RefusesABudgetThatNoPageFits) {
  const Outcome outcome = train_gpt(tiny("--ranks 2 --stage 3 --parameter-budget 4KiB"));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("options.parameter_budget_bytes is 4.0 KiB"));
}

TEST_F(TrainGptTest, SendsTheFormulasBytes) {
  ASSERT_EQ(train_gpt(tiny("--ranks 2 --stage 1 --d-model 64")).exit_code, 0);
  const nlohmann::json json = this->json();
  const double gradient_bytes = 4.0 * json["parameters"].get<double>();
  for (const auto& rank : json["wire_bytes"]) {
    // (N-1)/N of the gradients and of the parameters in each of three steps, and the padding of one
    // small page.
    EXPECT_NEAR(rank["reduce_scatter"].get<double>(), 3 * gradient_bytes / 2,
                0.005 * 3 * gradient_bytes / 2);
    // The norm, the weight, three numbers that ranks compare, what gradients were multiplied by, and a word of flags go along.
    constexpr int64_t kAgreementBytes = 8 * (2 * 69 + 3 + 1 + 1);
    EXPECT_EQ(rank["all_gather"].get<int64_t>(),
              rank["reduce_scatter"].get<int64_t>() + 3 * kAgreementBytes);
  }
}

class SimulationTest : public TrainGptTest,
                       public ::testing::WithParamInterface<std::pair<std::string, std::string>> {};

TEST_P(SimulationTest, TellsWhatTheRealRanksSend) {
  const auto [real_world, simulated_world] = GetParam();
  for (const char* stage : {"0", "3"}) {
    const std::string flags = tiny(std::string("--ranks 2 --page-bytes 16KiB --stage ") + stage);
    ASSERT_EQ(train_gpt(flags + real_world).exit_code, 0);
    const nlohmann::json real = json();
    const Outcome outcome = train_gpt(flags + " --communicator simulated" + simulated_world);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_EQ(json()["wire_bytes"], real["wire_bytes"]) << stage;
    EXPECT_EQ(json()["wire_messages"], real["wire_messages"]) << stage;
    EXPECT_EQ(json()["parameters"], real["parameters"]);
    for (const size_t rank : {0, 1}) {
      for (const char* figure : {"formula_bytes", "persistent_bytes"}) {
        EXPECT_EQ(json()["memory"][rank][figure], real["memory"][rank][figure]) << stage << figure;
      }
    }
  }
}

using Worlds = std::pair<std::string, std::string>;

INSTANTIATE_TEST_SUITE_P(Worlds, SimulationTest,
                         ::testing::Values(Worlds(" --communicator gloo", " --ranks-per-host 1"),
                                           Worlds(" --communicator shared", ""), Worlds("", "")));

TEST_F(TrainGptTest, SaysWhatCarriedTheBytes) {
  for (const auto& [flag, carrier] :
       {std::pair("auto", "shared"), std::pair("shared", "shared"), std::pair("gloo", "gloo")}) {
    const Outcome outcome = train_gpt(tiny(std::string("--ranks 2 --communicator ") + flag));
    EXPECT_THAT(outcome.output, HasSubstr(std::string("on 2 ranks (") + carrier + ")"));
    EXPECT_EQ(json()["communicator"], carrier);
  }
}

TEST_F(TrainGptTest, SimulatesTheEndsOfALargeWorld) {
  const Outcome outcome = train_gpt(
      tiny("--communicator simulated --ranks 1024 --ranks-per-host 8 --between-hosts 50 100"));
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("sent a step by rank 1023"));
  EXPECT_THAT(outcome.output, HasSubstr("reduce_scatter"));
  const nlohmann::json simulated = json()["simulated"];
  ASSERT_EQ(simulated.size(), 2U);
  EXPECT_EQ(simulated[1]["rank"], 1023);
  EXPECT_GT(simulated[1]["all_gather"]["seconds"], 0);
  // 7 of 1023 foreign slices come from this host; on each of 127 others one rank gets ours: slices of the
  // parameters, and of what ranks agree on in the step.
  EXPECT_EQ(simulated[1]["all_gather"]["between_hosts"]["messages"], 2 * 3 * 127);
  EXPECT_EQ(simulated[1]["all_gather"]["within_host"]["messages"], 2 * 3 * 7 * 128);
}

// Each buffer of a page is as large as a segment, and a bit; the parameters of a module that was there before leave
// holes between them.
TEST_F(TrainGptTest, SimulatesWhatAnAllocatorOfCudaReserves) {
  const std::string model =
      "--communicator simulated --device cuda --d-model 1024 --layers 4 --heads 16 --sequence 256 "
      "--compute-dtype bf16 ";
  const auto deferred = run(model);
  const auto moved = run(model + "--deferred off");
  for (const auto& json : {deferred, moved}) {
    const auto& memory = json["memory"][0];
    EXPECT_EQ(json["flags"]["page-bytes"], int64_t{64} << 20);
    EXPECT_EQ(memory["peak_bytes"], deferred["memory"][0]["peak_bytes"]);
    EXPECT_GE(memory["reserved_bytes"], memory["peak_bytes"]);
    EXPECT_LE(memory["reserved_bytes"], memory["peak_bytes"].get<int64_t>() + (int64_t{40} << 20));
    EXPECT_GT(memory["reserved_fixed_bytes"], memory["reserved_bytes"]);
  }
  EXPECT_GE(moved["memory"][0]["reserved_fixed_bytes"],
            deferred["memory"][0]["reserved_fixed_bytes"]);
  EXPECT_FALSE(run("--communicator simulated")["memory"][0].contains("reserved_bytes"));
}

TEST_F(TrainGptTest, RefusesToSimulateWhatNeedsValuesOrOtherRanks) {
  const std::string simulated = "--communicator simulated ";
  expect_refused(train_gpt(simulated + "--sample 10"), "--sample: writes text");
  expect_refused(train_gpt(simulated + "--data some.txt"), "--data: reads text");
  expect_refused(train_gpt(simulated + "--deadline 1"), "--deadline: waits for ranks");
  expect_refused(train_gpt(simulated + "--deferred off"), "--deferred: off");
  expect_refused(train_gpt("--ranks-per-host 2"), "only a simulated run has it");
  expect_refused(train_gpt("--communicator pigeon"), "--communicator");
  expect_refused(
      shell("RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29999 " TRAIN_GPT " " +
            simulated),
      "start it without a launcher");
}

TEST_F(TrainGptTest, EndsWithOneLineWhenTheLossIsNoLongerANumber) {
  const Outcome outcome = train_gpt(tiny("--lr 1e30 --optimizer sgd --steps 20"));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("training cannot go on, lower --lr"));
  EXPECT_THAT(outcome.output, ::testing::Not(HasSubstr("frame #")));
}

TEST_F(TrainGptTest, ReportsAJsonPathThatCannotBeWrittenBeforeTheFirstStep) {
  const Outcome outcome = train_gpt(tiny("--json /no/such/folder/out.json"));
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.output, ::testing::Not(HasSubstr("step ")));
  EXPECT_THAT(outcome.output, HasSubstr("/no/such/folder/out.json: cannot be written"));
}

TEST_F(TrainGptTest, TrainsUnderZpRun) {
  const Outcome outcome = shell(ZP " run -n 2 -- " TRAIN_GPT " " + tiny(""));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("[rank 0] "));
  EXPECT_EQ(json()["memory"].size(), 2U);
}

TEST_F(TrainGptTest, TrainsWhenRanksAreStartedByHand) {
  const std::string world = "WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29871 ";
  const Outcome outcome = shell("RANK=1 " + world + TRAIN_GPT + " " + tiny("") + " & RANK=0 " +
                                world + TRAIN_GPT + " " + tiny("") + " && wait $!");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(json()["memory"].size(), 2U);
}

TEST_F(TrainGptTest, NamesRanksThatWereStartedWithDifferentModels) {
  const std::string world = "WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29873 ";
  const Outcome outcome = shell("RANK=1 " + world + TRAIN_GPT + " " + tiny("--layers 3") +
                                " & RANK=0 " + world + TRAIN_GPT + " " + tiny("") + "; wait $!");
  EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("the wrapped model differs between ranks"));
  EXPECT_THAT(outcome.output, HasSubstr("blocks.2"));
}

TEST(OptionsPageTest, NamesFlagsThatTheProgramsHave) {
  const std::string of_train_gpt = train_gpt("--help").output;
  const std::string of_zp = shell(std::string(ZP) + " run --help").output;
  std::ifstream page(OPTIONS_PAGE);
  bool is_launched = false;
  int flags = 0;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("## ")) is_launched = line == "## LaunchOptions";
    const size_t begin = line.rfind("| `--");
    if (begin == std::string::npos) continue;
    const std::string flag = line.substr(begin + 3, line.find('`', begin + 3) - begin - 3);
    EXPECT_THAT(is_launched ? of_zp : of_train_gpt,
                ::testing::ContainsRegex("\n  (-n,)?" + flag + "[ \n]"))
        << line;
    ++flags;
  }
  EXPECT_GT(flags, 30);
}

TEST(ExamplesTest, RunAloneAndUnderALauncher) {
  for (const char* program :
       {QUICKSTART, DROP_IN, ZP " run -n 3 -- " DROP_IN, ZP " run -n 2 -- " QUICKSTART}) {
    const Outcome outcome = shell(program);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("step 200")) << program;
  }
}

// The same batch over all ranks.
TEST(ExamplesTest, CookbookLoopOfADropInOptimizerDoesTheSameOnAnyNumberOfRanksAndGoesOn) {
  const std::string folder =
      ::testing::TempDir() + "cookbook-drop-in-" + std::to_string(::getpid());
  std::vector<std::vector<std::string>> lines;
  for (const std::string launcher : {"", ZP " run -n 2 -- "}) {
    std::filesystem::remove_all(folder);
    const Outcome outcome = shell(launcher + COOKBOOK_DROP_IN + " " + folder);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    lines.emplace_back();
    std::istringstream output(outcome.output);
    for (std::string line; std::getline(output, line);) {
      const size_t begin = line.find("step ");
      if (begin != std::string::npos) lines.back().push_back(line.substr(begin));
    }
    EXPECT_EQ(lines.back().size(), 3U) << outcome.output;
  }
  EXPECT_EQ(lines[0], lines[1]);
  const Outcome again = shell(ZP " run -n 4 -- " COOKBOOK_DROP_IN " " + folder);
  EXPECT_EQ(again.exit_code, 0) << again.output;
  EXPECT_THAT(again.output, HasSubstr("goes on from step 60"));
  std::filesystem::remove_all(folder);
}

TEST(ExamplesTest, TellAMistakeInALineAndNotWithAStack) {
  for (const std::string program : {QUICKSTART, DROP_IN}) {
    const Outcome outcome =
        shell("RANK=5 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 " + program);
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    EXPECT_EQ(outcome.output,
              "environment: RANK=5 and WORLD_SIZE=2 contradict each other; ranks go from 0 to 1\n");
  }
}

// The program itself checks that each shape gives the sum.
TEST(ExamplesTest, ShapesOfAllReducePutOnTheBusiestLinkWhatTheirFormulasSay) {
  const std::string picture = ::testing::TempDir() + "shapes.svg";
  const Outcome outcome = shell(SHAPES " --bytes 1MiB --most-ranks 4 --repeats 1 --svg " + picture);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  // A server has N - 1 tensors to take in, a tree log2 N, a ring and halving 2 (N - 1) / N.
  for (const char* kind : {"measured", "modelled"}) {
    EXPECT_THAT(outcome.output, ::testing::ContainsRegex(std::string("    4  ") + kind +
                                                         " +3\\.0 +2\\.0 +1\\.5 +1\\.5 "));
  }
  EXPECT_THAT(outcome.output,
              ::testing::ContainsRegex(" 1024  modelled +1023\\.0 +10\\.0 +2\\.0 +2\\.0 "));
  std::ifstream chart(picture);
  std::string first_line;
  std::getline(chart, first_line);
  EXPECT_THAT(first_line, ::testing::StartsWith("<svg"));
  EXPECT_NE(shell(SHAPES " --bytes 1000").exit_code, 0);
}

}  // namespace
}  // namespace train_gpt_test
