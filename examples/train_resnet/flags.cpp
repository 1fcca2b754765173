#include "train_resnet/flags.h"

#include <cstdlib>
#include <optional>

#include <CLI/CLI.hpp>

#include "command_line/command_line.h"

namespace train_resnet {

Flags read_flags(int argc, char** argv) {
  Flags flags;
  CLI::App app("ResNet-18 on Fashion-MNIST, on one rank or several");
  app.option_defaults()->always_capture_default();
  app.add_option("--data", flags.data, "Folder of scripts/get_data.sh fashion-mnist");
  app.add_option("--ranks", flags.ranks, "Local ranks to start, unless a launcher did")
      ->check(CLI::Range(1, 64));
  app.add_flag("--as-threads", flags.as_threads, "Run these ranks as threads of one process");
  app.add_option("--device", flags.device,
                 "Where ranks train; on cuda they share the devices that there are")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--threads", flags.threads,
                 "Threads of a rank; 0: the cores, shared among local ranks")
      ->check(examples::non_negative());
  app.add_option("--stage", flags.stage, "of ZeRO")->check(CLI::Range(0, 3));
  app.add_flag("--sync-batch-norm", flags.sync_batch_norm,
               "Normalise over the batches of all ranks, so that their number does not matter");
  app.add_option("--epochs", flags.epochs)->check(examples::positive());
  app.add_option("--steps", flags.steps,
                 "End after this many steps, within an epoch too; 0: after all epochs")
      ->check(examples::non_negative());
  app.add_option("--batch", flags.batch, "Samples of a step, over all ranks")
      ->check(examples::positive());
  app.add_option("--width", flags.width, "Channels of the first stage")
      ->check(examples::positive());
  app.add_option("--lr", flags.learning_rate,
                 "Learning rate at the beginning; it falls to 0 as a cosine")
      ->check(examples::positive());
  app.add_option("--momentum", flags.momentum)->check(CLI::Range(0.0, 1.0));
  app.add_option("--weight-decay", flags.weight_decay)->check(examples::non_negative());
  app.add_option("--seed", flags.seed, "Seed of weights, order and augmentation");
  app.add_option("--loader-threads", flags.loader_threads,
                 "Threads that make batches ahead; 0: none")
      ->check(CLI::Range(0, 64));
  app.add_option("--report-every", flags.report_every, "steps")->check(examples::positive());
  app.add_flag("--by-rank", flags.by_rank, "Print the figures of each rank too");
  app.add_option("--json", flags.json, "File for what this run measured");
  app.add_option("--table", flags.table,
                 "File of runs, to which this one is added and with which it is printed");
  CLI::Option* const save = app.add_option(
      "--save", flags.save,
      "Folder for states; SIGTERM and Ctrl-C then save, and the exit code is 143 or 130");
  app.add_option("--save-every", flags.save_every, "Steps between two states; 0: at the end")
      ->check(examples::non_negative());
  CLI::Option* const resume = app.add_option(
      "--resume", flags.resume, "Folder of states to continue from, at any number of ranks");
  app.add_flag("--auto-resume", flags.auto_resume,
               "Continue from the newest whole state of --save, if there is one")
      ->needs(save)
      ->excludes(resume);
  app.add_option("--pause", flags.pause_ms,
                 "Milliseconds to wait after each step, for trying out signals")
      ->check(examples::non_negative());
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) std::exit(*ended);
  return flags;
}

}  // namespace train_resnet
