#include "language_model/program/train_flags.h"

#include <CLI/CLI.hpp>
#include <zeropage/check.h>

#include "command_line/command_line.h"

namespace zp_lm {
namespace {

void add_text(CLI::App& app, TrainFlags& flags) {
  constexpr const char* kGroup = "Text";
  CLI::Option_group* const kinds = app.add_option_group(kGroup, "One kind of:");
  kinds->add_option("--text", flags.texts, "Files of text; each is a document");
  kinds->add_option("--tokens", flags.tokens,
                    "A file of tokens, as `zp tokens make`, nanoGPT and llm.c write it");
  kinds->add_option("--chat", flags.chat,
                    "Conversations or instructions as lines of JSON; answers alone are learned");
  kinds->require_option(1);
  app.add_option("--system", flags.system,
                 "The system's message of conversations that do not begin with one")
      ->group(kGroup);
  app.add_option("--held-out-share", flags.held_out_share,
                 "Share of the rows, from the end, that is not trained on; 0: none")
      ->check(CLI::Range(0.0, 0.9))
      ->group(kGroup);
  app.add_option("--held-out-rows", flags.held_out_rows, "The most of them that are looked at")
      ->check(examples::positive())
      ->group(kGroup);
  app.add_option("--length", flags.length, "Tokens of a row; 0: up to 512, as the model can")
      ->check(examples::non_negative())
      ->group(kGroup);
  app.add_flag("--join-documents", flags.joins_documents,
               "Let a token see the documents before its own in a row")
      ->group(kGroup);
}

void add_steps(CLI::App& app, language_model::TrainingOptions& options) {
  constexpr const char* kGroup = "Steps";
  app.add_option("--steps", options.steps, "Steps of the optimizer")
      ->check(examples::positive())
      ->group(kGroup);
  app.add_option("--batch", options.batch, "Rows of a step, over all ranks")
      ->check(examples::positive())
      ->group(kGroup);
  app.add_option("--micro-batch", options.micro_batch, "Rows of one forward of a rank")
      ->check(examples::positive())
      ->group(kGroup);
  app.add_option("--lr", options.learning_rate, "Highest learning rate")
      ->check(examples::positive())
      ->group(kGroup);
  app.add_option("--least-lr", options.least_rate,
                 "Learning rate at the end, where the cosine arrives, as a share of --lr")
      ->check(CLI::Range(0.0, 1.0))
      ->group(kGroup);
  app.add_option("--warm-up", options.warm_up, "Steps over which the learning rate rises")
      ->check(examples::non_negative())
      ->group(kGroup);
  app.add_option("--weight-decay", options.weight_decay, "AdamW's, of matrices")
      ->check(examples::non_negative())
      ->group(kGroup);
  app.add_option("--beta1", options.beta1, "AdamW's decay of the first moment")
      ->check(CLI::Range(0.0, 0.9999999))
      ->group(kGroup);
  app.add_option("--beta2", options.beta2, "AdamW's decay of the second moment")
      ->check(CLI::Range(0.0, 0.9999999))
      ->group(kGroup);
  app.add_option("--clip-norm", options.clip_norm, "The gradient's largest norm; 0: any")
      ->check(examples::non_negative())
      ->group(kGroup);
}

void add_memory(CLI::App& app, TrainFlags& flags) {
  constexpr const char* kGroup = "Memory";
  app.add_option("--states", flags.states, "What the optimizer's states are kept in")
      ->check(CLI::IsMember({"fp32", "bf16", "8bit"}))
      ->group(kGroup);
  app.add_flag("--recompute-layers", flags.recomputes_layers,
               "Keep each layer's input alone, and compute the rest again in backward")
      ->group(kGroup);
  examples::add_bytes(app, "--activation-budget", flags.options.activation_budget_bytes, 1,
                      "The most activations, for which operators are computed again")
      ->group(kGroup);
  app.add_option("--optimizer-on", flags.optimizer_tier,
                 "Where the optimizer's fp32 values and states are")
      ->check(CLI::IsMember({"device", "host", "nvme"}))
      ->group(kGroup);
}

void add_adapters(CLI::App& app, TrainFlags& flags) {
  constexpr const char* kGroup = "Adapters";
  app.add_option("--rank", flags.adapter.rank, "Rank of the change to a layer")
      ->check(examples::positive())
      ->group(kGroup);
  app.add_option("--alpha", flags.adapter.alpha, "The change is multiplied by alpha / rank")
      ->check(examples::positive())
      ->group(kGroup);
  app.add_option("--dropout", flags.adapter.dropout,
                 "Share of an adapter's inputs that is dropped in training")
      ->check(CLI::Range(0.0, 0.99))
      ->group(kGroup);
  app.add_option("--layers", flags.layers,
                 "Ends of the names of layers that get one, such as q_proj; default: all layers")
      ->group(kGroup);
  app.add_option("--merged", flags.merged, "Folder for the model with its adapters merged")
      ->group(kGroup);
}

void add_run(CLI::App& app, TrainFlags& flags) {
  constexpr const char* kGroup = "Run";
  const bool has_adapters = flags.training == Training::kAdapters;
  app.add_option("--out", flags.out,
                 has_adapters ? "Folder for the trained adapters, as peft has them"
                              : "Folder for the trained model, as Hugging Face has it")
      ->group(kGroup);
  add_export_dtype(app, flags.export_dtype);
  app.get_option("--export-dtype")->group(kGroup);
  CLI::Option* const save = app.add_option(
      "--save", flags.options.save,
      "Folder for states; SIGTERM and Ctrl-C then save, and the exit code is 143 or 130");
  save->group(kGroup);
  app.add_option("--save-every", flags.options.save_every,
                 "Steps between two states; 0: at the end")
      ->check(examples::non_negative())
      ->group(kGroup);
  app.add_flag(
         "--resume", flags.goes_on,
         "Go on from the newest whole state of --save, at any number of ranks, if there is one")
      ->needs(save)
      ->group(kGroup);
  app.add_option("--evaluate-every", flags.options.evaluate_every,
                 "Steps between two losses on held-out text; 0: at the beginning and the end")
      ->check(examples::non_negative())
      ->group(kGroup);
  app.add_option("--report-every", flags.report_every, "Steps between two lines")
      ->check(examples::positive())
      ->group(kGroup);
  app.add_option("--seed", flags.seed, "Seed of the rows' order, and of weights that are drawn")
      ->group(kGroup);
}

}  // namespace

void add_train_flags(CLI::App& app, TrainFlags& flags) {
  switch (flags.training) {
    case Training::kAllWeights:
      break;
    case Training::kAdapters:
      flags.options.learning_rate = 2e-4;
      flags.options.weight_decay = 0;
      break;
    case Training::kFromTheBeginning:
      flags.options.learning_rate = 6e-4;
      flags.options.weight_decay = 0.1;
      flags.options.warm_up = 100;
      flags.options.steps = 1000;
  }
  add_model_flags(app, flags.model);
  add_text(app, flags);
  add_steps(app, flags.options);
  if (flags.training == Training::kAdapters) add_adapters(app, flags);
  add_memory(app, flags);
  add_run(app, flags);
  add_run_flags(app, flags.run);
  constexpr const char* kRanks = "Ranks";
  app.add_option(
         "--context", flags.context,
         "Neighbouring ranks that have the same rows, and each of them some of their tokens")
      ->check(CLI::Range(1, 1024))
      ->group(kRanks);
  app.add_option("--context-form", flags.context_form, "How attention runs over their tokens")
      ->check(CLI::IsMember({"ring", "ulysses"}))
      ->group(kRanks);
  if (flags.training == Training::kAdapters) return;
  app.add_option("--expert-parallel", flags.expert_parallel,
                 "Neighbouring ranks that have the experts of each layer between them")
      ->check(CLI::Range(1, 1024))
      ->group(kRanks);
}

zeropage::Options sharding_of(const TrainFlags& flags) {
  using zeropage::StateFormat;
  zeropage::Options options = sharding_of(flags.run);
  if (flags.states == "bf16") options.optimizer_state = StateFormat::kBf16;
  if (flags.states == "8bit") options.optimizer_state = StateFormat::k8Bit;
  options.offload.optimizer = tier_of(flags.optimizer_tier);
  ZP_CHECK(flags.optimizer_tier != "nvme" || !flags.run.nvme_folder.empty(),
           "--optimizer-on nvme: name a folder on a local disk with --nvme DIR");
  ZP_CHECK(flags.run.parameter_tier == "device" || flags.optimizer_tier != "device",
           "--parameters-on ", flags.run.parameter_tier,
           ": the optimizer would bring parameters back for its step; give --optimizer-on host or "
           "nvme too");
  ZP_CHECK(flags.expert_parallel == 1 || flags.options.activation_budget_bytes == 0,
           "--expert-parallel ", flags.expert_parallel,
           ": ranks get other numbers of tokens for their experts, and --activation-budget would "
           "keep other tensors on each; give --recompute-layers");
  ZP_CHECK(flags.expert_parallel == 1 || flags.context == 1, "--expert-parallel ",
           flags.expert_parallel, " and --context ", flags.context,
           ": expected one of both; leave the other out");
  return options;
}

std::vector<std::string> adapter_layers(const TrainFlags& flags,
                                        const language_model::ModelConfig& config) {
  if (!flags.layers.empty()) return flags.layers;
  if (config.experts) return {"q_proj", "k_proj", "v_proj", "o_proj"};
  if (config.architecture == language_model::Architecture::kGpt2)
    return {"c_attn", "c_proj", "c_fc"};
  return {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};
}

}  // namespace zp_lm
