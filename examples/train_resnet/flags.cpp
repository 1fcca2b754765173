#include "examples/train_resnet/flags.h"

#include <cstdlib>
#include <optional>

#include <CLI/CLI.hpp>

#include "examples/command_line/command_line.h"

namespace train_resnet {

Flags read_flags(int argc, char** argv) {
  Flags flags;
  CLI::App app("ResNet-18 on Fashion-MNIST, on one rank or several");
  app.option_defaults()->always_capture_default();
  app.add_option("--data", flags.data, "the folder of scripts/get_data.sh fashion-mnist");
  app.add_option("--ranks", flags.ranks, "local ranks to start, unless a launcher did")
      ->check(CLI::Range(1, 64));
  app.add_flag("--as-threads", flags.as_threads, "these ranks are threads of one process");
  app.add_option("--device", flags.device,
                 "where ranks train; on cuda they share what devices there are")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--threads", flags.threads, "of a rank; 0: the cores shared among local ranks")
      ->check(examples::non_negative());
  app.add_option("--stage", flags.stage, "of ZeRO")->check(CLI::Range(0, 3));
  app.add_flag("--sync-batch-norm", flags.sync_batch_norm,
               "normalises over the batches of all ranks, so that their number does not matter");
  app.add_option("--epochs", flags.epochs)->check(examples::positive());
  app.add_option("--steps", flags.steps, "ends after so many, an epoch or not; 0: does not")
      ->check(examples::non_negative());
  app.add_option("--batch", flags.batch, "of all ranks together")->check(examples::positive());
  app.add_option("--width", flags.width, "channels of the first stage")
      ->check(examples::positive());
  app.add_option("--lr", flags.learning_rate, "at the beginning; a cosine to 0")
      ->check(examples::positive());
  app.add_option("--momentum", flags.momentum)->check(CLI::Range(0.0, 1.0));
  app.add_option("--weight-decay", flags.weight_decay)->check(examples::non_negative());
  app.add_option("--seed", flags.seed, "of weights, order and augmentation");
  app.add_option("--loader-threads", flags.loader_threads, "that make batches ahead; 0: none")
      ->check(CLI::Range(0, 64));
  app.add_option("--report-every", flags.report_every, "steps")->check(examples::positive());
  app.add_flag("--by-rank", flags.by_rank, "prints what each rank by itself has, too");
  app.add_option("--json", flags.json, "a file for what this run measured");
  app.add_option("--table", flags.table,
                 "a file of runs, which this one is added to and printed with");
  CLI::Option* const save = app.add_option(
      "--save", flags.save,
      "a folder for states; SIGTERM and Ctrl-C then save, and the exit code is 143 or 130");
  app.add_option("--save-every", flags.save_every, "steps; 0: at the end")
      ->check(examples::non_negative());
  CLI::Option* const resume =
      app.add_option("--resume", flags.resume, "a folder of states, at any number of ranks");
  app.add_flag("--auto-resume", flags.auto_resume,
               "goes on from the newest whole state of --save, if there is one")
      ->needs(save)
      ->excludes(resume);
  app.add_option("--pause", flags.pause_ms, "milliseconds after each step, for trying out signals")
      ->check(examples::non_negative());
  if (const std::optional<int> ended = examples::parse(app, argc, argv)) std::exit(*ended);
  return flags;
}

}  // namespace train_resnet
