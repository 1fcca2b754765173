// The tables of Config (zeropage/fields.h).
#pragma once

#include <zeropage/fields.h>
#include <zeropage/option_fields.h>

#include "train_imagenet/config.h"

namespace train_imagenet {

constexpr auto words_of(std::type_identity<DeviceName>) {
  using zeropage::memory::word;
  return std::array{word<DeviceName::kCpu>("cpu"), word<DeviceName::kCuda>("cuda")};
}

constexpr auto words_of(std::type_identity<OptimizerName>) {
  using zeropage::memory::word;
  return std::array{word<OptimizerName::kSgd>("sgd"), word<OptimizerName::kAdamW>("adamw"),
                    word<OptimizerName::kLamb>("lamb"),
                    word<OptimizerName::kAdafactor>("adafactor")};
}

constexpr auto words_of(std::type_identity<ScheduleName>) {
  using zeropage::memory::word;
  return std::array{word<ScheduleName::kConstant>("constant"),
                    word<ScheduleName::kCosine>("cosine"), word<ScheduleName::kStep>("step")};
}

constexpr auto words_of(std::type_identity<RecomputePolicy>) {
  using zeropage::memory::word;
  return std::array{word<RecomputePolicy::kNone>("none"),
                    word<RecomputePolicy::kSelective>("selective"),
                    word<RecomputePolicy::kBudget>("budget")};
}

constexpr auto table_of(std::type_identity<ModelKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Model", field<&ModelKeys::name>({.help = "Network (examples/image_models)"}),
      field<&ModelKeys::classes>(
          {.help = "Classes that the network tells apart; at least the data's",
           .default_word = "the data's",
           .bounds = Bounds::not_negative()}),
      field<&ModelKeys::width>({.help = "Channels of the network's first stage; the others follow",
                                .default_word = "the network's",
                                .bounds = Bounds::not_negative()}),
      field<&ModelKeys::sync_batch_norm>(
          {.help = "Batch norms use the samples of all ranks, not of each alone"}),
      field<&ModelKeys::batch_norm_momentum>(
          {.help = "Share of a batch in the running statistics that validation uses; larger for a "
                   "short run",
           .default_word = "the network's"})));
}
static_assert(zeropage::memory::tells_all_fields<ModelKeys>());

constexpr auto table_of(std::type_identity<DataKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Data",
      field<&DataKeys::train>(
          {.help = "Folder with a folder for each class, of PNG and JPEG files"}),
      field<&DataKeys::validation>({.help = "Such a folder, with the same classes",
                                    .default_word = "held out of DATA.TRAIN"}),
      field<&DataKeys::held_out>(
          {.help = "Samples of DATA.TRAIN to hold out for validation, in proportion to the classes",
           .bounds = Bounds::not_negative()}),
      field<&DataKeys::image_side>({.help = "Side of the images that the network sees, in pixels",
                                    .bounds = Bounds::positive()}),
      field<&DataKeys::short_side>({.help = "Shorter side of an image before validation crops it; "
                                            "larger images are kept at this size",
                                    .default_word = "IMAGE_SIDE x 8 / 7",
                                    .bounds = Bounds::not_negative()}),
      field<&DataKeys::least_area>(
          {.help = "Smallest share of an image's area that a crop for training has"}),
      field<&DataKeys::flip>({.help = "Mirror half of the images"}),
      field<&DataKeys::colour_jitter>(
          {.help = "How much brightness, contrast and saturation vary, 0 to 1"}),
      field<&DataKeys::mean>({.help = "Mean of red, green and blue, 0 to 1; it is subtracted"}),
      field<&DataKeys::deviation>(
          {.help = "Standard deviation of red, green and blue; colours are divided by it"}),
      field<&DataKeys::loader_threads>(
          {.help = "Threads of a rank that make batches ahead; 0: none",
           .bounds = Bounds::range(0, 64)}),
      field<&DataKeys::in_memory>({.help = "Read all images at the start; false: each when it is "
                                           "used, for a data set larger than memory"}),
      field<&DataKeys::most_broken_files>(
          {.help = "Unreadable files that a rank names, counts and replaces; one more ends the run",
           .bounds = Bounds::not_negative()})));
}
static_assert(zeropage::memory::tells_all_fields<DataKeys>());

constexpr auto table_of(std::type_identity<TrainKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Training",
      field<&TrainKeys::epochs>({.help = "Passes over the data", .bounds = Bounds::positive()}),
      field<&TrainKeys::steps>({.help = "End after this many steps, within an epoch too",
                                .default_word = "all epochs",
                                .bounds = Bounds::not_negative()}),
      field<&TrainKeys::batch>({.help = "Samples of a step, over all ranks and micro-batches",
                                .bounds = Bounds::positive()}),
      field<&TrainKeys::accumulation>(
          {.help = "Micro-batches of a step on each rank", .bounds = Bounds::positive()}),
      field<&TrainKeys::label_smoothing>(
          {.help = "Share of a label that is spread over all classes (Szegedy et al. 2016)"}),
      field<&TrainKeys::mixup>({.help = "alpha of mixup (Zhang et al. 2018); 0: none"}),
      field<&TrainKeys::average_decay>({.help = "Decay of an average of the weights, which is "
                                                "validated and exported too; 0: no average"}),
      field<&TrainKeys::clip_norm>({.help = "Largest norm of the gradient; 0: any"}),
      field<&TrainKeys::seed>({.help = "Seed of weights, order and augmentation"})));
}
static_assert(zeropage::memory::tells_all_fields<TrainKeys>());

constexpr auto table_of(std::type_identity<OptimizerKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(
      section("Optimizer", field<&OptimizerKeys::name>({.help = "Optimizer"}),
              field<&OptimizerKeys::learning_rate>(
                  {.help = "Learning rate for REFERENCE_BATCH samples a step; in proportion for "
                           "others (Goyal et al. 2017)"}),
              field<&OptimizerKeys::reference_batch>(
                  {.help = "Samples of a step that LEARNING_RATE is for; 0: any number",
                   .bounds = Bounds::not_negative()}),
              field<&OptimizerKeys::momentum>({.help = "Momentum of sgd"}),
              field<&OptimizerKeys::nesterov>({.help = "Nesterov's form of that momentum"}),
              field<&OptimizerKeys::betas>({.help = "Betas of adamw and lamb"}),
              field<&OptimizerKeys::weight_decay>({.help = "Decay of weights"}),
              field<&OptimizerKeys::decay_vectors>({.help = "Decay biases and norms too"})));
}
static_assert(zeropage::memory::tells_all_fields<OptimizerKeys>());

constexpr auto table_of(std::type_identity<ScheduleKeys>) {
  using zeropage::memory::field, zeropage::memory::section;
  return std::tuple(
      section("Schedule", field<&ScheduleKeys::name>({.help = "How the learning rate falls"}),
              field<&ScheduleKeys::warmup_epochs>(
                  {.help = "Epochs in which the learning rate rises in a line first"}),
              field<&ScheduleKeys::warmup_factor>(
                  {.help = "Share of the learning rate at the beginning of those epochs"}),
              field<&ScheduleKeys::step_epochs>(
                  {.help = "Epochs at which the schedule step lowers the learning rate"}),
              field<&ScheduleKeys::step_factor>({.help = "Factor by which it does"})));
}
static_assert(zeropage::memory::tells_all_fields<ScheduleKeys>());

constexpr auto table_of(std::type_identity<ZeroKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Sharding and memory",
      field<&ZeroKeys::stage>(
          {.help = "What is sharded: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters",
           .bounds = Bounds::range(0, 3)}),
      field<&ZeroKeys::dtype>({.help = "Dtype of weights and activations", .default_word = "fp32"}),
      field<&ZeroKeys::recompute>({.help = "Activations that backward computes again: none, cheap "
                                           "ones, or as many as RECOMPUTE_BUDGET demands"}),
      field<&ZeroKeys::recompute_budget>(
          {.help = "Most bytes of activations on a rank, such as 512MiB",
           .unit = zeropage::memory::kBytes,
           .bounds = Bounds::not_negative()}),
      field<&ZeroKeys::offload_optimizer>({.help = "Where the optimizer's states are"}),
      field<&ZeroKeys::offload_parameters>({.help = "Where sharded parameters are (STAGE 3)"}),
      field<&ZeroKeys::offload_activations>(
          {.help = "Keep activations on the host until backward; for an accelerator"}),
      field<&ZeroKeys::nvme_directory>({.help = "Folder on a local disk, for nvme"})));
}
static_assert(zeropage::memory::tells_all_fields<ZeroKeys>());

constexpr auto table_of(std::type_identity<RunKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Ranks", field<&RunKeys::device>({.help = "Device of the tensors"}),
      field<&RunKeys::threads>({.help = "Threads of a rank",
                                .default_word = "the cores shared among the host's ranks",
                                .bounds = Bounds::not_negative()}),
      field<&RunKeys::report_every>(
          {.help = "Steps between two lines of progress", .bounds = Bounds::positive()}),
      field<&RunKeys::save_every>(
          {.help = "Steps between two states; 0: an epoch", .bounds = Bounds::not_negative()}),
      field<&RunKeys::keep_states>(
          {.help = "Newest states to keep; 0: all", .bounds = Bounds::not_negative()}),
      field<&RunKeys::validation_batch>(
          {.help = "Samples of a rank's batch in validation", .bounds = Bounds::positive()})));
}
static_assert(zeropage::memory::tells_all_fields<RunKeys>());

constexpr auto table_of(std::type_identity<Config>) {
  using zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "The run", field<&Config::out_dir>({.help = "Folder for all that the run writes"}),
      field<&Config::auto_resume>(
          {.help = "Continue from the newest state in OUT_DIR, if there is one"}),
      field<&Config::eval_only>(
          {.help = "Validate LOAD_WEIGHTS or, if that is empty, the newest state in OUT_DIR"}),
      field<&Config::load_weights>(
          {.help = "Safetensors file or state to begin from; a head of other classes is left out"}),
      field<&Config::model>({.help = "MODEL"}), field<&Config::data>({.help = "DATA"}),
      field<&Config::train>({.help = "TRAIN"}), field<&Config::optimizer>({.help = "OPTIMIZER"}),
      field<&Config::schedule>({.help = "SCHEDULE"}), field<&Config::zero>({.help = "ZERO"}),
      field<&Config::run>({.help = "RUN"})));
}
static_assert(zeropage::memory::tells_all_fields<Config>());

}  // namespace train_imagenet
