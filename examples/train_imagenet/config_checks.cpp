// What contradicts what. One key's own form is checked where it is read.
#include <algorithm>
#include <sstream>
#include <string>

#include "train_imagenet/config_keys.h"

namespace train_imagenet {
namespace {

using zeropage::memory::Tier;

void expect(bool condition, const std::string& words) {
  if (!condition) throw ConfigError(words);
}

std::string text(double value) {
  std::string digits = std::to_string(value);
  digits.erase(digits.find_last_not_of('0') + 1);
  return digits.ends_with('.') ? digits + "0" : digits;
}

void within(const char* key, double value, double least, double most) {
  expect(value >= least && value <= most, std::string(key) + ": expected " + text(least) + " to " +
                                              text(most) + ", got " + text(value));
}

// Up to `limit`, and not that itself.
void below(const char* key, double value, double limit) {
  expect(value >= 0 && value < limit, std::string(key) + ": expected at least 0 and less than " +
                                          text(limit) + ", got " + text(value));
}

void check_data(const Config& config) {
  const DataKeys& data = config.data;
  expect(!data.train.empty(),
         "DATA.TRAIN: expected a folder with a folder a class; give it in the file or as "
         "DATA.TRAIN FOLDER");
  expect(
      data.validation.empty() != (data.held_out == 0),
      data.validation.empty()
          ? "DATA.VALIDATION: expected a folder, or DATA.HELD_OUT samples of DATA.TRAIN; got none"
          : "DATA.VALIDATION and DATA.HELD_OUT: expected one of them, got both");
  expect(data.least_area > 0 && data.least_area <= 1,
         "DATA.LEAST_AREA: expected a share above 0 and up to 1, got " + text(data.least_area));
  within("DATA.COLOUR_JITTER", data.colour_jitter, 0, 1);
  expect(data.mean.size() == 3 && data.deviation.size() == 3 &&
             std::all_of(data.deviation.begin(), data.deviation.end(),
                         [](double deviation) { return deviation > 0; }),
         "DATA.MEAN and DATA.DEVIATION: expected three numbers each, for red, green and blue, the "
         "deviations above 0");
  expect(config.short_side() >= data.image_side,
         "DATA.SHORT_SIDE " + std::to_string(data.short_side) +
             ": expected at least DATA.IMAGE_SIDE, " + std::to_string(data.image_side));
}

void check_training(const Config& config, int ranks) {
  const TrainKeys& train = config.train;
  expect(
      // A validation trains on no batch.
      config.eval_only ||
          (train.batch % ranks == 0 && train.batch / ranks % train.accumulation == 0),
      "TRAIN.BATCH " + std::to_string(train.batch) + " cannot be shared by " +
          std::to_string(ranks) + " ranks with " + std::to_string(train.accumulation) +
          " micro-batches each; give a multiple of " +
          // In uint64_t, which does not overflow into no number at all.
          std::to_string(static_cast<uint64_t>(ranks) * static_cast<uint64_t>(train.accumulation)));
  below("TRAIN.LABEL_SMOOTHING", train.label_smoothing, 1);
  // With less, nearly every draw is rounded to two zeros, and drawing does not end.
  constexpr double kLeastMixup = 0.01, kMostMixup = 4;
  std::ostringstream mixup;
  mixup << "TRAIN.MIXUP: expected 0, or " << kLeastMixup << " to " << kMostMixup << ", got "
        << train.mixup;
  expect(train.mixup == 0 || (train.mixup >= kLeastMixup && train.mixup <= kMostMixup),
         mixup.str());
  below("TRAIN.AVERAGE_DECAY", train.average_decay, 1);
  expect(train.clip_norm >= 0,
         "TRAIN.CLIP_NORM: expected at least 0, got " + text(train.clip_norm));
}

void check_optimizer(const OptimizerKeys& optimizer) {
  expect(optimizer.learning_rate > 0, "OPTIMIZER.LEARNING_RATE: expected a number above 0, got " +
                                          text(optimizer.learning_rate));
  below("OPTIMIZER.MOMENTUM", optimizer.momentum, 1);
  expect(optimizer.name != OptimizerName::kSgd || !optimizer.nesterov || optimizer.momentum > 0,
         "OPTIMIZER.NESTEROV: expected OPTIMIZER.MOMENTUM above 0, or NESTEROV false");
  expect(optimizer.betas.size() == 2,
         "OPTIMIZER.BETAS: expected two numbers, got " + std::to_string(optimizer.betas.size()));
  for (const double beta : optimizer.betas) below("OPTIMIZER.BETAS", beta, 1);
  expect(optimizer.weight_decay >= 0,
         "OPTIMIZER.WEIGHT_DECAY: expected at least 0, got " + text(optimizer.weight_decay));
}

void check_schedule(const Config& config) {
  const ScheduleKeys& schedule = config.schedule;
  const auto epochs = static_cast<double>(config.train.epochs);
  expect(schedule.warmup_epochs >= 0 && schedule.warmup_epochs < epochs,
         "SCHEDULE.WARMUP_EPOCHS: expected less than TRAIN.EPOCHS, " + text(epochs) + ", got " +
             text(schedule.warmup_epochs));
  within("SCHEDULE.WARMUP_FACTOR", schedule.warmup_factor, 0, 1);
  within("SCHEDULE.STEP_FACTOR", schedule.step_factor, 0, 1);
  expect(std::is_sorted(schedule.step_epochs.begin(), schedule.step_epochs.end()),
         "SCHEDULE.STEP_EPOCHS: expected epochs in their order");
}

void check_memory(const ZeroKeys& zero) {
  const bool by_budget = zero.recompute == RecomputePolicy::kBudget;
  expect(by_budget == (zero.recompute_budget > 0),
         by_budget ? "ZERO.RECOMPUTE budget: expected ZERO.RECOMPUTE_BUDGET BYTES, got none"
                   : "ZERO.RECOMPUTE_BUDGET: expected ZERO.RECOMPUTE budget beside it");
  const bool to_disk =
      zero.offload_optimizer == Tier::kNvme || zero.offload_parameters == Tier::kNvme;
  expect(to_disk != zero.nvme_directory.empty(),
         to_disk
             ? "ZERO.NVME_DIRECTORY: expected a folder on a local disk for what is offloaded to "
               "nvme, got none"
             : "ZERO.NVME_DIRECTORY: nothing is offloaded to nvme; leave it out, or set "
               "ZERO.OFFLOAD_OPTIMIZER or OFFLOAD_PARAMETERS to nvme");
}

}  // namespace

void check(const Config& config, int ranks) {
  expect(!config.out_dir.empty(),
         "OUT_DIR: expected a folder for what the run writes; give it in the file or as OUT_DIR "
         "FOLDER");
  expect(!config.eval_only || config.auto_resume || !config.load_weights.empty(),
         "EVAL_ONLY: expected weights to validate; set AUTO_RESUME true, or LOAD_WEIGHTS FILE");
  below("MODEL.BATCH_NORM_MOMENTUM", config.model.batch_norm_momentum, 1);
  check_data(config);
  check_training(config, ranks);
  check_optimizer(config.optimizer);
  check_schedule(config);
  check_memory(config.zero);
}

}  // namespace train_imagenet
