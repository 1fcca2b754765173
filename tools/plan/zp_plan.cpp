// zp-plan: what `zp plan` runs. A program of its own, because LibTorch takes longer to load than zp to run.
// Exit codes: 0; 1 where no setting fits; 2 for a command line or a config.json that makes no sense; 3 where the plan
// cannot be written.
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include "tools/plan/decoder.h"
#include "tools/plan/decoder_shape.h"
#include "tools/plan/plan_json.h"
#include "zeropage/adafactor.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/context_parallel.h"
#include "zeropage/lamb.h"
#include "zeropage/lion.h"
#include "zeropage/muon.h"
#include "zeropage/option_fields.h"
#include "zeropage/plan.h"

namespace zeropage::tools {
namespace {

constexpr int kNothingFits = 1;
constexpr int kUsageError = 2;
constexpr int kNotWritten = 3;
constexpr int64_t kMostTokens = int64_t{1} << 32;

struct Request {
  std::string model;
  std::string config;
  std::string parameters;
  int64_t sequence = 0;
  bool seeks_longest_sequence = false;
  int64_t batch = 1;
  DecoderTiles tiles;
  std::string optimizer = "adamw";
  WorldDescription world;
  PlanOptions options;
  bool predicts_seconds = false;
  bool json = false;
};

using Words = std::map<std::string, std::optional<c10::ScalarType>>;

CLI::Option* add_bytes(CLI::App& app, const char* flag, int64_t& bytes, const char* help) {
  return app
      .add_option_function<std::string>(
          flag,
          [&bytes, flag](const std::string& text) {
            try {
              bytes = memory::parse_bytes(text);
            } catch (const c10::Error& error) {
              throw CLI::ValidationError(flag + (": " + memory::message_of(error)));
            }
          },
          help)
      ->type_name("SIZE");
}

void add_dtype(CLI::App& app, const char* flag, std::optional<c10::ScalarType>& dtype,
               const char* help) {
  static const Words kWords = {
      {"fp32", c10::kFloat}, {"bf16", c10::kBFloat16}, {"fp16", c10::kHalf}};
  app.add_option_function<std::string>(
         flag,
         [&dtype](const std::string& word) {
           dtype = kWords.at(word);
           if (word == "fp32") dtype = c10::kFloat;
         },
         help)
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->type_name("DTYPE");
}

// "7.5e9" or "7.5B".
int64_t read_count(const std::string& text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  const std::string unit(stopped, end);
  const std::map<std::string, double> units = {{"", 1}, {"M", 1e6}, {"B", 1e9}, {"T", 1e12}};
  const auto factor = units.find(unit);
  if (error != std::errc() || factor == units.end() || !(value > 0) || value > 1e15) {
    throw std::invalid_argument("--parameters " + text +
                                ": expected a number such as 7.5B, 350M or 1.5e9");
  }
  return std::llround(value * factor->second);
}

void add_flags(CLI::App& app, Request& request) {
  auto* const what = app.add_option_group("What is trained (one of them)");
  what->add_option("--model", request.model,
                   "gpt:d=WIDTH,layers=N,heads=N or llama:...; besides key_heads, ffn, vocabulary, "
                   "tied (0 or 1), positions (of gpt), and experts, active, expert_ffn")
      ->type_name("SHAPE");
  what->add_option("--config", request.config,
                   "A Hugging Face config.json of GPT-2, Llama, Mistral, Qwen2, Mixtral, Qwen2-MoE "
                   "or Qwen3-MoE")
      ->type_name("FILE");
  what->add_option("--parameters", request.parameters,
                   "Number of parameters, such as 7.5B: plans parameters, gradients and states, no "
                   "activations")
      ->type_name("COUNT");
  what->require_option(1);
  app.add_option("--sequence", request.sequence, "Tokens of a sample")
      ->check(CLI::Range(int64_t{1}, kMostTokens))
      ->type_name("TOKENS");
  app.add_flag(
      "--longest-sequence", request.seeks_longest_sequence,
      "Instead of --sequence: the most tokens of a sample with which a setting fits, to 1 %");
  app.add_option("--batch", request.batch, "Samples of a rank's micro-batch")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 32))
      ->capture_default_str();
  app.add_option("--accumulate", request.options.micro_steps, "Micro-batches of a step")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_flag("--tiled-mlp", request.tiles.mlp,
               "Run the MLPs by tiled(), on some tokens at a time, which backward computes again");
  app.add_flag("--tiled-loss", request.tiles.loss,
               "Compute the loss by linear_cross_entropy(), without the logits of all tokens");
  app.add_option("--world", request.world.ranks, "Ranks")
      ->check(CLI::Range(1, comm::kMostSimulatedRanks))
      ->capture_default_str();
  app.add_option("--ranks-per-host", request.world.ranks_per_host, "The most ranks of a host")
      ->check(CLI::Range(1, comm::kMostSimulatedRanks))
      ->capture_default_str();
  app.add_option("--context", request.world.context,
                 "Neighbouring ranks that share a sample's tokens (context parallelism)")
      ->check(CLI::Range(1, comm::kMostSimulatedRanks))
      ->capture_default_str();
  app.add_option_function<std::string>(
         "--context-form",
         [&request](const std::string& word) {
           request.world.context_form =
               word == "ring" ? parallel::ContextForm::kRing : parallel::ContextForm::kUlysses;
         },
         "How attention runs over their tokens [ring]")
      ->check(CLI::IsMember({"ring", "ulysses"}))
      ->type_name("FORM");
  app.add_option("--expert-parallel", request.world.expert,
                 "Ranks that have some of each layer's experts, to which tokens travel")
      ->check(CLI::Range(1, comm::kMostSimulatedRanks))
      ->capture_default_str();
  add_bytes(app, "--device-memory", request.world.device_memory_bytes,
            "Memory of a rank's device that LibTorch may use: 80GiB or 80GB [no limit]");
  app.add_option_function<std::string>(
         "--allocator",
         [&request](const std::string& word) {
           request.world.allocator.segments =
               word == "fixed" ? AllocatorSegments::kFixed : AllocatorSegments::kExpandable;
         },
         "Segments of LibTorch's CUDA allocator, as PYTORCH_ALLOC_CONF has them in the run "
         "[expandable]")
      ->check(CLI::IsMember({"expandable", "fixed"}))
      ->type_name("SEGMENTS");
  add_bytes(app, "--workspace", request.world.allocator.workspaces.of_products,
            "What cuBLAS keeps for each of two threads: 32MiB on sm_90, 8320KiB on others [32MiB]");
  add_bytes(app, "--host-memory", request.world.host_memory_bytes,
            "Memory of a host, for all of its ranks [no limit]");
  add_bytes(app, "--nvme", request.world.nvme_bytes, "Bytes of a host's disks [no limit]");
  app.add_option("--optimizer", request.optimizer, "Optimizer: LibTorch's class, ours for lion")
      ->check(
          CLI::IsMember({"adamw", "adam", "sgd", "lion", "adagrad", "muon", "lamb", "adafactor"}))
      ->capture_default_str();
  Options& training = request.options.training;
  add_dtype(app, "--compute-dtype", training.compute_dtype,
            "The dtype of parameters, gradients and activations [fp32]");
  add_dtype(app, "--accumulate-dtype", training.accumulate_dtype,
            "The dtype in which gradients are kept and added up [fp32]");
  add_dtype(app, "--reduce-dtype", training.reduce_dtype,
            "The dtype in which gradients travel [that of --compute-dtype]");
  add_bytes(app, "--page-bytes", training.page_bytes,
            "Size of a page, the unit of communication [64MiB]");
  app.add_flag("--seconds", request.predicts_seconds,
               "Predict the seconds of a step from the speeds of this machine, which takes some "
               "seconds and is then cached; the fastest setting comes first");
  app.add_option("--threads", request.options.threads,
                 "Threads of a rank, for --seconds; 0: its part of the host's cores")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_flag("--json", request.json, "One JSON object, sizes in bytes");
}

template <typename A>
std::unique_ptr<ShardedOptimizer> make_optimizer(DistributedDataParallel<Decoder>& model) {
  using AlgorithmOptions = typename OptimizerTraits<A>::Options;
  return std::make_unique<Optimizer<A>>(model, AlgorithmOptions(1e-3));
}

using MakeOptimizer =
    std::function<std::unique_ptr<ShardedOptimizer>(DistributedDataParallel<Decoder>&)>;

MakeOptimizer optimizer_of(const std::string& name) {
  using namespace torch::optim;
  if (name == "adamw") return &make_optimizer<AdamW>;
  if (name == "adam") return &make_optimizer<Adam>;
  if (name == "sgd") return &make_optimizer<SGD>;
  if (name == "lion") return &make_optimizer<Lion>;
  if (name == "lamb") return &make_optimizer<Lamb>;
  if (name == "adafactor") return &make_optimizer<Adafactor>;
  if (name == "muon") {
    return [](DistributedDataParallel<Decoder>& model) -> std::unique_ptr<ShardedOptimizer> {
      return std::make_unique<Optimizer<Muon>>(
          model, muon_groups(model.untyped_module(), MuonOptions(1e-3)));
    };
  }
  return &make_optimizer<Adagrad>;
}

int64_t states_of(const std::string& optimizer) {
  // Adafactor's, as if all were large matrices.
  if (optimizer == "sgd" || optimizer == "adafactor") return 0;
  // Muon's one, as if all were matrices.
  return optimizer == "adamw" || optimizer == "adam" || optimizer == "lamb" ? 2 : 1;
}

// A rank has two chunks of a sample's tokens.
int64_t chunks_of(const Request& request) {
  return request.world.context > 1 ? 2 * int64_t{request.world.context} : 1;
}

Plan plan_of_sequence(const Request& request, const DecoderShape& shape, int64_t sequence) {
  const auto meta = torch::TensorOptions().dtype(torch::kInt64).device(torch::kMeta);
  const at::Tensor tokens = torch::empty({request.batch, sequence / request.world.context}, meta);
  const ModelToPlan<Decoder> model{
      .construct = [&] { return Decoder(shape, sequence, request.tiles); },
      .loss = [&](DistributedDataParallel<Decoder>& wrapped) { return wrapped(tokens, tokens); },
      .checkpoint_blocks = [](Decoder& decoder,
                              checkpointing::EveryBlocks every) { decoder->checkpoint(every); },
      .optimizer = optimizer_of(request.optimizer)};
  return plan(model, request.world, request.options);
}

void check_context(const Request& request, const DecoderShape& shape) {
  const std::string who = "--context " + std::to_string(request.world.context) + ": ";
  if (request.world.ranks % request.world.context != 0) {
    throw std::invalid_argument(who + "does not divide the " + std::to_string(request.world.ranks) +
                                " ranks of --world; use a divisor");
  }
  if (request.sequence % chunks_of(request) != 0) {
    throw std::invalid_argument(who + "expected a --sequence of two chunks for each rank, a " +
                                "multiple of " + std::to_string(chunks_of(request)) + ", got " +
                                std::to_string(request.sequence));
  }
  const bool is_by_heads = request.world.context_form == parallel::ContextForm::kUlysses;
  if (is_by_heads && shape.heads % request.world.context != 0) {
    throw std::invalid_argument(who + "--context-form ulysses: does not divide the model's " +
                                std::to_string(shape.heads) + " heads; use ring");
  }
}

void check_experts(const Request& request, const DecoderShape& shape) {
  if (request.tiles.mlp && shape.experts) {
    throw std::invalid_argument(
        "--tiled-mlp: the model has experts, whose loss of balance is of all tokens at once; leave "
        "it out");
  }
  const int ranks = request.world.expert;
  if (ranks == 1) return;
  const std::string who = "--expert-parallel " + std::to_string(ranks) + ": ";
  if (!shape.experts) {
    throw std::invalid_argument(
        who + "the model has no experts; add experts=E,active=K to --model, " + "or leave it out");
  }
  if (shape.experts->count % ranks != 0) {
    throw std::invalid_argument(who + "does not divide the " +
                                std::to_string(shape.experts->count) + " experts of a layer");
  }
  const int with_other_samples = request.world.ranks / request.world.context;
  if (with_other_samples % ranks != 0) {
    throw std::invalid_argument(who + "does not divide the " + std::to_string(with_other_samples) +
                                " ranks of --world that have other samples; use a divisor");
  }
  const std::string& optimizer = request.optimizer;
  if (optimizer == "muon" || optimizer == "lamb" || optimizer == "adafactor") {
    throw std::invalid_argument(who + "--optimizer " + optimizer +
                                " wants whole tensors, and ranks have some of the experts");
  }
}

// The sequence, and its plan.
using PlannedSequence = std::pair<int64_t, Plan>;

// What a longer sequence takes grows with it, so it is looked for between one that fits and one that does not.
PlannedSequence longest_sequence(const Request& request, const DecoderShape& shape) {
  constexpr int64_t kFirst = 256, kParts = 128;
  const int64_t unit = chunks_of(request);
  const int64_t most = shape.positions > 0 ? shape.positions : kMostTokens;
  const auto of_chunks = [&](int64_t tokens) { return std::min(tokens, most) / unit * unit; };
  int64_t sequence = of_chunks(std::max(kFirst, unit));
  if (sequence == 0) {
    throw std::invalid_argument("--longest-sequence: the model's " + std::to_string(most) +
                                " positions are fewer than the " + std::to_string(unit) +
                                " chunks of --context");
  }
  const auto plan_of = [&](int64_t tokens) {
    return PlannedSequence(tokens, plan_of_sequence(request, shape, tokens));
  };
  PlannedSequence longest = plan_of(sequence);
  int64_t too_long = 0;  // 0: none is known
  while (longest.second.choice() == nullptr && longest.first > unit) {
    too_long = longest.first;
    longest = plan_of(of_chunks(std::max(unit, too_long / 2)));
  }
  // The one that is nearest to fitting says why.
  if (longest.second.choice() == nullptr) return longest;
  while (too_long == 0 || too_long - longest.first > std::max(unit, longest.first / kParts)) {
    if (too_long == 0 && longest.first == of_chunks(most)) break;
    sequence = too_long == 0 ? of_chunks(2 * longest.first)
                             : of_chunks(longest.first + (too_long - longest.first) / 2);
    if (sequence == longest.first) break;
    PlannedSequence tried = plan_of(sequence);
    if (tried.second.choice() == nullptr) {
      too_long = sequence;
    } else {
      longest = std::move(tried);
    }
  }
  return longest;
}

PlannedSequence plan_of(const Request& request) {
  if (!request.parameters.empty()) {
    const bool tiles = request.tiles.mlp || request.tiles.loss;
    if (request.world.context > 1 || request.seeks_longest_sequence || tiles) {
      throw std::invalid_argument(
          "--context, --longest-sequence, --tiled-mlp, --tiled-loss: of --parameters no sample is "
          "known; use --model");
    }
    if (request.world.expert > 1) {
      throw std::invalid_argument(
          "--expert-parallel: of --parameters no experts are known; use --model");
    }
    return {0, plan_states(read_count(request.parameters), states_of(request.optimizer),
                           request.world, request.options)};
  }
  const DecoderShape shape =
      request.model.empty() ? read_config(request.config) : read_shape(request.model);
  check_context(request, shape);
  check_experts(request, shape);
  if (request.seeks_longest_sequence) {
    if (request.sequence != 0 || request.world.device_memory_bytes == 0) {
      throw std::invalid_argument(
          "--longest-sequence: expected --device-memory, in which it is to fit, and no --sequence");
    }
    return longest_sequence(request, shape);
  }
  if (request.sequence == 0) throw std::invalid_argument("--sequence is required");
  if (shape.positions > 0 && request.sequence > shape.positions) {
    throw std::invalid_argument("--sequence " + std::to_string(request.sequence) +
                                ": the model has " + std::to_string(shape.positions) +
                                " positions; give at most so many tokens");
  }
  return {request.sequence, plan_of_sequence(request, shape, request.sequence)};
}

std::string words_of_sequence(const Request& request, const PlannedSequence& planned) {
  std::string words;
  if (request.seeks_longest_sequence && planned.second.choice() != nullptr) {
    words += "the longest sequence that fits: " + std::to_string(planned.first) + " tokens\n";
  }
  if (request.world.context > 1) {
    words += "each sample of " + std::to_string(planned.first) + " tokens is on " +
             std::to_string(request.world.context) + " ranks, " +
             std::to_string(planned.first / request.world.context) + " a rank\n";
  }
  if (request.world.expert > 1) {
    words += "the experts of a layer are on " + std::to_string(request.world.expert) +
             " ranks, to which tokens travel, as many to each\n";
  }
  return words;
}

int usage_error(const std::string& message) {
  std::cerr << "zp plan: " << message.substr(0, message.find('\n')) << "; see zp plan --help\n";
  return kUsageError;
}

int run(int argc, char** argv) {
  Request request;
  request.options.training.page_bytes = int64_t{64} << 20;
  request.world.allocator.workspaces = memory::kWorkspacesOfSm90;
  CLI::App app(
      "Tells for every stage, offload and checkpoint policy what a rank will hold, send and "
      "compute, "
      "and the cheapest setting that fits",
      "zp plan");
  app.footer(
      "Nothing is trained: the training code runs on tensors without memory (docs/planning.md).\n"
      "Exit code 1: nothing fits.\n"
      "Example: zp plan --model gpt:d=4096,layers=32,heads=32 --sequence 2048 --batch 4 --world 64 "
      "--device-memory 80GiB");
  add_flags(app, request);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : usage_error(error.what());
  }
  if (request.predicts_seconds) {
    if (!request.parameters.empty()) {
      throw std::invalid_argument("--seconds: of --parameters no operator is known; use --model");
    }
    request.options.speeds =
        machine_speeds({.dtype = request.options.training.compute_dtype.value_or(c10::kFloat)});
  }
  // There is nothing to compute.
  torch::set_num_threads(1);
  const PlannedSequence planned = plan_of(request);
  const Plan& plan = planned.second;
  errno = 0;  // so that the cause of a write that fails can be told
  if (request.json) {
    nlohmann::json json = to_json(plan);
    if (planned.first > 0) json["sequence"] = planned.first;
    std::cout << json.dump(1) << '\n';
  } else {
    std::cout << words_of_sequence(request, planned) << plan;
  }
  if (!std::cout.flush()) {
    std::cerr << "zp plan: the output cannot be written: "
              << (errno != 0 ? std::strerror(errno) : "a write failed") << '\n';
    return kNotWritten;
  }
  return plan.choice() == nullptr ? kNothingFits : 0;
}

}  // namespace
}  // namespace zeropage::tools

int main(int argc, char** argv) {
  try {
    return zeropage::tools::run(argc, argv);
  } catch (const std::invalid_argument& error) {
    return zeropage::tools::usage_error(error.what());
  } catch (const c10::Error& error) {
    return zeropage::tools::usage_error(zeropage::memory::message_of(error));
  } catch (const std::exception& error) {
    return zeropage::tools::usage_error(error.what());
  }
}
