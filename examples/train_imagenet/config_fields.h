// The tables of Config (memory/fields.h).
#pragma once

#include "examples/train_imagenet/config.h"
#include "memory/fields.h"
#include "zero/option_fields.h"

namespace train_imagenet {

constexpr auto words_of(std::type_identity<DeviceName>) {
  using zeropage::memory::word;
  return std::array{word<DeviceName::kCpu>("cpu"), word<DeviceName::kCuda>("cuda")};
}

constexpr auto words_of(std::type_identity<OptimizerName>) {
  using zeropage::memory::word;
  return std::array{word<OptimizerName::kSgd>("sgd"), word<OptimizerName::kAdamW>("adamw"),
                    word<OptimizerName::kLamb>("lamb")};
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
      "Model", field<&ModelKeys::name>({.help = "Which network (examples/image_models)"}),
      field<&ModelKeys::classes>(
          {.help = "Scores it gives; at least as many as the data has classes",
           .default_word = "the data's",
           .bounds = Bounds::not_negative()}),
      field<&ModelKeys::width>({.help = "Channels of its first stage; the others follow",
                                .default_word = "the network's",
                                .bounds = Bounds::not_negative()}),
      field<&ModelKeys::sync_batch_norm>(
          {.help = "Batch norms see the samples of all ranks, not of each alone"}),
      field<&ModelKeys::batch_norm_momentum>(
          {.help = "Share of a batch in the running statistics that validation uses; a short run "
                   "wants more of it than a long one",
           .default_word = "the network's"})));
}
static_assert(zeropage::memory::tells_all_fields<ModelKeys>());

constexpr auto table_of(std::type_identity<DataKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Data",
      field<&DataKeys::train>({.help = "A folder with a folder a class, of PNG and JPEG files"}),
      field<&DataKeys::validation>(
          {.help = "The same, with the same classes", .default_word = "held out of DATA.TRAIN"}),
      field<&DataKeys::held_out>(
          {.help = "Samples of DATA.TRAIN that are for validation, of each class its share",
           .bounds = Bounds::not_negative()}),
      field<&DataKeys::image_side>(
          {.help = "Pixels that the network sees", .bounds = Bounds::positive()}),
      field<&DataKeys::short_side>(
          {.help = "Shorter side of an image before it is cut for validation; larger ones are "
                   "kept no larger",
           .default_word = "IMAGE_SIDE x 8 / 7",
           .bounds = Bounds::not_negative()}),
      field<&DataKeys::least_area>(
          {.help = "Smallest share of an image's area that training cuts"}),
      field<&DataKeys::flip>({.help = "Half of the images are mirrored"}),
      field<&DataKeys::colour_jitter>(
          {.help = "How much brightness, contrast and saturation vary, 0 to 1"}),
      field<&DataKeys::mean>({.help = "Of red, green and blue, 0 to 1; subtracted"}),
      field<&DataKeys::deviation>({.help = "Of red, green and blue; divided by"}),
      field<&DataKeys::loader_threads>(
          {.help = "Of a rank, that make batches ahead; 0: none", .bounds = Bounds::range(0, 64)}),
      field<&DataKeys::in_memory>(
          {.help = "All images are read at the start; else each whenever it is used, as for a data "
                   "set larger than memory"}),
      field<&DataKeys::most_broken_files>(
          {.help =
               "Files that a rank may fail to read as they are used: each is named, counted and "
               "replaced; one more ends the run",
           .bounds = Bounds::not_negative()})));
}
static_assert(zeropage::memory::tells_all_fields<DataKeys>());

constexpr auto table_of(std::type_identity<TrainKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Training",
      field<&TrainKeys::epochs>({.help = "Passes over the data", .bounds = Bounds::positive()}),
      field<&TrainKeys::steps>({.help = "Ends after so many steps, an epoch or not",
                                .default_word = "all epochs",
                                .bounds = Bounds::not_negative()}),
      field<&TrainKeys::batch>(
          {.help = "Samples of a step, of all ranks and micro-batches together",
           .bounds = Bounds::positive()}),
      field<&TrainKeys::accumulation>(
          {.help = "Micro-batches of a step on each rank", .bounds = Bounds::positive()}),
      field<&TrainKeys::label_smoothing>(
          {.help = "Share of a label that goes to all classes alike (Szegedy et al. 2016)"}),
      field<&TrainKeys::mixup>({.help = "alpha of mixup (Zhang et al. 2018); 0: none"}),
      field<&TrainKeys::average_decay>(
          {.help = "Of an average of the weights, which is validated and exported too; 0: none"}),
      field<&TrainKeys::clip_norm>({.help = "Largest norm of the gradient; 0: any"}),
      field<&TrainKeys::seed>({.help = "Of weights, order and augmentation"})));
}
static_assert(zeropage::memory::tells_all_fields<TrainKeys>());

constexpr auto table_of(std::type_identity<OptimizerKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Optimizer", field<&OptimizerKeys::name>({.help = "Which"}),
      field<&OptimizerKeys::learning_rate>(
          {.help =
               "For REFERENCE_BATCH samples a step; in proportion for others (Goyal et al. 2017)"}),
      field<&OptimizerKeys::reference_batch>(
          {.help = "0: LEARNING_RATE is for any batch", .bounds = Bounds::not_negative()}),
      field<&OptimizerKeys::momentum>({.help = "Of sgd"}),
      field<&OptimizerKeys::nesterov>({.help = "Of sgd: Nesterov's momentum"}),
      field<&OptimizerKeys::betas>({.help = "Of adamw"}),
      field<&OptimizerKeys::weight_decay>({.help = "Of weights"}),
      field<&OptimizerKeys::decay_vectors>({.help = "Of biases and norms too"})));
}
static_assert(zeropage::memory::tells_all_fields<OptimizerKeys>());

constexpr auto table_of(std::type_identity<ScheduleKeys>) {
  using zeropage::memory::field, zeropage::memory::section;
  return std::tuple(
      section("Schedule", field<&ScheduleKeys::name>({.help = "How the learning rate falls"}),
              field<&ScheduleKeys::warmup_epochs>({.help = "In which it rises in a line first"}),
              field<&ScheduleKeys::warmup_factor>({.help = "Its share at the beginning of that"}),
              field<&ScheduleKeys::step_epochs>({.help = "Of step: where it falls"}),
              field<&ScheduleKeys::step_factor>({.help = "Of step: times what"})));
}
static_assert(zeropage::memory::tells_all_fields<ScheduleKeys>());

constexpr auto table_of(std::type_identity<ZeroKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Sharding and memory",
      field<&ZeroKeys::stage>(
          {.help = "What is sharded: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters",
           .bounds = Bounds::range(0, 3)}),
      field<&ZeroKeys::dtype>({.help = "Of weights and activations", .default_word = "fp32"}),
      field<&ZeroKeys::recompute>(
          {.help = "Which activations are computed again in backward: none, those that are cheap, "
                   "or as many as RECOMPUTE_BUDGET demands"}),
      field<&ZeroKeys::recompute_budget>(
          {.help = "Most bytes of activations of a rank, such as 512MiB",
           .unit = zeropage::memory::kBytes,
           .bounds = Bounds::not_negative()}),
      field<&ZeroKeys::offload_optimizer>({.help = "Where the optimizer's states are"}),
      field<&ZeroKeys::offload_parameters>({.help = "Where sharded parameters are (STAGE 3)"}),
      field<&ZeroKeys::offload_activations>(
          {.help = "Activations wait for backward on the host; for an accelerator"}),
      field<&ZeroKeys::nvme_directory>({.help = "A folder on a local disk, for nvme"})));
}
static_assert(zeropage::memory::tells_all_fields<ZeroKeys>());

constexpr auto table_of(std::type_identity<RunKeys>) {
  using zeropage::memory::Bounds, zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "Ranks", field<&RunKeys::device>({.help = "Where tensors are"}),
      field<&RunKeys::threads>({.help = "Of a rank",
                                .default_word = "the cores shared among the host's ranks",
                                .bounds = Bounds::not_negative()}),
      field<&RunKeys::report_every>(
          {.help = "Steps between two lines", .bounds = Bounds::positive()}),
      field<&RunKeys::save_every>(
          {.help = "Steps between states; 0: an epoch", .bounds = Bounds::not_negative()}),
      field<&RunKeys::keep_states>(
          {.help = "Newest states that stay; 0: all", .bounds = Bounds::not_negative()}),
      field<&RunKeys::validation_batch>(
          {.help = "Samples of a rank's batch in a validation", .bounds = Bounds::positive()})));
}
static_assert(zeropage::memory::tells_all_fields<RunKeys>());

constexpr auto table_of(std::type_identity<Config>) {
  using zeropage::memory::field, zeropage::memory::section;
  return std::tuple(section(
      "The run", field<&Config::out_dir>({.help = "The folder for all that the run writes"}),
      field<&Config::auto_resume>(
          {.help = "Goes on from the newest state of OUT_DIR, if there is one"}),
      field<&Config::eval_only>(
          {.help = "Validates LOAD_WEIGHTS, or where that is empty the newest state of OUT_DIR"}),
      field<&Config::load_weights>(
          {.help =
               "A safetensors file or a state to begin from; a head of other classes is left out"}),
      field<&Config::model>({.help = "MODEL"}), field<&Config::data>({.help = "DATA"}),
      field<&Config::train>({.help = "TRAIN"}), field<&Config::optimizer>({.help = "OPTIMIZER"}),
      field<&Config::schedule>({.help = "SCHEDULE"}), field<&Config::zero>({.help = "ZERO"}),
      field<&Config::run>({.help = "RUN"})));
}
static_assert(zeropage::memory::tells_all_fields<Config>());

}  // namespace train_imagenet
