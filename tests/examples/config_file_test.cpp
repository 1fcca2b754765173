// The trainer's configuration: what is read, and what is refused with which words.
#include "examples/train_imagenet/config_file.h"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "examples/train_imagenet/schedule.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"

namespace zeropage::config_file_test {
namespace {

using namespace train_imagenet;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;

class ConfigFileTest : public ::testing::Test {
 protected:
  std::string write(const std::string& text) const {
    const std::string file = folder_.path() + "/config.yaml";
    std::ofstream(file) << text;
    return file;
  }
  // What the file is refused with, without its folder.
  std::string refused(const std::string& text) const {
    const std::string error = error_of([&] { read_config(write(text), {}); });
    const size_t name = error.find("config.yaml");
    return name == std::string::npos ? error : error.substr(name);
  }
  static std::string refused_override(const std::vector<std::string>& overrides) {
    return error_of([&] { read_config("", overrides); });
  }
  // What contradicts what, on two ranks.
  static std::string contradiction(std::vector<std::string> overrides) {
    overrides.insert(overrides.begin(),
                     {"OUT_DIR", "out", "DATA.TRAIN", "images", "DATA.HELD_OUT", "9"});
    return error_of([&] { check(read_config("", overrides), 2); });
  }

  testing::DiskFolder folder_;
};

TEST_F(ConfigFileTest, TakesKeysOfAFileAndPairsBehindIt) {
  const Config config = read_config(write("OUT_DIR: /tmp/run\n"
                                          "TRAIN: {BATCH: 64, MIXUP: 0.2}\n"
                                          "OPTIMIZER:\n  NAME: adamw\n  BETAS: [0.8, 0.99]\n"
                                          "SCHEDULE: {STEP_EPOCHS: [2, 3]}\n"
                                          "ZERO:\n  DTYPE: bf16\n  RECOMPUTE_BUDGET: 2MiB\n"),
                                    {"TRAIN.BATCH", "32", "MODEL.SYNC_BATCH_NORM", "true",
                                     "ZERO.OFFLOAD_OPTIMIZER", "host", "DATA.MEAN", "[0, 0, 1]"});
  EXPECT_EQ(config.out_dir, "/tmp/run");
  EXPECT_EQ(config.train.batch, 32);
  EXPECT_EQ(config.train.mixup, 0.2);
  EXPECT_EQ(config.optimizer.name, OptimizerName::kAdamW);
  EXPECT_THAT(config.optimizer.betas, ElementsAre(0.8, 0.99));
  EXPECT_THAT(config.schedule.step_epochs, ElementsAre(2, 3));
  EXPECT_EQ(config.zero.dtype, c10::kBFloat16);
  EXPECT_EQ(config.zero.recompute_budget, 2 << 20);
  EXPECT_TRUE(config.model.sync_batch_norm);
  EXPECT_EQ(config.zero.offload_optimizer, memory::Tier::kHost);
  EXPECT_THAT(config.data.mean, ElementsAre(0, 0, 1));
  EXPECT_EQ(config.train.epochs, 90) << "what nobody named has its default";
}

TEST_F(ConfigFileTest, TakesTextOfTheCommandLineAsItStands) {
  const Config config =
      read_config("", {"OUT_DIR", "run #3", "DATA.TRAIN", "{a}: [b", "LOAD_WEIGHTS", ""});
  EXPECT_EQ(config.out_dir, "run #3");
  EXPECT_EQ(config.data.train, "{a}: [b");
  EXPECT_EQ(config.load_weights, "");
}

TEST_F(ConfigFileTest, WritesWhatItReads) {
  Config config;
  config.out_dir = "a folder: with #marks";
  config.optimizer.betas = {0.5, 0.75};
  config.zero.dtype = c10::kBFloat16;
  config.data.flip = false;
  const std::string text = config_text(config);
  EXPECT_EQ(config_text(read_config(write(text), {})), text);
  EXPECT_EQ(read_config(write(text), {}).out_dir, config.out_dir);
}

TEST_F(ConfigFileTest, AnUnknownKeyIsAnsweredWithFileLineAndTheNearestOne) {
  EXPECT_EQ(refused("OUT_DIR: x\nTRAIN:\n  BATCHES: 3\n"),
            "config.yaml:3: there is no key TRAIN.BATCHES; did you mean TRAIN.BATCH?");
  EXPECT_EQ(refused("OUT_DIRR: x\n"),
            "config.yaml:1: there is no key OUT_DIRR; did you mean OUT_DIR?");
  EXPECT_EQ(refused_override({"OPTIMISER.NAME", "sgd"}),
            "command line: there is no key OPTIMISER.NAME; did you mean OPTIMIZER.NAME?");
}

TEST_F(ConfigFileTest, AWrongValueIsAnsweredWithWhatIsExpected) {
  EXPECT_EQ(refused("TRAIN:\n  BATCH: many\n"),
            "config.yaml:2: TRAIN.BATCH: expected a whole number of at least 1, got many");
  EXPECT_EQ(refused("TRAIN:\n  BATCH: 0\n"),
            "config.yaml:2: TRAIN.BATCH: expected a whole number of at least 1, got 0");
  EXPECT_EQ(refused("TRAIN:\n  BATCH: 1.5\n"),
            "config.yaml:2: TRAIN.BATCH: expected a whole number of at least 1, got 1.5");
  EXPECT_EQ(refused("OPTIMIZER:\n  NAME: sdg\n"),
            "config.yaml:2: OPTIMIZER.NAME: expected one of sgd, adamw, lamb, adafactor, got sdg");
  EXPECT_EQ(refused("DATA: {FLIP: maybe}\n"),
            "config.yaml:1: DATA.FLIP: expected true or false, got maybe");
  EXPECT_EQ(refused("\n\nDATA:\n  MEAN: 0.5\n"),
            "config.yaml:4: DATA.MEAN: expected a list of numbers, such as [0.5, 0.5], got 0.5");
  EXPECT_EQ(refused("ZERO: {STAGE: 4}\n"),
            "config.yaml:1: ZERO.STAGE: expected a whole number from 0 to 3, got 4");
  EXPECT_EQ(refused_override({"OPTIMIZER.LEARNING_RATE", "[1, 2]"}),
            "command line: OPTIMIZER.LEARNING_RATE: expected a number, got [1, 2]");
  EXPECT_EQ(refused_override({"OPTIMIZER.LEARNING_RATE", ".nan"}),
            "command line: OPTIMIZER.LEARNING_RATE: expected a number, got .nan");
}

TEST_F(ConfigFileTest, WhatIsNoConfigurationIsRefusedWithItsLine) {
  EXPECT_THAT(refused("OUT_DIR: x\nTRAIN: {BATCH: 3\n"), HasSubstr("config.yaml:3: is no YAML: "));
  EXPECT_THAT(refused("- 1\n- 2\n"), HasSubstr("config.yaml: expected keys and values"));
  EXPECT_EQ(refused("TRAIN: {BATCH: 4}\n---\nTRAIN: {EPOCHS: 3}\n"),
            "config.yaml: expected one document, got 2; take the lines \"---\" out");
  EXPECT_EQ(refused("---\nTRAIN: {BATCH: 4}\n"), "");
  EXPECT_EQ(refused(""), "");
  EXPECT_EQ(refused("TRAIN: 3\n"),
            "config.yaml:1: TRAIN is a section: expected keys below it, such as TRAIN.EPOCHS");
  EXPECT_EQ(refused("OUT_DIR: a\nOUT_DIR: b\n"), "config.yaml:2: OUT_DIR is there a second time");
  EXPECT_THAT(error_of([&] { read_config(folder_.path() + "/none.yaml", {}); }),
              HasSubstr("none.yaml: there is no such file"));
  EXPECT_EQ(refused_override({"TRAIN.BATCH", "3", "OUT_DIR"}),
            "command line: expected pairs KEY VALUE, got OUT_DIR without a value");
}

TEST_F(ConfigFileTest, ValuesThatContradictEachOtherAreRefused) {
  EXPECT_EQ(contradiction({}), "");
  EXPECT_EQ(contradiction({"TRAIN.BATCH", "66", "TRAIN.ACCUMULATION", "4"}),
            "TRAIN.BATCH 66 cannot be shared by 2 ranks with 4 micro-batches each; give a multiple "
            "of 8");
  // In 64 bits twice as many are -2, which divides it.
  EXPECT_THAT(contradiction({"TRAIN.ACCUMULATION", "9223372036854775807", "TRAIN.BATCH", "4"}),
              HasSubstr("TRAIN.BATCH 4 cannot be shared by 2 ranks"));
  EXPECT_EQ(contradiction({"TRAIN.MIXUP", "1e-12"}),
            "TRAIN.MIXUP: expected 0, or 0.01 to 4, got 1e-12");
  EXPECT_EQ(contradiction({"OPTIMIZER.NAME", "lamb"}), contradiction({"OPTIMIZER.NAME", "adamw"}));
  EXPECT_THAT(contradiction({"DATA.VALIDATION", "v"}), HasSubstr("expected one of them, got both"));
  EXPECT_THAT(contradiction({"DATA.HELD_OUT", "0"}),
              HasSubstr("DATA.VALIDATION: expected a folder"));
  EXPECT_THAT(contradiction({"OUT_DIR", ""}), HasSubstr("OUT_DIR: expected a folder"));
  EXPECT_THAT(contradiction({"OPTIMIZER.MOMENTUM", "0"}), HasSubstr("or NESTEROV false"));
  EXPECT_THAT(contradiction({"TRAIN.LABEL_SMOOTHING", "1"}), HasSubstr("less than 1.0, got 1.0"));
  EXPECT_THAT(contradiction({"SCHEDULE.WARMUP_EPOCHS", "90"}), HasSubstr("less than TRAIN.EPOCHS"));
  EXPECT_THAT(contradiction({"ZERO.RECOMPUTE", "budget"}),
              HasSubstr("ZERO.RECOMPUTE_BUDGET BYTES"));
  EXPECT_THAT(contradiction({"ZERO.OFFLOAD_OPTIMIZER", "nvme"}), HasSubstr("ZERO.NVME_DIRECTORY"));
  EXPECT_THAT(contradiction({"EVAL_ONLY", "true", "AUTO_RESUME", "false"}),
              HasSubstr("EVAL_ONLY: expected weights"));
  EXPECT_THAT(contradiction({"DATA.SHORT_SIDE", "100"}),
              HasSubstr("at least DATA.IMAGE_SIDE, 224"));
}

TEST_F(ConfigFileTest, TheLearningRateRisesThenFallsAndFollowsTheBatch) {
  Config config;
  config.train.epochs = 10;
  config.train.batch = 512;
  config.schedule.warmup_epochs = 2;
  EXPECT_DOUBLE_EQ(base_rate(config), 0.2);
  EXPECT_DOUBLE_EQ(rate_at(config, 0), 0.02);
  EXPECT_DOUBLE_EQ(rate_at(config, 1), 0.11);
  EXPECT_DOUBLE_EQ(rate_at(config, 2), 0.2);
  EXPECT_DOUBLE_EQ(rate_at(config, 6), 0.1);
  EXPECT_NEAR(rate_at(config, 10), 0, 1e-15);

  config.schedule.name = ScheduleName::kStep;
  config.schedule.step_epochs = {4, 8};
  EXPECT_DOUBLE_EQ(rate_at(config, 3.9), 0.2);
  EXPECT_DOUBLE_EQ(rate_at(config, 4), 0.02);
  EXPECT_DOUBLE_EQ(rate_at(config, 9), 0.002);

  config.schedule.name = ScheduleName::kConstant;
  config.optimizer.reference_batch = 0;
  EXPECT_DOUBLE_EQ(rate_at(config, 9), 0.1);
}

TEST_F(ConfigFileTest, ReadsTheConfigurationsThatComeWithIt) {
  const std::string configs = std::string(ZEROPAGE_SOURCE_DIR) + "/examples/train_imagenet/configs";
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator(configs)) {
    const Config config = read_config(file.path(), {});
    // One without data is for classify_images.
    EXPECT_EQ(error_of([&] { check(config, 4); }).empty(), !config.data.train.empty())
        << file.path();
    ++count;
  }
  EXPECT_EQ(count, 5);
}

// The README's table of keys.
TEST_F(ConfigFileTest, TheReadmeHasTheTableOfKeys) {
  const std::string readme =
      std::string(ZEROPAGE_SOURCE_DIR) + "/examples/train_imagenet/README.md";
  std::stringstream text;
  text << std::ifstream(readme).rdbuf();
  EXPECT_THAT(text.str(), HasSubstr(keys_table()))
      << "put what build/release/examples/train_imagenet --keys prints into " << readme;
}

}  // namespace
}  // namespace zeropage::config_file_test
