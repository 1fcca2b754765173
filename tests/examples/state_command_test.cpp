// `zp state` as users type it.
#include <cmath>

#include "tests/examples/train_gpt_run.h"
#include "tests/harness/small_states.h"
#include "zeropage/saved_state.h"

namespace state_command_test {
namespace {

using namespace zeropage::testing;
using namespace zeropage::state;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class StateCommandTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (scratch_ / name).string(); }

  static Outcome zp(const std::string& arguments) { return shell(ZP " state " + arguments); }
  static Json json_of(const std::string& arguments, int exit_code = 0) {
    const Outcome outcome = zp(arguments + " --json");
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.output;
    return Json::parse(outcome.output);
  }
  // Exit code 1 and one line with the words.
  static void expect_failed(const std::string& arguments, const std::string& words) {
    const Outcome outcome = zp(arguments);
    EXPECT_EQ(outcome.exit_code, 1) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr(words));
    EXPECT_EQ(std::count(outcome.output.begin(), outcome.output.end(), '\n'), 1) << outcome.output;
  }
  std::string map_of(const std::string& text) const {
    put_bytes(scratch_ / "map.json", text);
    return " --names " + path("map.json");
  }

  const StateScratch scratch_;
};

void flip(const std::filesystem::path& file, size_t offset) {
  std::string bytes = bytes_in(file);
  bytes.at(offset) = static_cast<char>(bytes[offset] ^ 1);
  put_bytes(file, bytes);
}

std::string floats(const std::vector<float>& values) {
  return bytes_of_values(values);
}

TEST_F(StateCommandTest, InspectShowsWhatARunsLatestStateHas) {
  save(trained_state(20), scratch_ / "run/step-20");
  save(trained_state(40), scratch_ / "run/step-40", /*update_latest=*/true);
  const Json found = json_of("inspect " + path("run"));
  EXPECT_EQ(found["step"], 40);
  EXPECT_EQ(found["tied"], (Json{{"head.weight", "wte.weight"}}));
  EXPECT_EQ(found["content"]["optimizer"]["updates"], 40);
  ASSERT_EQ(found["files"].size(), 2U);
  const Json& weights = found["files"][0];
  EXPECT_EQ(weights["name"], kWeightsFile);
  EXPECT_EQ(weights["bytes"],
            std::filesystem::file_size(scratch_ / "run/step-40/weights.safetensors"));
  EXPECT_EQ(weights["numel"], 24);
  EXPECT_EQ(weights["numel_by_dtype"], (Json{{"F32", 20}, {"BF16", 4}}));
  EXPECT_EQ(weights["tensors"][0],
            (Json{{"name", "wte.weight"}, {"dtype", "F32"}, {"shape", {4, 3}}, {"bytes", 48}}));
  EXPECT_EQ(found["files"][1]["tensors"].size(), 13U);
}

TEST_F(StateCommandTest, InspectSaysItInWordsToo) {
  save(trained_state(20), scratch_ / "run/step-20");
  const Outcome brief = zp("inspect " + path("run"));
  EXPECT_EQ(brief.exit_code, 0) << brief.output;
  EXPECT_THAT(
      brief.output,
      AllOf(HasSubstr("step-20: step 20\n"), HasSubstr("4 tensors of 24 elements (BF16 4, F32 20)"),
            HasSubstr("tied: head.weight is wte.weight\n"),
            HasSubstr("optimizer: \"torch::optim::AdamW\", updates: 20\n"),
            HasSubstr("group 0: 4 parameters, betas [0.9,0.999], lr 0.001\n"),
            HasSubstr("progress.samples: 640\n"), HasSubstr("random: 1 generator states\n")));
  EXPECT_THAT(brief.output, Not(HasSubstr("[4,3]")));
  const Outcome table = zp("inspect --tensors " + path("run"));
  EXPECT_THAT(table.output,
              HasSubstr("\n  wte.weight           F32   [4,3]            48 bytes\n"));
}

TEST_F(StateCommandTest, InspectTakesAnyContentAndHidesWhatATerminalWouldObey) {
  SmallState odd{.weights = {{"\x1b[2J", {1}, floats({1})}}};
  odd.content = {{"optimizer", 3}, {"progress", {1, 2}}, {"random", "x"}, {"more", nullptr}};
  save(odd, scratch_ / "odd");
  const Outcome outcome = zp("inspect --tensors " + path("odd"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("weights alone"), HasSubstr("\"\\u001b[2J\""),
                                    Not(HasSubstr("\x1b"))));
}

TEST_F(StateCommandTest, VerifyFindsAWholeStateWholeAndSaysHowFast) {
  save(trained_state(20), scratch_ / "run/step-20");
  const Outcome outcome = zp("verify " + path("run"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("as it was written; "), HasSubstr(" GB/s\n")));
  const Json found = json_of("verify " + path("run"));
  EXPECT_EQ(found["whole"], true);
  EXPECT_EQ(found["bytes"],
            std::filesystem::file_size(scratch_ / "run/step-20/weights.safetensors") +
                std::filesystem::file_size(scratch_ / "run/step-20/optimizer.safetensors"));
}

TEST_F(StateCommandTest, VerifyNamesEveryDamagedBlock) {
  SmallState large{.weights = {{"w", {1 << 20}, floats(std::vector<float>(1 << 20, 1.5F))}}};
  save(large, scratch_ / "large");
  flip(scratch_ / "large/weights.safetensors", (1 << 20) + 5);
  flip(scratch_ / "large/weights.safetensors", (3 << 20) + 5);
  const Json found = json_of("verify " + path("large"), 1);
  const Json& damage = found["states"][0]["damage"];
  ASSERT_EQ(damage.size(), 2U);
  EXPECT_EQ(damage[0]["file"], path("large/weights.safetensors"));
  EXPECT_EQ(damage[0]["offset"], 1 << 20);
  EXPECT_EQ(damage[1]["offset"], 3 << 20);
  const Outcome outcome = zp("verify " + path("large"));
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("DAMAGED"), HasSubstr("byte 1048576: expected "),
                                    HasSubstr("CRC-32C "), HasSubstr(", got another one, "),
                                    HasSubstr("weights.safetensors")));
}

TEST_F(StateCommandTest, VerifyAllLooksAtEveryStateOfARun) {
  for (const int step : {20, 40, 60}) {
    save(trained_state(step), scratch_ / ("run/step-" + std::to_string(step)), true);
  }
  std::filesystem::resize_file(scratch_ / "run/step-40/optimizer.safetensors", 4200);
  EXPECT_EQ(json_of("verify " + path("run"))["states"].size(), 1U);
  const Json found = json_of("verify --all " + path("run"), 1);
  ASSERT_EQ(found["states"].size(), 3U);
  EXPECT_EQ(found["states"][0]["whole"], true);
  EXPECT_EQ(found["states"][1]["whole"], false);
  EXPECT_EQ(found["states"][1]["damage"][0]["offset"], 4200);
  EXPECT_EQ(found["states"][2]["whole"], true);
  expect_failed("verify --all " + path("run/step-20"), "expected a run's folder with step-N");
}

TEST_F(StateCommandTest, DiffFindsAStateTheSameAsItsCopy) {
  save(trained_state(20), scratch_ / "a");
  save(trained_state(20), scratch_ / "b");
  EXPECT_EQ(json_of("diff " + path("a") + " " + path("b"))["same"], true);
  const Outcome outcome = zp("diff " + path("a") + " " + path("b"));
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("weights.safetensors: 4 tensors the same"),
                                    HasSubstr("the same, bit by bit\n")));
}

TEST_F(StateCommandTest, DiffCountsTheElementsThatDifferAndHowFar) {
  SmallState a = trained_state(20);
  SmallState b = a;
  b.step = 40;
  b.content["optimizer"]["groups"][0]["options"]["lr"] = 2e-3;
  b.metadata.erase("head.weight");
  b.weights[0].bytes.replace(4, 8, floats({3.125F, 0.0F}));  // 0.125 and 0.25 before
  b.weights[1].shape = {3, 2};
  b.weights[2].name = "blocks.0.out.gain";
  b.weights[3].bytes = bytes_of_values(std::vector<uint16_t>{0x3f80, 0x3f80, 0x7fc0, 0x8000});
  save(a, scratch_ / "a");
  save(b, scratch_ / "b");
  const Json found = json_of("diff " + path("a") + " " + path("b"), 1);
  EXPECT_EQ(found["same"], false);
  EXPECT_EQ(
      found["manifest"],
      (Json::array(
          {{{"path", "step"}, {"a", 20}, {"b", 40}},
           {{"path", "optimizer.groups[0].options.lr"}, {"a", 1e-3}, {"b", 2e-3}},
           {{"path", "weights.metadata.head.weight"}, {"a", "wte.weight"}, {"b", nullptr}}})));
  const Json& weights = found["files"][0];
  EXPECT_EQ(weights["only_in_a"], Json::array({"blocks.0.out.bias"}));
  EXPECT_EQ(weights["only_in_b"], Json::array({"blocks.0.out.gain"}));
  EXPECT_EQ(weights["unlike"][0]["b"], (Json{{"dtype", "F32"}, {"shape", {3, 2}}}));
  ASSERT_EQ(weights["different"].size(), 2U);
  const Json& matrix = weights["different"][0];
  EXPECT_EQ(matrix["different_numel"], 2);
  EXPECT_EQ(matrix["first_index"], 1);
  EXPECT_EQ(matrix["largest_difference"], 3.0);
  // -1 is 1; 2 is NaN; 0 is -0, whose bits differ.
  const Json& half = weights["different"][1];
  EXPECT_EQ(half["different_numel"], 3);
  EXPECT_EQ(half["largest_difference"], 2.0);
  EXPECT_EQ(half["without_distance_numel"], 1);
  EXPECT_EQ(found["files"][1]["same_tensors"], 13);
  const Outcome words = zp("diff " + path("a") + " " + path("b"));
  EXPECT_EQ(words.exit_code, 1);
  EXPECT_THAT(
      words.output,
      AllOf(HasSubstr("step: 20 in A, 40 in B\n"), HasSubstr("blocks.0.out.bias: only in A\n"),
            HasSubstr("F32 [2,3] in A, F32 [3,2] in B\n"),
            HasSubstr("2 of 12 elements differ from index 1 on, by up to 3.0\n"),
            HasSubstr("not the same\n")));
}

struct OfDtype {
  Dtype dtype;
  std::string a;
  std::string b;
  double distance;
};

TEST_F(StateCommandTest, DiffReadsEveryDtype) {
  const auto one = [](auto value) { return bytes_of_values(std::vector{value}); };
  const std::vector<OfDtype> cases = {
      {Dtype::kBool, one(uint8_t{0}), one(uint8_t{1}), 1},
      {Dtype::kU8, one(uint8_t{255}), one(uint8_t{0}), 255},
      {Dtype::kI8, one(int8_t{-128}), one(int8_t{127}), 255},
      {Dtype::kI16, one(int16_t{-2}), one(int16_t{300}), 302},
      {Dtype::kU16, one(uint16_t{65535}), one(uint16_t{1}), 65534},
      {Dtype::kI32, one(int32_t{-2}), one(int32_t{1 << 30}), (1 << 30) + 2},
      {Dtype::kU32, one(uint32_t{1U << 31}), one(uint32_t{0}), 2147483648.0},
      // Neighbours that a double cannot tell apart.
      {Dtype::kI64, one((int64_t{1} << 62) + 1), one(int64_t{1} << 62), 1},
      {Dtype::kU64, one(~uint64_t{0}), one(~uint64_t{0} - 3), 3},
      {Dtype::kF16, one(uint16_t{0x3c00}), one(uint16_t{0xc000}), 3},              // 1, -2
      {Dtype::kF16, one(uint16_t{0x0001}), one(uint16_t{0}), std::ldexp(1, -24)},  // subnormal
      {Dtype::kF16, one(uint16_t{0x7bff}), one(uint16_t{0}), 65504},
      {Dtype::kBF16, one(uint16_t{0x4049}), one(uint16_t{0}), 3.140625},
      {Dtype::kF32, one(1e30F), one(0.0F), static_cast<double>(1e30F)},
      {Dtype::kF64, one(1.0), one(1.0 + 0x1p-52), 0x1p-52}};
  SmallState a;
  SmallState b;
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string name = "t" + std::to_string(i);
    a.weights.push_back({name, {}, cases[i].a, cases[i].dtype});
    b.weights.push_back({name, {}, cases[i].b, cases[i].dtype});
  }
  save(a, scratch_ / "a");
  save(b, scratch_ / "b");
  const Json found = json_of("diff " + path("a") + " " + path("b"), 1);
  const Json& rows = found["files"][0]["different"];
  ASSERT_EQ(rows.size(), cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(rows[i]["largest_difference"], cases[i].distance) << name_of(cases[i].dtype);
  }
}

TEST_F(StateCommandTest, DiffSaysWhereAnInfinityIsAndWhichStateHasNoOptimizer) {
  SmallState a = trained_state(20);
  SmallState b = a;
  b.weights[2].bytes = floats({INFINITY, 0.125F});
  b.optimizer.clear();
  save(a, scratch_ / "a");
  save(b, scratch_ / "b");
  const Json found = json_of("diff " + path("a") + " " + path("b"), 1);
  EXPECT_EQ(found["manifest"],
            (Json::array({{{"path", kOptimizerFile}, {"a", "is there"}, {"b", nullptr}}})));
  EXPECT_TRUE(found["files"][0]["different"][0]["largest_difference"].is_null());
}

std::string tensor_in(const std::filesystem::path& file, const std::string& name,
                      std::vector<uint64_t>* shape = nullptr) {
  const File source(file, File::Access::kRead);
  const SafetensorsHeader header = read_safetensors_header(source);
  for (const TensorEntry& tensor : header.tensors) {
    if (tensor.name != name) continue;
    std::string bytes(tensor.end - tensor.begin, '\0');
    source.read(header.data_begin + tensor.begin, bytes.data(), bytes.size());
    if (shape != nullptr) *shape = tensor.shape;
    return bytes;
  }
  ADD_FAILURE() << "no " << name;
  return "";
}

TEST_F(StateCommandTest, ExportRenamesAndTransposesAndImportUndoesIt) {
  save(trained_state(20), scratch_ / "run/step-20");
  const std::string map = map_of(R"({"wte.weight": "embedding", "head.weight": "lm_head",
      "blocks.*.out.weight": {"name": "h.*.c_proj.weight", "transpose": true}})");
  const Outcome exported = zp("export " + path("run") + " " + path("out.safetensors") + map);
  ASSERT_EQ(exported.exit_code, 0) << exported.output;
  std::vector<uint64_t> shape;
  // [2, 3] of 0, 1/8, ... became [3, 2].
  EXPECT_EQ(tensor_in(scratch_ / "out.safetensors", "h.0.c_proj.weight", &shape),
            floats({0, 3 / 8.F, 1 / 8.F, 4 / 8.F, 2 / 8.F, 5 / 8.F}));
  EXPECT_THAT(shape, ElementsAre(3, 2));
  EXPECT_EQ(tensor_in(scratch_ / "out.safetensors", "half"), trained_state().weights[3].bytes);
  const File file(scratch_ / "out.safetensors", File::Access::kRead);
  EXPECT_EQ(read_safetensors_header(file).metadata,
            (SmallMetadata{{"format", "pt"}, {"lm_head", "embedding"}}));
  EXPECT_FALSE(std::filesystem::exists(scratch_ / ".out.safetensors.writing"));

  const Outcome imported =
      zp("import " + path("out.safetensors") + " " + path("other/step-7") + map + " --step 7");
  ASSERT_EQ(imported.exit_code, 0) << imported.output;
  const SavedState made(scratch_ / "other/step-7");
  made.verify();
  EXPECT_EQ(made.manifest().step, 7);
  EXPECT_EQ(made.optimizer(), nullptr);
  const Json difference = json_of("diff " + path("run") + " " + path("other"), 1);
  EXPECT_EQ(difference["files"][0]["same_tensors"], 4);
  EXPECT_EQ(made.weights().header().metadata, trained_state().metadata);
}

TEST_F(StateCommandTest, LargeTensorsAreTransposedPanelByPanel) {
  constexpr uint32_t kRows = 300, kColumns = 4001;  // more than one panel of 4 MiB
  std::vector<uint32_t> values(kRows * kColumns);
  std::vector<uint32_t> expected(values.size());
  for (uint32_t row = 0; row < kRows; ++row) {
    for (uint32_t column = 0; column < kColumns; ++column) {
      values[row * kColumns + column] = expected[column * kRows + row] = row << 16 | column;
    }
  }
  save({.weights = {{"odd", {3}, "abc", Dtype::kU8},
                    {"w", {kRows, kColumns}, bytes_of_values(values), Dtype::kU32}}},
       scratch_ / "a");
  const std::string map = map_of(R"({"w": {"name": "w", "transpose": true}})");
  const Outcome outcome = zp("export " + path("a") + " " + path("out") + map);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_TRUE(tensor_in(scratch_ / "out", "w") == bytes_of_values(expected));
  EXPECT_EQ(tensor_in(scratch_ / "out", "odd"), "abc");
}

TEST_F(StateCommandTest, TheShippedMapHasHuggingFacesNamesOfGpt2) {
  SmallState gpt;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape) {
    uint64_t numel = 1;
    for (const uint64_t extent : shape) numel *= extent;
    gpt.weights.push_back({name, shape, floats(std::vector<float>(numel, 1))});
  };
  add("token_embedding.weight", {5, 2});
  add("position_embedding.weight", {3, 2});
  add("blocks.11.attention_qkv.weight", {6, 2});
  add("blocks.11.attention_out.bias", {2});
  add("blocks.11.mlp_up.weight", {8, 2});
  add("blocks.11.mlp_norm.bias", {2});
  add("final_norm.weight", {2});
  save(gpt, scratch_ / "gpt");
  const Outcome outcome = zp("export " + path("gpt") + " " + path("hf") +
                             " --unmapped refuse --names " NAMES_FOLDER "/gpt2.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  std::vector<std::string> names;
  std::vector<std::vector<uint64_t>> shapes;
  const File file(scratch_ / "hf", File::Access::kRead);
  for (const TensorEntry& tensor : read_safetensors_header(file).tensors) {
    names.push_back(tensor.name);
    shapes.push_back(tensor.shape);
  }
  EXPECT_THAT(names, ElementsAre("wte.weight", "wpe.weight", "h.11.attn.c_attn.weight",
                                 "h.11.attn.c_proj.bias", "h.11.mlp.c_fc.weight", "h.11.ln_2.bias",
                                 "ln_f.weight"));
  EXPECT_THAT(shapes[2], ElementsAre(2, 6));
  EXPECT_THAT(shapes[4], ElementsAre(2, 8));
}

TEST_F(StateCommandTest, NamesWithoutAnEntryAreKeptLeftOutOrRefused) {
  save(trained_state(20), scratch_ / "a");
  const std::string map = map_of(R"({"blocks.*.out.weight": "w.*"})");
  const std::string command = "export " + path("a") + " " + path("out") + map;
  EXPECT_EQ(zp(command).exit_code, 0);
  tensor_in(scratch_ / "out", "half");
  const Outcome outcome = zp(command + " --unmapped leave-out");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(outcome.output, AllOf(HasSubstr("1 tensors"), HasSubstr("left out: half\n"),
                                    HasSubstr("left out: head.weight\n")));
  const File file(scratch_ / "out", File::Access::kRead);
  EXPECT_EQ(read_safetensors_header(file).tensors.size(), 1U);
  expect_failed(command + " --unmapped refuse",
                "expected an entry of the map for each name, got none for \"wte.weight\"");
}

TEST_F(StateCommandTest, NamesThatMeetAreRefused) {
  save(trained_state(20), scratch_ / "a");
  const auto refused = [&](const std::string& map, const std::string& words) {
    expect_failed("export " + path("a") + " " + path("out") + map_of(map), words);
    EXPECT_FALSE(std::filesystem::exists(scratch_ / "out"));
  };
  refused(R"({"half": "wte.weight"})",
          "expected each tensor under a name of its own, got \"wte.weight\" for \"wte.weight\" and "
          "\"half\"");
  refused(R"({"half": "head.weight"})", "\"head.weight\" for \"half\" and \"head.weight\"");
  refused(R"({"blocks.*.out.bias": "a.*", "blocks.0.out.bias": "b"})",
          "expected one entry for \"blocks.0.out.bias\"");
  refused(R"({"half": {"name": "half", "transpose": true}})",
          "expected two dimensions of \"half\", which the map transposes, got [4]");
  refused(R"({"wte.weight": {"name": "w", "transpose": true}})", "both transposed, or neither");
  refused(R"({"half": "__metadata__"})", "got \"__metadata__\"");
}

TEST_F(StateCommandTest, BadMapsAreRefusedInWords) {
  save(trained_state(20), scratch_ / "a");
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"{", "expected JSON"},
      {"[]", "expected an object of names, got []"},
      {R"({"a": 1})", R"(for "a", got 1)"},
      {R"({"a": {"transpose": true}})", R"(for "a", got {"transpose":true})"},
      {R"({"a": {"name": "b", "transpose": 1}})", "true or false"},
      {R"({"a": {"name": "b", "reshape": true}})", "name and transpose"},
      {R"({"a": ""})", R"(got "")"},
      {R"({"a": "b", "a": "c"})", R"(each name once, got "a" twice)"},
      {R"({"a": "c", "b": "c"})", R"(got "c" for "a" and "b")"},
      {R"({"a.*": "b"})", R"(expected as many * as in "a.*", got "b")"},
      {R"({"a**": "b**"})", "stand apart"},
      {R"({"a1*": "b*"})", "stand apart"}};
  for (const auto& [map, words] : bad) {
    expect_failed("export " + path("a") + " " + path("out") + map_of(map), words);
  }
  expect_failed("export " + path("a") + " " + path("out") + " --names " + path("none.json"),
                "none.json: expected a map of names, got a file that cannot be opened");
}

TEST_F(StateCommandTest, AStarStandsForTheSameDigitsOnBothSides) {
  SmallState a;
  for (const char* name : {"a.1.b.20", "a.01.b.2", "a..b.2", "a.x.b.2"}) {
    a.weights.push_back({name, {1}, floats({1})});
  }
  save(a, scratch_ / "a");
  EXPECT_EQ(
      zp("export " + path("a") + " " + path("out") + map_of(R"({"a.*.b.*": "*-*"})")).exit_code, 0);
  for (const char* name : {"1-20", "01-2", "a..b.2", "a.x.b.2"}) tensor_in(scratch_ / "out", name);
}

TEST_F(StateCommandTest, ExportNeverWritesWhatIsDamagedNorHarmsWhatIsThere) {
  SmallState large{.weights = {{"w", {1 << 20}, floats(std::vector<float>(1 << 20, 1.5F))}}};
  save(large, scratch_ / "large");
  flip(scratch_ / "large/weights.safetensors", (3 << 20) + 5);
  put_bytes(scratch_ / "out", "before");
  expect_failed("export " + path("large") + " " + path("out"), "byte 3145728: expected ");
  EXPECT_EQ(bytes_in(scratch_ / "out"), "before");
  EXPECT_FALSE(std::filesystem::exists(scratch_ / ".out.writing"));
  expect_failed("export " + path("large") + " " + path("."), "expected the name of a file");
  expect_failed("export " + path("large") + " " + path("no/such/folder"),
                "No such file or directory");
}

TEST_F(StateCommandTest, ImportLeavesAStateThatIsThereAlone) {
  save(trained_state(20), scratch_ / "run/step-20");
  put_bytes(scratch_ / "in", safetensors_bytes({{"w", {1}, floats({1})}}, {{"author", "x"}}));
  expect_failed("import " + path("in") + " " + path("run/step-20"), "give another name");
  SavedState(scratch_ / "run/step-20").verify();
  put_bytes(scratch_ / "cut", bytes_in(scratch_ / "in").substr(0, 4097));
  expect_failed("import " + path("cut") + " " + path("run/step-21"), "cut: byte ");
  EXPECT_FALSE(std::filesystem::exists(scratch_ / "run/step-21"));
  const Outcome outcome = zp("import " + path("in") + " " + path("run/step-21"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(SavedState(scratch_ / "run/step-21").weights().header().metadata,
            (SmallMetadata{{"format", "pt"}}));
}

TEST_F(StateCommandTest, SaysWhatIsNoState) {
  for (const char* verb : {"inspect ", "verify "}) {
    expect_failed(verb + path("none"), "got nothing there");
    expect_failed(verb + scratch_.path().string(), "got neither");
  }
  expect_failed("diff " + path("none") + " " + path("none"), "got nothing there");
}

TEST_F(StateCommandTest, RefusesBadCommandLinesInOneLine) {
  expect_refused(zp(""), "subcommand");
  expect_refused(zp("inspect"), "DIR");
  expect_refused(zp("diff a"), "B");
  expect_refused(zp("export a b --unmapped refuse"), "--unmapped needs --names");
  expect_refused(zp("export a b --names m --unmapped often"), "--unmapped");
  expect_refused(zp("import a b --step -1"), "--step");
  expect_refused(zp("verify a -- program"), "takes no program");
  const Outcome help = zp("export --help");
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.output, AllOf(HasSubstr("--names MAP.json"), HasSubstr("Example: ")));
}

TEST_F(StateCommandTest, HelpIsTextAndNamesTheWordsOfAnOption) {
  for (const std::string verb : {"export", "import", "inspect", "verify", "diff"}) {
    const Outcome outcome = zp(verb + " --help");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    const bool is_text = std::all_of(outcome.output.begin(), outcome.output.end(),
                                     [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); });
    EXPECT_TRUE(is_text) << outcome.output;
  }
  const Outcome wrong = zp("export a b --names m --unmapped often");
  EXPECT_EQ(wrong.output.find('\0'), std::string::npos);
  EXPECT_THAT(wrong.output, AllOf(HasSubstr("keep"), HasSubstr("leave-out"), HasSubstr("refuse")));
}

}  // namespace
}  // namespace state_command_test
