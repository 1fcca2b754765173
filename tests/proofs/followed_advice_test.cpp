// What an error about memory advises is followed to the letter: the same training then keeps below the same limit.
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/limited_models.h"
#include "tests/harness/ranks.h"
#include "zeropage/bytes.h"
#include "zeropage/zeropage.h"

namespace zeropage::followed_advice_test {
namespace {

using namespace memory;
using testing::LimitedModel;
using testing::Net;

struct Setting {
  Options options;
  int64_t pieces = 1;
  std::optional<int64_t> budget;
};

struct Outcome {
  int64_t peak_bytes = 0;
  std::string error;  // of the rank that ran out of memory first; "": it trained
};

Outcome train(const LimitedModel& given, int64_t batch, int ranks, const Setting& setting) {
  Outcome outcome;
  std::mutex mutex;
  const auto run = [&](comm::World& world) {
    DeferredModule<std::shared_ptr<Net>> deferred([&] {
      const std::lock_guard lock(mutex);
      torch::manual_seed(1);
      return given.make();
    });
    DistributedDataParallel<std::shared_ptr<Net>> model(std::move(deferred), world,
                                                        setting.options);
    Optimizer<torch::optim::AdamW> optimizer(model);
    std::unique_ptr<checkpointing::Recompute> policy;
    if (setting.budget) {
      policy.reset(new checkpointing::Recompute(
          recompute(model, checkpointing::RecomputeOptions::budget(*setting.budget))));
    }
    Accumulator accumulator(model, {.micro_steps = setting.pieces});
    const torch::Tensor samples = given.samples.narrow(0, 0, batch).clone();
    const torch::Tensor targets = given.targets.narrow(0, 0, batch).clone();
    Ledger::current()->reset_peak();
    for (int step = 0; step < 3; ++step) {
      const auto parts = micro_batches(samples, setting.pieces);
      const auto of_parts = micro_batches(targets, setting.pieces);
      for (int64_t i = 0; i < setting.pieces; ++i) {
        torch::Tensor loss;
        {
          std::optional<checkpointing::ActivationScope> forward;
          if (policy) forward.emplace(*policy);
          const torch::Tensor out = model(parts[i]);
          loss = testing::class_loss(out, of_parts[i]);
        }
        accumulator.backward(loss, static_cast<double>(parts.samples_in(i)));
      }
      accumulator.step(optimizer);
    }
    const std::lock_guard lock(mutex);
    outcome.peak_bytes = std::max(outcome.peak_bytes, Ledger::current()->at_peak().total());
  };
  for (const std::exception_ptr& error : testing::try_ranks(ranks, run)) {
    const std::string said = testing::message_of(error);
    if (outcome.error.empty() || said.find("a step as it is needs") != std::string::npos) {
      outcome.error = said.empty() ? outcome.error : said;
    }
  }
  return outcome;
}

struct Advice {
  std::string words;
  std::string figures;
};

std::vector<Advice> advice_in(const std::string& error) {
  std::vector<Advice> lines;
  size_t begin = error.find(", the cheapest first:\n");
  if (begin == std::string::npos) return lines;
  begin = error.find('\n', begin) + 1;
  while (error.compare(begin, 2, "  ") == 0) {
    const size_t end = error.find('\n', begin);
    const std::string line = error.substr(begin + 2, end - begin - 2);
    const size_t colon = line.rfind(": ");
    lines.push_back({line.substr(0, colon), line.substr(colon + 2)});
    begin = end + 1;
  }
  return lines;
}

int64_t number_behind(const std::string& text, const std::string& words) {
  return std::stoll(text.substr(text.find(words) + words.size()));
}

Setting followed(Setting setting, const std::string& advice, const std::string& folder) {
  std::string rest = advice;
  while (!rest.empty()) {
    const std::string joint = ", and ";
    const size_t end = rest.find(joint);
    const std::string part = rest.substr(0, end);
    rest = end == std::string::npos ? "" : rest.substr(end + joint.size());
    if (part.starts_with("micro-batch ")) {
      setting.pieces = number_behind(part, "accumulation ");
    } else if (part.starts_with("recompute: ")) {
      setting.budget = number_behind(part, "budget(");
    } else if (part.ends_with("options.offload.nvme_directory")) {
      setting.options.stage = Stage::kParameters;
      setting.options.offload.optimizer = setting.options.offload.parameters = Tier::kNvme;
      setting.options.offload.nvme_directory = folder;
    } else if (part.starts_with("stage ")) {
      setting.options.stage = stage_of(static_cast<int>(number_behind(part, "stage ")));
    } else if (part == "options.offload.optimizer = Tier::kHost") {
      setting.options.offload.optimizer = Tier::kHost;
    } else {
      ADD_FAILURE() << "unknown advice: " << part;
    }
  }
  return setting;
}

// Percent of the peak, and samples of a rank. Few samples leave the parameters most of the memory.
constexpr std::array<std::pair<int, int64_t>, 5> kLimits = {
    {{70, 16}, {78, 5}, {85, 3}, {90, 2}, {95, 1}}};

TEST(FollowedAdviceTest, MakesTheStepFitWhereItIsFollowed) {
  const testing::DiskFolder folder;
  int settings = 0, fitted = 0, lines = 0, fitting_lines = 0;
  for (const LimitedModel& model : testing::limited_models()) {
    for (const auto& [percent, batch] : kLimits) {
      const int ranks = 1 + settings % 2;
      Setting setting;
      setting.options.stage = stage_of(settings % 4);
      setting.options.page_bytes = 256_KiB;
      const Outcome roomy = train(model, batch, ranks, setting);
      ASSERT_EQ(roomy.error, "");
      setting.options.device_memory_bytes = roomy.peak_bytes * percent / 100;
      const std::string where =
          c10::str(model.name, ", stage ", settings % 4, ", ", ranks, " ranks, batch ", batch, ", ",
                   percent, " % of ", format_bytes(roomy.peak_bytes));
      ++settings;
      const Outcome short_of = train(model, batch, ranks, setting);
      const std::vector<Advice> advice = advice_in(short_of.error);
      EXPECT_FALSE(advice.empty()) << where << ": " << short_of.error;
      for (size_t index = 0; index < advice.size(); ++index) {
        const Outcome outcome =
            train(model, batch, ranks, followed(setting, advice[index].words, folder.path()));
        const bool fits = outcome.error.empty();
        EXPECT_TRUE(fits) << where << ": " << advice[index].words << "\n"
                          << outcome.error << "\nadvised by\n"
                          << short_of.error;
        if (index == 0) fitted += fits ? 1 : 0;
        fitting_lines += fits ? 1 : 0;
        ++lines;
        std::printf("%s: %s: %s: %s\n", where.c_str(), advice[index].words.c_str(),
                    advice[index].figures.c_str(),
                    fits ? format_bytes(outcome.peak_bytes).c_str() : "does not fit");
      }
    }
  }
  std::printf("the first line fits in %d of %d settings, all lines in %d of %d\n", fitted, settings,
              fitting_lines, lines);
  EXPECT_EQ(fitted, settings);
  EXPECT_EQ(settings, 20);
}

}  // namespace
}  // namespace zeropage::followed_advice_test
