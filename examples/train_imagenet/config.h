// What a run is asked for. The file's keys are these members in capitals: train.batch is TRAIN.BATCH. What each means is told in
// config_fields.h, of which the README's table is made.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <zeropage/ledger.h>

namespace train_imagenet {

enum class DeviceName : uint8_t { kCpu, kCuda };
enum class OptimizerName : uint8_t { kSgd, kAdamW, kLamb, kAdafactor };
enum class ScheduleName : uint8_t { kConstant, kCosine, kStep };
enum class RecomputePolicy : uint8_t { kNone, kSelective, kBudget };

struct ModelKeys {
  std::string name = "resnet18";
  int64_t classes = 0;  // 0: as many as the data has
  int64_t width = 0;    // 0: the model's own
  bool sync_batch_norm = false;
  double batch_norm_momentum = 0;  // 0: the network's own
};

struct DataKeys {
  std::string train;
  std::string validation;  // "": `held_out` samples of `train`
  int64_t held_out = 0;    // samples
  int64_t image_side = 224;
  int64_t short_side = 0;  // 0: image_side x 8 / 7
  double least_area = 0.08;
  bool flip = true;
  double colour_jitter = 0;
  std::vector<double> mean = {0.485, 0.456, 0.406};
  std::vector<double> deviation = {0.229, 0.224, 0.225};
  int64_t loader_threads = 1;
  bool in_memory = true;
  int64_t most_broken_files = 100;  // of a rank, where images are read as they are used
};

struct TrainKeys {
  int64_t epochs = 90;
  int64_t steps = 0;  // 0: all epochs
  int64_t batch = 256;
  int64_t accumulation = 1;
  double label_smoothing = 0;
  double mixup = 0;
  double average_decay = 0;  // 0: no average
  double clip_norm = 0;      // 0: not clipped
  int64_t seed = 1;
};

struct OptimizerKeys {
  OptimizerName name = OptimizerName::kSgd;
  double learning_rate = 0.1;
  int64_t reference_batch = 256;  // 0: the rate is as it is
  double momentum = 0.9;
  bool nesterov = true;
  std::vector<double> betas = {0.9, 0.999};
  double weight_decay = 1e-4;
  bool decay_vectors = false;
};

struct ScheduleKeys {
  ScheduleName name = ScheduleName::kCosine;
  double warmup_epochs = 0;
  double warmup_factor = 0.1;
  std::vector<int64_t> step_epochs = {30, 60, 80};
  double step_factor = 0.1;
};

struct ZeroKeys {
  int64_t stage = 0;
  std::optional<c10::ScalarType> dtype;  // unset: fp32
  RecomputePolicy recompute = RecomputePolicy::kNone;
  int64_t recompute_budget = 0;
  zeropage::memory::Tier offload_optimizer = zeropage::memory::Tier::kDevice;
  zeropage::memory::Tier offload_parameters = zeropage::memory::Tier::kDevice;
  bool offload_activations = false;
  std::string nvme_directory;
};

struct RunKeys {
  DeviceName device = DeviceName::kCpu;
  int64_t threads = 0;  // of a rank; 0: the cores shared among local ranks
  int64_t report_every = 10;
  int64_t save_every = 0;  // steps; 0: an epoch
  int64_t keep_states = 2;
  int64_t validation_batch = 64;  // of a rank; the same for any number of ranks
};

struct Config {
  std::string out_dir;
  bool auto_resume = true;
  bool eval_only = false;
  std::string load_weights;
  ModelKeys model;
  DataKeys data;
  TrainKeys train;
  OptimizerKeys optimizer;
  ScheduleKeys schedule;
  ZeroKeys zero;
  RunKeys run;

  int64_t short_side() const {
    return data.short_side > 0 ? data.short_side : (data.image_side * 8 + 6) / 7;
  }
};

// Throws ConfigError for values that contradict each other. ranks: of the run.
void check(const Config& config, int ranks);

}  // namespace train_imagenet
