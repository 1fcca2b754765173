// The trainer, on images that this test draws, with ranks as threads.
#include <fstream>
#include <iostream>
#include <limits>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "examples/charts/chart.h"
#include "examples/train_imagenet/config_file.h"
#include "examples/train_imagenet/criterion.h"
#include "examples/train_imagenet/score.h"
#include "examples/train_imagenet/training.h"
#include "state/run_token.h"
#include "tests/data/data_files.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/shell.h"
#include "zeropage/data/distributed_sampler.h"

namespace zeropage::train_imagenet_test {
namespace {

using namespace train_imagenet;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kClasses = 3;
constexpr int kOfClass = 9;  // images

// A linear layer, and what a test wants to see or do in each training forward.
class WatchedNet : public image_models::ImageModel {
 public:
  using Watch = std::function<void(const torch::Tensor& images)>;
  WatchedNet(const image_models::ModelOptions& options, Watch watch)
      : fc_(register_module(
            "fc", torch::nn::Linear(3 * options.image_side * options.image_side, options.classes))),
        watch_(std::move(watch)) {}
  torch::Tensor forward(torch::Tensor images) override {
    if (is_training()) watch_(images);
    return fc_(images.flatten(1));
  }
  std::string head() const override { return "fc"; }

 private:
  torch::nn::Linear fc_;
  const Watch watch_;
};

// What kernels do in the last digits, in all digits: an image's outputs depend on the images before it in the batch.
class NeighbourNet : public image_models::ImageModel {
 public:
  explicit NeighbourNet(const image_models::ModelOptions& options)
      : fc_(register_module("fc", torch::nn::Linear(3 * options.image_side * options.image_side,
                                                    options.classes))) {}
  torch::Tensor forward(torch::Tensor images) override { return fc_(images.flatten(1).cumsum(0)); }
  std::string head() const override { return "fc"; }

 private:
  torch::nn::Linear fc_;
};

class TrainImagenetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ::testing::internal::CaptureStdout();
    torch::manual_seed(7);
    for (int label = 0; label < kClasses; ++label) {
      for (int i = 0; i < kOfClass; ++i) draw("images", label, i);
    }
  }
  // Failures are told on stdout too.
  void TearDown() override {
    const std::string told = ::testing::internal::GetCapturedStdout();
    if (HasFailure()) std::cout << told;
  }

  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

  // An image of noise around a colour of its class, as large as no other.
  void draw(const std::string& root, int label, int number) const {
    const std::string of_class = path(root) + "/class-" + std::to_string(label);
    std::filesystem::create_directories(of_class);
    torch::Tensor pixels = torch::randint(0, 120, {20 + number, 24, 3}, torch::kByte);
    pixels.select(2, label % 3) += 130;
    testing::write_text(of_class + "/" + std::to_string(number) + ".png",
                        testing::png_bytes(pixels.contiguous(), PNG_FORMAT_RGB));
  }

  // 27 images, of which 7 are held out: two steps an epoch.
  Config config(std::vector<std::string> overrides = {}) const {
    std::vector<std::string> all = {"OUT_DIR",
                                    path("out"),
                                    "DATA.TRAIN",
                                    path("images"),
                                    "DATA.HELD_OUT",
                                    "7",
                                    "DATA.IMAGE_SIDE",
                                    "16",
                                    "MODEL.NAME",
                                    "resnet18_small",
                                    "MODEL.WIDTH",
                                    "4",
                                    "TRAIN.BATCH",
                                    "8",
                                    "TRAIN.EPOCHS",
                                    "2",
                                    "RUN.REPORT_EVERY",
                                    "1",
                                    "RUN.VALIDATION_BATCH",
                                    "4"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return read_config("", all);
  }

  // Returns the weights' hash.
  static std::string train(
      const Config& config, int ranks,
      const image_models::ModelRegistry& models = image_models::ModelRegistry::standard()) {
    std::string hash;
    testing::run_ranks(ranks, [&](World& world) {
      const std::string own = run(config, models, world).weights_sha256;
      if (world.rank() == 0) hash = own;
    });
    return hash;
  }
  std::string refused(const std::vector<std::string>& overrides, int ranks = 1) const {
    return error_of([&] { train(config(overrides), ranks); });
  }

  std::string text_of(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(path(name)).rdbuf();
    return text.str();
  }
  // The last metrics of that kind.
  nlohmann::json last_metrics(const std::string& of) const {
    nlohmann::json last;
    for (const auto& one : metrics("out")) {
      if (one.at("of") == of) last = one;
    }
    return last;
  }
  // All metrics but the speed.
  std::vector<nlohmann::json> metrics(const std::string& out) const {
    std::stringstream lines(text_of(out + "/metrics.jsonl"));
    std::vector<nlohmann::json> all;
    for (std::string line; std::getline(lines, line);) {
      all.push_back(nlohmann::json::parse(line));
      all.back().erase("images_per_second");
    }
    return all;
  }

  testing::DiskFolder folder_;
};

TEST_F(TrainImagenetTest, LeavesConfigLogMetricsCurvesStatesAndWeights) {
  train(config({"TRAIN.AVERAGE_DECAY", "0.5"}), 1);
  EXPECT_THAT(text_of("out/config.yaml"), HasSubstr("  NAME: resnet18_small\n"));
  EXPECT_THAT(text_of("out/log.txt"),
              AllOf(HasSubstr("20 images to train on, 7 to validate"),
                    ContainsRegex("epoch 2/2 step 2/2, loss [0-9.]+, top-1 [0-9.]+ %, 0s left, "),
                    HasSubstr("validation: step 4, loss ")));
  EXPECT_EQ(last_metrics("training").at("samples"), 8);
  EXPECT_EQ(last_metrics("validation").at("samples"), 7);
  EXPECT_EQ(last_metrics("average").at("epoch"), 2.0);
  EXPECT_THAT(text_of("out/curves.svg"), AllOf(HasSubstr("<svg"), HasSubstr(">loss<"),
                                               HasSubstr("validation"), HasSubstr("average")));
  for (const char* const file :
       {"out/states/latest/manifest.json", "out/weights/weights.safetensors",
        "out/average/weights.safetensors"}) {
    EXPECT_TRUE(std::filesystem::exists(path(file))) << file;
  }
}

TEST_F(TrainImagenetTest, ValidationIsEqualToTheLastDigitAtAnyNumberOfRanks) {
  image_models::ModelRegistry models = image_models::ModelRegistry::standard();
  models.add("neighbour_net", [](const image_models::ModelOptions& options) {
    return std::make_shared<NeighbourNet>(options);
  });
  // Seven images in batches of four: one rank has both, or a part of a batch, or nothing.
  for (const std::string model : {"resnet18_small", "neighbour_net"}) {
    SCOPED_TRACE(model);
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.end(), {"MODEL.NAME", model, "OUT_DIR", path(model)});
      return config(more);
    };
    train(with({}), 1, models);
    std::set<std::string> lines;
    for (const int ranks : {1, 2, 3, 4}) {
      train(with({"EVAL_ONLY", "true", "ZERO.STAGE", ranks == 3 ? "3" : "0"}), ranks, models);
      const std::string log = text_of(model + "/log.txt");
      lines.insert(log.substr(log.rfind("validation: ")));
    }
    EXPECT_EQ(lines.size(), 1) << ::testing::PrintToString(lines);
    EXPECT_THAT(*lines.begin(), HasSubstr(" of 7 images"));
  }
}

// At stages 0 and 1 micro-batches are added up in another order.
TEST_F(TrainImagenetTest, TheWeightsDoNotDependOnStage2Or3RecomputeOffloadOrLoaderThreads) {
  const auto hash = [&](const std::string& out, std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(),
                     {"OUT_DIR", path(out), "TRAIN.ACCUMULATION", "2", "TRAIN.MIXUP", "0.3",
                      "TRAIN.LABEL_SMOOTHING", "0.1", "MODEL.SYNC_BATCH_NORM", "true"});
    return train(config(overrides), 2);
  };
  const std::string expected = hash("plain", {"ZERO.STAGE", "2"});
  EXPECT_EQ(
      hash("sharded", {"ZERO.STAGE", "3", "ZERO.RECOMPUTE", "selective", "ZERO.OFFLOAD_OPTIMIZER",
                       "host", "DATA.LOADER_THREADS", "3", "DATA.IN_MEMORY", "false"}),
      expected);
  EXPECT_NE(hash("unmixed", {"ZERO.STAGE", "2", "TRAIN.MIXUP", "0"}), expected);
}

TEST_F(TrainImagenetTest, GoesOnInMidEpochAsIfItHadNotStopped) {
  const std::vector<std::string> adamw = {"OPTIMIZER.NAME", "adamw", "TRAIN.AVERAGE_DECAY", "0.9",
                                          "RUN.SAVE_EVERY", "1"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), adamw.begin(), adamw.end());
    return config(more);
  };
  const std::string uninterrupted = train(with({"OUT_DIR", path("whole")}), 2);
  train(with({"TRAIN.STEPS", "3"}), 2);
  // As if the run had been killed while it wrote.
  std::ofstream(path("out/metrics.jsonl"), std::ios::app) << R"({"of": "training", "st)";
  EXPECT_EQ(train(with({"ZERO.STAGE", "2"}), 2), uninterrupted);
  EXPECT_THAT(text_of("out/log.txt"), HasSubstr("step 3, epoch 2, sample 8"));
  EXPECT_EQ(metrics("out"), metrics("whole"));
  // Once more, though there is nothing left to do.
  EXPECT_EQ(train(with({}), 4), uninterrupted);
  EXPECT_EQ(metrics("out"), metrics("whole"));
}

TEST_F(TrainImagenetTest, OnOtherRanksEverySampleOfTheEpochComesOnce) {
  std::mutex mutex;
  std::multiset<int64_t> seen;  // by the pixels' sum, which tells images apart
  image_models::ModelRegistry models;
  models.add("watched", [&](const image_models::ModelOptions& options) {
    return std::make_shared<WatchedNet>(options, [&](const torch::Tensor& images) {
      const std::lock_guard lock(mutex);
      for (const torch::Tensor& image : images.unbind()) {
        seen.insert(std::llround(image.to(torch::kDouble).abs().sum().item<double>() * 1e4));
      }
    });
  });
  const std::vector<std::string> watched = {"MODEL.NAME", "watched",      "TRAIN.BATCH",
                                            "4",          "TRAIN.EPOCHS", "1"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), watched.begin(), watched.end());
    return config(more);
  };
  train(with({"OUT_DIR", path("whole")}), 1, models);
  const std::multiset<int64_t> expected = std::exchange(seen, {});
  EXPECT_EQ(expected.size(), 20);
  EXPECT_EQ(std::set<int64_t>(expected.begin(), expected.end()).size(), 20);
  train(with({"TRAIN.STEPS", "2"}), 2, models);
  EXPECT_EQ(seen.size(), 8);
  train(with({}), 4, models);
  EXPECT_EQ(seen, expected);
}

// Five steps an epoch before, two from then on.
TEST_F(TrainImagenetTest, WithAnotherBatchItMakesAllEpochs) {
  const std::vector<std::string> common = {"TRAIN.EPOCHS", "4", "RUN.SAVE_EVERY", "100"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), common.begin(), common.end());
    return config(more);
  };
  train(with({"TRAIN.BATCH", "4", "TRAIN.STEPS", "13"}), 1);
  EXPECT_EQ(last_metrics("validation").at("step"), 13);
  train(with({"TRAIN.BATCH", "10"}), 1);
  EXPECT_EQ(last_metrics("training").at("epoch"), 4.0);
  // What is left of the third epoch is less than a batch. The last epoch's state is saved, too.
  EXPECT_EQ(last_metrics("validation").at("step"), 13 + 2);
  EXPECT_TRUE(std::filesystem::exists(path("out/states/step-15")));
}

TEST_F(TrainImagenetTest, ARunThatLostItsFolderToANewerOneSavesNothingMore) {
  image_models::ModelRegistry models;
  int forwards = 0;
  models.add("watched", [&](const image_models::ModelOptions& options) {
    return std::make_shared<WatchedNet>(options, [&](const torch::Tensor&) {
      if (++forwards != 3) return;
      // Once the first epoch's state is on the disk, another run takes the folder.
      for (int i = 0; i < 5000 && !std::filesystem::exists(path("out/states/latest")); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      state::RunToken(path("out/states"));
    });
  });
  EXPECT_THAT(error_of([&] {
                train(config({"MODEL.NAME", "watched"}), 1, models);
              }),
              AllOf(HasSubstr("run 1 "), HasSubstr(" has lost this folder to run 2 ")));
  EXPECT_TRUE(std::filesystem::exists(path("out/states/step-2")));
  EXPECT_FALSE(std::filesystem::exists(path("out/states/step-4")));
}

// The programs themselves, two ranks as processes.
TEST_F(TrainImagenetTest, AProcessThatIsStoppedOrKilledGoesOnToTheSameWeights) {
  const auto command = [&](const std::string& out) {
    return std::string(TRAIN_IMAGENET) + " --ranks 2 OUT_DIR " + path(out) + " DATA.TRAIN " +
           path("images") +
           " DATA.HELD_OUT 7 DATA.IMAGE_SIDE 16 MODEL.NAME resnet18_small MODEL.WIDTH 4"
           " TRAIN.BATCH 8 TRAIN.EPOCHS 40 RUN.THREADS 1 RUN.SAVE_EVERY 3";
  };
  // Ends the program once it has saved a state and `more` is so.
  const auto ended_by = [&](const std::string& signal, const std::string& more) {
    return testing::shell(command("out") + " & pid=$!; until [ -e " + path("out/states/latest") +
                          " ] && " + more + "; do sleep 0.02; done; kill -" + signal +
                          " $pid; wait $pid");
  };
  const auto hash = [](const testing::Outcome& outcome) {
    EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    return outcome.output.substr(outcome.output.find("weights_sha256"));
  };
  const std::string uninterrupted = hash(testing::shell(command("whole")));
  EXPECT_EQ(ended_by("TERM", "true").exit_code, 143);
  EXPECT_THAT(text_of("out/log.txt"), HasSubstr("stopped by SIGTERM at step "));
  EXPECT_FALSE(std::filesystem::exists(path("out/weights")));
  EXPECT_EQ(ended_by("KILL", "grep -q 'goes on from' " + path("out/log.txt")).exit_code, 137);
  EXPECT_FALSE(std::filesystem::exists(path("out/weights")));
  EXPECT_EQ(hash(testing::shell(command("out"))), uninterrupted);

  // What was trained names images.
  const auto classify = [&](const std::string& flags) {
    return testing::shell(CLASSIFY_IMAGES " --config " + path("out/config.yaml") + " --weights " +
                          path("out/weights") + " " + flags + " " + path("images/class-1/0.png"));
  };
  const testing::Outcome named = classify("--names " + path("out/classes.json"));
  EXPECT_EQ(named.exit_code, 0) << named.output;
  EXPECT_THAT(named.output, AllOf(HasSubstr("images/class-1/0.png\n"), HasSubstr("%  class-2")));
  EXPECT_THAT(classify("").output, HasSubstr("expected how many classes the network has"));
  EXPECT_THAT(classify("--names " + path("out/config.yaml")).output,
              HasSubstr("config.yaml: expected a list of names in JSON"));
  EXPECT_THAT(classify("--names " + path("out/classes.json") + " " + path("none.png")).output,
              HasSubstr("none.png: "));
}

TEST_F(TrainImagenetTest, FineTuningLeavesTheHeadOfOtherClassesOutAndSaysSo) {
  train(config({"TRAIN.STEPS", "1"}), 1);
  const std::string weights = path("out/weights/weights.safetensors");
  draw("images", kClasses, 0);
  draw("images", kClasses, 1);
  train(config({"OUT_DIR", path("tuned"), "LOAD_WEIGHTS", weights, "TRAIN.STEPS", "1"}), 1);
  EXPECT_THAT(
      text_of("tuned/log.txt"),
      HasSubstr("all weights but the head \"fc\", which is of other classes and begins anew"));
  EXPECT_THAT(refused({"OUT_DIR", path("tuned"), "LOAD_WEIGHTS", weights, "EVAL_ONLY", "true"}),
              HasSubstr("a head that nobody trained would be validated"));
  EXPECT_THAT(
      refused({"OUT_DIR", path("other"), "LOAD_WEIGHTS", weights, "MODEL.NAME", "resnet50_small"}),
      HasSubstr("the weights are of another module"));

  // As many classes: the head too.
  std::filesystem::remove_all(path("images/class-3"));
  train(config({"OUT_DIR", path("same"), "LOAD_WEIGHTS", weights, "EVAL_ONLY", "true"}), 1);
  EXPECT_THAT(text_of("same/log.txt"), HasSubstr(weights + ": all weights\n"));
  const std::string log = text_of("same/log.txt"), before = text_of("out/log.txt");
  const auto result = [](const std::string& text) { return text.substr(text.rfind(", loss ")); };
  EXPECT_EQ(result(log), result(before));
}

TEST_F(TrainImagenetTest, TheMomentumOfBatchNormsChangesTheirStatisticsAlone) {
  const auto result = [&](const std::string& out, const std::string& momentum) {
    const std::string hash = train(
        config({"OUT_DIR", path(out), "MODEL.BATCH_NORM_MOMENTUM", momentum, "TRAIN.STEPS", "1"}),
        1);
    const std::string log = text_of(out + "/log.txt");
    return std::pair(hash, log.substr(log.rfind(", loss ")));
  };
  const auto own = result("own", "0"), same = result("same", "0.1"), other = result("other", "0.9");
  EXPECT_EQ(own, same);
  EXPECT_EQ(own.first, other.first);
  EXPECT_NE(own.second, other.second);
}

TEST_F(TrainImagenetTest, TrainsInDoubleWithBatchNorms) {
  const auto hash = [&](const std::string& out, const std::string& dtype) {
    return train(config({"OUT_DIR", path(out), "ZERO.DTYPE", dtype, "TRAIN.STEPS", "2",
                         "MODEL.SYNC_BATCH_NORM", "true"}),
                 2);
  };
  EXPECT_NE(hash("double", "fp64"), hash("float", "fp32"));
}

TEST_F(TrainImagenetTest, DataThatCannotBeTrainedOnIsNamed) {
  EXPECT_THAT(refused({"DATA.TRAIN", path("none")}), HasSubstr("none: there is no such folder"));
  EXPECT_THAT(refused({"MODEL.CLASSES", "2"}),
              HasSubstr("MODEL.CLASSES 2: DATA.TRAIN " + path("images") +
                        " has 3 classes, so labels up to 2; give at least 3"));
  EXPECT_THAT(refused({"TRAIN.BATCH", "64"}), HasSubstr("TRAIN.BATCH 64: there are 20 samples"));
  EXPECT_THAT(refused({"DATA.HELD_OUT", "27"}), HasSubstr("DATA.HELD_OUT 27: "));
  EXPECT_THAT(refused({"TRAIN.BATCH", "7"}, 2),
              HasSubstr("TRAIN.BATCH 7 cannot be shared by 2 ranks"));
  EXPECT_THAT(refused({"MODEL.NAME", "resnet19"}),
              HasSubstr("MODEL.NAME: there is no network \"resnet19\"; expected one of "));

  std::filesystem::create_directories(path("one/class-0"));
  EXPECT_THAT(refused({"DATA.TRAIN", path("one")}), HasSubstr("expected at least two folders"));
  draw("validation", 0, 0);
  draw("validation", 5, 0);
  EXPECT_THAT(refused({"DATA.VALIDATION", path("validation"), "DATA.HELD_OUT", "0"}),
              HasSubstr("has a class \"class-5\" that DATA.TRAIN does not have"));

  std::ofstream(path("images/class-1/broken.png")) << "no image";
  train(config({"TRAIN.STEPS", "1"}), 1);
  EXPECT_THAT(text_of("out/log.txt"),
              AllOf(HasSubstr("skipped "), HasSubstr("broken.png: expected a PNG or JPEG file")));
}

TEST_F(TrainImagenetTest, FilesThatCannotBeReadAsTheyAreUsedAreReplacedCountedAndBounded) {
  const std::string on_use = "DATA.IN_MEMORY";
  for (const char* name : {"0", "1", "2"}) {
    std::ofstream(path("images/class-1/" + std::string(name) + ".png")) << "no image";
  }
  train(config({on_use, "false", "DATA.MOST_BROKEN_FILES", "3"}), 1);
  EXPECT_THAT(text_of("out/log.txt"), HasSubstr("files that could not be read, of all ranks: "));
  EXPECT_THAT(refused({on_use, "false", "DATA.MOST_BROKEN_FILES", "0", "OUT_DIR", path("none")}),
              AllOf(HasSubstr("DATA.MOST_BROKEN_FILES 0: 1 files of this rank cannot be read"),
                    HasSubstr("expected a PNG or JPEG file")));
}

TEST_F(TrainImagenetTest, WhatTheCommandLineSaysOfTheOptimizerCountsInAResumedRun) {
  const auto train_twice = [&](const std::string& out, const std::string& first) {
    train(config({"OUT_DIR", path(out), "TRAIN.STEPS", "1", "OPTIMIZER.WEIGHT_DECAY", first}), 1);
    return train(config({"OUT_DIR", path(out), "TRAIN.STEPS", "2", "OPTIMIZER.WEIGHT_DECAY", "0.5",
                         "OPTIMIZER.MOMENTUM", "0.5"}),
                 1);
  };
  const std::string always = train_twice("always", "0.5");
  EXPECT_NE(train_twice("later", "0"), always) << "another first step";
  EXPECT_THAT(text_of("later/log.txt"),
              AllOf(HasSubstr("parameter group 0 has other options than the state"),
                    HasSubstr("weight_decay 0.0, now 0.5"), HasSubstr("momentum 0.9, now 0.5")));
  EXPECT_THAT(text_of("later/config.yaml"), HasSubstr("WEIGHT_DECAY: 0.5"));
}

TEST_F(TrainImagenetTest, OtherClassesOrFilesAreRefusedBeforeAnythingIsWritten) {
  train(config({"TRAIN.STEPS", "1"}), 1);
  const std::string classes = text_of("out/classes.json"), keys = text_of("out/config.yaml");
  std::filesystem::rename(path("images/class-0"), path("images/class-7"));
  for (const char* only : {"false", "true"}) {
    EXPECT_THAT(refused({"EVAL_ONLY", only, "TRAIN.EPOCHS", "9"}),
                HasSubstr("the names of the classes are others than those of its run: class-0, "
                          "class-1, class-2, now class-1, class-2, class-7"));
  }
  std::filesystem::rename(path("images/class-7"), path("images/class-0"));
  std::filesystem::rename(path("images/class-0/3.png"), path("images/class-0/33.png"));
  // Images that were trained on would be held out.
  for (const char* only : {"false", "true"}) {
    EXPECT_THAT(refused({"EVAL_ONLY", only, "TRAIN.EPOCHS", "9"}, 2),
                HasSubstr("the files of training (data.json) are others than those of its run"));
  }
  EXPECT_EQ(text_of("out/classes.json"), classes);
  EXPECT_EQ(text_of("out/config.yaml"), keys);
}

TEST_F(TrainImagenetTest, AStateThatIsNotFiniteReplacesNoneThatIs) {
  train(config({"TRAIN.EPOCHS", "1"}), 1);
  const auto states = [&] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path("out/states"))) {
      names.insert(entry.path().filename());
    }
    return names;
  };
  const auto before = states();
  EXPECT_THAT(refused({"TRAIN.EPOCHS", "9", "OPTIMIZER.LEARNING_RATE", "1e30"}, 2),
              HasSubstr("OPTIMIZER.LEARNING_RATE"));
  EXPECT_EQ(states(), before);
  train(config({"TRAIN.EPOCHS", "2"}), 1);
}

TEST_F(TrainImagenetTest, ListsOnTheCommandLineAreOneValue) {
  const auto says = [](const std::string& pairs) {
    return testing::shell(std::string(TRAIN_IMAGENET) + " " + pairs).output;
  };
  EXPECT_THAT(says("DATA.MEAN '[0.5, 0.5]' OUT_DIR x DATA.TRAIN y DATA.HELD_OUT 1"),
              HasSubstr("DATA.MEAN and DATA.DEVIATION: expected three numbers each"));
  EXPECT_THAT(says("SCHEDULE.STEP_EPOCHS [3,1] --ranks 1 OUT_DIR x DATA.TRAIN y DATA.HELD_OUT 1"),
              HasSubstr("SCHEDULE.STEP_EPOCHS: expected epochs in their order"));
  EXPECT_THAT(says("OPTIMIZER.MOMENTUM -0.5 OUT_DIR x DATA.TRAIN y DATA.HELD_OUT 1"),
              HasSubstr("OPTIMIZER.MOMENTUM: expected"));
  EXPECT_THAT(says("TRAIN.EPOCHS"), HasSubstr("got TRAIN.EPOCHS without a value"));
}

TEST_F(TrainImagenetTest, AFolderOfAnotherRunIsRefused) {
  EXPECT_THAT(refused({"EVAL_ONLY", "true"}), HasSubstr("has no state; train first"));
  train(config({"TRAIN.STEPS", "1"}), 1);
  EXPECT_THAT(refused({"AUTO_RESUME", "false"}, 2),
              HasSubstr("has states of a run, and AUTO_RESUME is false"));
  EXPECT_THAT(
      refused({"MODEL.WIDTH", "8"}, 2),
      HasSubstr("its run has MODEL.WIDTH 4, this one 8; give it the same, or another folder"));
  // Without its configuration, the state itself tells.
  std::filesystem::remove(path("out/config.yaml"));
  EXPECT_THAT(refused({"MODEL.WIDTH", "8"}), HasSubstr("it is of another model"));
  std::ofstream(path("file")) << "";
  EXPECT_THAT(refused({"OUT_DIR", path("file")}),
              HasSubstr("OUT_DIR " + path("file") + ": cannot be made"));
}

// ---- Parts ----

TEST(TrainImagenetPartsTest, AScoreIsTheSameHoweverSamplesLieInBatches) {
  torch::manual_seed(3);
  const torch::Tensor outputs = torch::randn({37, 9}), labels = torch::randint(0, 9, {37});
  Score whole, parts;
  whole.add(outputs, labels);
  for (const auto& [from, count] : {std::pair{30, 7}, {0, 1}, {1, 29}}) {
    parts.add(outputs.narrow(0, from, count), labels.narrow(0, from, count));
  }
  EXPECT_EQ(whole.loss(), parts.loss());
  EXPECT_EQ(whole.top5(), parts.top5());
  EXPECT_NEAR(whole.loss(), torch::cross_entropy_loss(outputs, labels).item<double>(), 1e-6);
  EXPECT_EQ(whole.top1(), outputs.argmax(1).eq(labels).sum().item<double>() / 37);
  testing::run_ranks(3, [&](World& world) {
    Score own;
    const int64_t from = world.rank() * 12, count = world.rank() == 2 ? 13 : 12;
    own.add(outputs.narrow(0, from, count), labels.narrow(0, from, count));
    const Score all = own.over_ranks(world);
    EXPECT_EQ(all.loss(), whole.loss());
    EXPECT_EQ(all.top5(), whole.top5());
    EXPECT_EQ(all.samples(), 37);
  });
}

TEST(TrainImagenetPartsTest, EqualScoresAreOrderedAndWhatIsNotFiniteIsWrong) {
  Score ties;
  ties.add(torch::ones({2, 7}), torch::tensor({0, 5}, torch::kLong));
  EXPECT_EQ(ties.top1(), 0.5);
  EXPECT_EQ(ties.top5(), 0.5);
  Score broken;
  broken.add(torch::full({1, 3}, std::numeric_limits<float>::quiet_NaN()),
             torch::zeros({1}, torch::kLong));
  EXPECT_EQ(broken.top1(), 0);
  EXPECT_TRUE(std::isnan(broken.loss()));
}

TEST(TrainImagenetPartsTest, MixupIsAnImageAndItsPartnerInTheSameShares) {
  const Criterion criterion({.label_smoothing = 0, .mixup = 0.4});
  double sum = 0;
  for (int64_t i = 0; i < 500; ++i) {
    const double share = criterion.draw_share(data::SampleRandom(1, 0, i));
    ASSERT_GE(share, 0);
    ASSERT_LE(share, 1);
    sum += share;
  }
  EXPECT_NEAR(sum / 500, 0.5, 0.06);
  EXPECT_EQ(criterion.draw_share(data::SampleRandom(1, 2, 3)),
            criterion.draw_share(data::SampleRandom(1, 2, 3)));
  EXPECT_EQ(Criterion({}).draw_share(data::SampleRandom(1, 2, 3)), 1);

  const torch::Tensor images = torch::tensor({{1.0F}, {3.0F}});
  EXPECT_TRUE(torch::allclose(Criterion::mix(images, 0.75), torch::tensor({{1.5F}, {2.5F}})));
  const torch::Tensor outputs = torch::randn({2, 4}), labels = torch::tensor({1, 3}, torch::kLong);
  const auto plain = [&](const torch::Tensor& of) {
    return torch::cross_entropy_loss(outputs, of);
  };
  EXPECT_TRUE(torch::allclose(criterion(outputs, labels, 0.75),
                              plain(labels) * 0.75 + plain(labels.flip(0)) * 0.25));
}

TEST(TrainImagenetPartsTest, AChartHasItsLinesDotsBarsAndNames) {
  const charts::Panel panel{
      .title = "a < b",
      .y = {.unit = "ms"},
      .series = {{.name = "one", .points = {{0, 1}, {1, NAN}, {2, 3}}},
                 {.name = "two", .points = {{1, 2}}, .mark = charts::Mark::kDots}}};
  const charts::Panel bars{
      .title = "bars",
      .x = {.names = {"left", "right"}},
      .series = {{.name = "one", .points = {{0, 5}, {1, 2}}, .mark = charts::Mark::kBars}}};
  const std::string svg = charts::svg({panel, bars, {.title = "empty"}});
  EXPECT_THAT(svg, AllOf(HasSubstr("a &lt; b"), HasSubstr(" ms</text>"), HasSubstr("<circle"),
                         HasSubstr(">left</text>"), Not(HasSubstr("nan"))));
  const auto count = [&](const std::string& words) {
    int found = 0;
    for (size_t at = svg.find(words); at != std::string::npos; at = svg.find(words, at + 1))
      ++found;
    return found;
  };
  EXPECT_EQ(count("<rect"), 3) << "the ground and two bars";
  EXPECT_EQ(count("&#9632; one"), 1) << "one entry of the legend";
}

}  // namespace
}  // namespace zeropage::train_imagenet_test
