#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <zeropage/bytes.h>
#include <zeropage/check.h>
#include <zeropage/ledger.h>
#include <zeropage/memory_report.h>

#include "command_line/command_line.h"
#include "command_line/stop_signal.h"
#include "language_model/evaluate/evaluation.h"
#include "language_model/program/commands.h"
#include "language_model/program/train_flags.h"
#include "language_model/weights/adapters.h"
#include "language_model/weights/export.h"
#include "language_model/weights/open_model.h"
#include "output_files/output_files.h"
#include "progress/words.h"

namespace zp_lm {
namespace {

using nlohmann::json;
using zeropage::parallel::ContextForm;

// Tokens of a row, where the model takes as many.
constexpr int64_t kLength = 512;
// What local ranks get after a signal to end their step and save.
constexpr std::chrono::minutes kGraceOfSave{5};

// The token between documents; none: they see each other, or the vocabulary has none.
std::optional<language_model::DocumentMark> mark_of(const TrainFlags& flags,
                                                    const language_model::TokenText& text,
                                                    std::optional<int32_t> end) {
  if (!end || flags.joins_documents || text.numel == 0) return std::nullopt;
  int64_t first = 0;
  text.read(0, 1, &first);
  return language_model::DocumentMark{.token = *end, .is_first = first == *end};
}

std::unique_ptr<language_model::TrainingRows> read_rows(const TrainFlags& flags,
                                                        const zeropage::text::Tokenizer& tokenizer,
                                                        int64_t length) {
  using language_model::TokenText;
  namespace text = zeropage::text;
  auto end = tokenizer.document_end();
  if (!flags.chat.empty()) {
    const text::ChatOptions options{.format = chat_template_of(tokenizer), .system = flags.system};
    return std::make_unique<language_model::ChatRows>(
        text::read_chat_examples(flags.chat, tokenizer, options), length, flags.chat);
  }
  TokenText tokens;
  if (!flags.tokens.empty()) {
    auto file = std::make_shared<text::TokenFile>(flags.tokens);
    file->check_vocabulary(tokenizer);
    if (file->vocabulary()) end = file->vocabulary()->document_end;
    tokens = TokenText::of(std::move(file));
  } else {
    std::vector<int32_t> all;
    for (const std::string& file : flags.texts) {
      tokenizer.encode(read_text(file), text::SpecialTokens::kAsText,
                       [&](auto some) { all.insert(all.end(), some.begin(), some.end()); });
      if (end) all.push_back(*end);
    }
    tokens = TokenText::of(std::move(all));
  }
  const auto mark = mark_of(flags, tokens, end);
  return std::make_unique<language_model::PackedRows>(std::move(tokens), length, mark);
}

class Run {
 public:
  Run(const TrainFlags& flags, const zeropage::World& world)
      : flags_(flags),
        world_(world),
        resident_before_(zeropage::memory::peak_resident_bytes()),
        files_(flags.model.model),
        tokenizer_(tokenizer_of(flags.model, files_)),
        length_(length_of(flags, files_.config())),
        all_(read_rows(flags, tokenizer_, length_)),
        cut_(cut_of(flags, all_->count())),
        rows_(*all_, 0, cut_),
        held_out_rows_(*all_, cut_, std::min(all_->count(), cut_ + flags.held_out_rows)),
        model_(open()),
        trainer_(model_, rows_, options_, report(), evaluation()) {}

  int train() {
    say(cost_.words());
    say(std::to_string(rows_.count()) + " rows of " + std::to_string(length_) +
        " tokens to train on");
    trainer_.resume(flags_.goes_on);
    zeropage::memory::reset_peak_resident_bytes();
    const int signal = trainer_.run();
    const zeropage::MemoryReport memory = zeropage::memory_report(world_);
    const auto held = static_cast<int64_t>(world_.max(static_cast<double>(held_)));
    int64_t peak = 0, resident = 0;
    for (const auto& rank : memory.ranks) {
      peak = std::max(peak, rank.at_peak.total());
      resident = std::max(resident, rank.peak_resident_bytes);
    }
    say("a rank holds " + zeropage::format_bytes(held) + " on its device from step to step, " +
        zeropage::format_bytes(peak) + " at its peak, " + zeropage::format_bytes(resident) +
        " resident");
    if (signal == 0) write();
    const int code = signal == 0 ? 0 : examples::exit_code_of(signal);
    if (world_.rank() != 0 || flags_.run.json.empty()) return code;
    json figures = {{"command", flags_.training == Training::kAdapters ? "lora" : "train"},
                    {"ranks", world_.size()},
                    {"context", flags_.context},
                    {"expert_parallel", flags_.expert_parallel},
                    {"stage", flags_.run.stage},
                    {"dtype", flags_.run.dtype},
                    {"parameters", cost_.parameters},
                    {"resident_bytes_before_opening", cost_.resident_before},
                    {"peak_resident_bytes_of_opening", cost_.resident_peak},
                    {"persistent_bytes", held},
                    {"peak_bytes", peak},
                    {"peak_resident_bytes", resident},
                    {"steps", steps_},
                    {"held_out", held_out_}};
    if (signal != 0) figures["ended_by"] = examples::name_of(signal);
    examples::write_output({"--json", flags_.run.json}, figures.dump(1) + "\n");
    return code;
  }

 private:
  static int64_t length_of(const TrainFlags& flags, const language_model::ModelConfig& config) {
    const int64_t longest = language_model::longest_sequence(config);
    ZP_CHECK(flags.length <= longest, "--length ", flags.length,
             ": the model's sequences have up to ", longest, " tokens");
    const int64_t length = flags.length > 0 ? flags.length : std::min(kLength, longest);
    const int64_t chunks = flags.context == 1 ? 1 : 2 * int64_t{flags.context};
    ZP_CHECK(length % chunks == 0, "--context ", flags.context, ": expected a --length of two ",
             "chunks for each of these ranks, a multiple of ", chunks, ", got ", length);
    return length;
  }

  static int64_t cut_of(const TrainFlags& flags, int64_t rows) {
    const int64_t cut =
        rows - static_cast<int64_t>(static_cast<double>(rows) * flags.held_out_share);
    return std::max<int64_t>(1, cut);
  }

  language_model::WrappedModel open() {
    options_ = flags_.options;
    options_.seed = flags_.seed;
    options_.settings = {{"model", flags_.model.model},
                         {"seed", std::to_string(flags_.seed)},
                         {"number of steps", std::to_string(options_.steps)},
                         {"highest learning rate", c10::str(options_.learning_rate)},
                         {"least learning rate's share", c10::str(options_.least_rate)},
                         {"warm-up", std::to_string(options_.warm_up)},
                         {"rows of a step", std::to_string(options_.batch)},
                         {"tokens of a row", std::to_string(length_)},
                         {"number of rows", std::to_string(rows_.count())}};
    if (flags_.training == Training::kAdapters) {
      options_.fixed_settings = {
          {"adapters with --alpha", examples::fixed(flags_.adapter.alpha, 6)}};
    }
    check(options_);
    language_model::OpenOptions open{.sharding = sharding_of(flags_),
                                     .adapters_from = flags_.model.adapters,
                                     .context = flags_.context,
                                     .context_form = flags_.context_form == "ulysses"
                                                         ? ContextForm::kUlysses
                                                         : ContextForm::kRing,
                                     .expert_parallel = flags_.expert_parallel};
    if (flags_.training == Training::kAdapters && flags_.model.adapters.empty()) {
      open.adapters = {.options = flags_.adapter,
                       .layers = adapter_layers(flags_, files_.config()),
                       .seed = flags_.seed};
    }
    auto model = flags_.training == Training::kFromTheBeginning
                     ? language_model::new_model(files_.config(), flags_.seed, world_, open)
                     : language_model::open_model(files_, world_, open);
    cost_ =
        opening_cost(world_, language_model::count_parameters(files_.config()), resident_before_);
    if (flags_.recomputes_layers) model->recompute(zeropage::EveryBlocks::each());
    // Dropout draws other numbers on each rank. Ranks that are threads share the generator, so there another run draws others.
    torch::manual_seed(flags_.seed + 1 + static_cast<uint64_t>(world_.rank()));
    return model;
  }

  std::function<double()> evaluation() {
    if (held_out_rows_.count() == 0) return nullptr;
    return [this] {
      return language_model::evaluate(model_, held_out_rows_, options_.micro_batch).loss;
    };
  }

  language_model::Trainer::Report report() {
    return {
        .step = [this](const auto& step) { report_step(step); },
        .held_out =
            [this](int64_t step, double loss) {
              held_out_.push_back({{"step", step}, {"loss", loss}});
              say("step " + std::to_string(step) + "  held-out loss " + examples::fixed(loss, 4));
            },
        .note = [this](const std::string& note) { say(note); }};
  }

  void report_step(const language_model::TrainedStep& step) {
    // Evaluation leaves pages of parameters whole until the next step.
    held_ = zeropage::memory::Ledger::current()->now(world_.device().type()).persistent();
    steps_.push_back({{"step", step.step},
                      {"loss", step.loss},
                      {"norm", step.norm},
                      {"lr", step.rate},
                      {"targets", step.targets},
                      {"seconds", step.seconds},
                      {"skipped", step.skipped}});
    seconds_ += step.seconds;
    targets_ += step.targets;
    ++steps_since_;
    const bool is_time = step.step % flags_.report_every == 0 || step.step == options_.steps;
    if (!is_time) return;
    const double left = seconds_ / static_cast<double>(steps_since_) *
                        static_cast<double>(options_.steps - step.step);
    char rate[32];
    std::snprintf(rate, sizeof rate, "lr %.2e", step.rate);
    std::vector<std::string> parts = {
        "step " + std::to_string(step.step) + "/" + std::to_string(options_.steps) + "  loss " +
            examples::fixed(step.loss, 4),
        "norm " + examples::fixed(step.norm, 2), rate,
        examples::fixed(static_cast<double>(targets_) / seconds_, 0) + " tokens/s",
        examples::duration(left) + " left"};
    if (step.skipped) parts.emplace_back("skipped");
    say(examples::line_of(parts));
    seconds_ = 0;
    targets_ = steps_since_ = 0;
  }

  void write() {
    const bool is_adapted = flags_.training == Training::kAdapters;
    const language_model::ExportOptions options{.dtype = export_dtype_of(flags_.export_dtype),
                                                .tokenizer_from = tokenizer_path(flags_.model)};
    std::string note;
    if (!flags_.out.empty() && is_adapted) {
      language_model::save_adapters(flags_.out, model_, flags_.model.model, options.dtype);
    } else if (!flags_.out.empty()) {
      note = language_model::export_model(flags_.out, model_, options);
    }
    if (!flags_.merged.empty()) {
      note = language_model::export_model(flags_.merged, model_, options);
    }
    if (!note.empty()) say(note);
    for (const std::string& folder : {flags_.out, flags_.merged}) {
      if (!folder.empty()) say("wrote " + folder);
    }
  }

  void say(const std::string& line) const {
    if (world_.rank() == 0) std::cout << line << std::endl;
  }

  const TrainFlags& flags_;
  const zeropage::World& world_;
  const int64_t resident_before_;
  const language_model::ModelFiles files_;
  const zeropage::text::Tokenizer tokenizer_;
  const int64_t length_;
  const std::unique_ptr<language_model::TrainingRows> all_;
  const int64_t cut_;  // where held-out rows begin
  const language_model::RowRange rows_, held_out_rows_;
  language_model::TrainingOptions options_;
  OpeningCost cost_;
  language_model::WrappedModel model_;
  language_model::Trainer trainer_;
  json steps_ = json::array(), held_out_ = json::array();
  int64_t held_ = 0;    // by this rank behind its last step
  double seconds_ = 0;  // since the last line, as the next two
  int64_t targets_ = 0, steps_since_ = 0;
};

Command command_of(CLI::App& app, Training training, const std::string& name,
                   const std::string& help) {
  const auto flags = std::make_shared<TrainFlags>();
  flags->training = training;
  CLI::App* const command = app.add_subcommand(name, help);
  command->option_defaults()->always_capture_default();
  add_train_flags(*command, *flags);
  return {command, [flags] {
            if (flags->options.micro_batch > flags->options.batch) {
              throw CLI::ValidationError("--micro-batch: more rows than --batch has");
            }
            examples::check_outputs({{"--json", flags->run.json}});
            for (const std::string& folder : {flags->out, flags->merged}) {
              check_out(folder, flags->model);
            }
            const auto run = [&](zeropage::World& world) { return Run(*flags, world).train(); };
            if (flags->options.save.empty()) return on_ranks(flags->run, run);
            return on_ranks(flags->run, run, kGraceOfSave);
          }};
}

}  // namespace

Command finetune_command(CLI::App& app) {
  return command_of(app, Training::kAllWeights, "finetune",
                    "Trains all weights of a model on texts");
}

Command lora_command(CLI::App& app) {
  return command_of(app, Training::kAdapters, "lora",
                    "Trains adapters of low rank beside a model's frozen weights");
}

Command pretrain_command(CLI::App& app) {
  return command_of(app, Training::kFromTheBeginning, "pretrain",
                    "Trains a model of that shape from the beginning");
}

}  // namespace zp_lm
