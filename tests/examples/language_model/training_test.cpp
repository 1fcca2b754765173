// examples/language_model/train: steps over the rows of all ranks.
#include <cmath>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "examples/language_model/evaluate/evaluation.h"
#include "examples/language_model/train/trainer.h"
#include "examples/language_model/weights/open_model.h"
#include "tests/examples/language_model/small_models.h"
#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::training_test {
namespace {

using namespace language_model;
using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kEnd = 0;

// Documents of unequal lengths, so rows have unequal numbers of targets.
std::vector<int32_t> documents() {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; tokens.size() < 400; ++i) {
    for (int32_t j = 0; j < 3 + 5 * (i % 4); ++j) tokens.push_back(1 + (i * 7 + j * j) % 39);
    tokens.push_back(kEnd);
  }
  return tokens;
}

PackedRows packed(const std::vector<int32_t>& tokens, bool joins_documents = false) {
  const auto mark = joins_documents ? std::nullopt : std::optional(DocumentMark{kEnd});
  return {TokenText::of(tokens), /*length=*/16, mark};
}

struct Setting {
  int ranks = 1;
  int stage = 0;
  int64_t micro_batch = 1;
  Options options = {};
  ModelConfig config = small_llama();
  std::optional<AdapterTargets> adapters = {};
  zeropage::EveryBlocks recompute = zeropage::EveryBlocks::none();
  // Neighbouring ranks that have the same rows.
  int context = 1;
  parallel::ContextForm form = parallel::ContextForm::kRing;
  bool joins_documents = false;
};

struct Trained {
  std::vector<double> losses;    // of the steps
  std::vector<double> held_out;  // before the first and behind the last
  std::vector<torch::Tensor> parameters;
};

TrainingOptions few_steps() {
  return {.steps = 4, .batch = 6, .learning_rate = 0.01, .warm_up = 2, .clip_norm = 0.5, .seed = 5};
}

Trained train(const Setting& setting, TrainingOptions options = few_steps(), bool resumes = false) {
  Trained trained;
  const std::vector<int32_t> tokens = documents();
  options.micro_batch = setting.micro_batch;
  run_ranks(setting.ranks, [&](World& world) {
    Options sharding = setting.options;
    sharding.stage = stage_of(setting.stage);
    sharding.page_bytes = 4096;
    ModelConfig config = setting.config;
    config.initial_deviation = 0.2;
    WrappedModel model = new_model(config, /*seed=*/1, world,
                                   {.sharding = sharding,
                                    .adapters = setting.adapters,
                                    .context = setting.context,
                                    .context_form = setting.form});
    model->recompute(setting.recompute);
    const PackedRows rows = packed(tokens, setting.joins_documents);
    std::vector<double> losses, held_out;
    Trainer trainer(model, rows, options,
                    {.step = [&](const TrainedStep& step) { losses.push_back(step.loss); },
                     .held_out = [&](int64_t, double loss) { held_out.push_back(loss); }},
                    [&] { return evaluate(model, rows, setting.micro_batch).loss; });
    if (resumes) trainer.resume(/*if_there=*/true);
    EXPECT_EQ(trainer.run(), 0);
    const auto state = full_state(model);
    if (world.rank() != 0) return;
    trained.losses = losses;
    trained.held_out = held_out;
    for (const auto& item : state) trained.parameters.push_back(item.value());
  });
  return trained;
}

void expect_near(const Trained& left, const Trained& right, double tolerance = 1e-5) {
  ASSERT_EQ(left.losses.size(), right.losses.size());
  for (size_t i = 0; i < left.losses.size(); ++i) {
    EXPECT_NEAR(left.losses[i], right.losses[i], tolerance) << i;
  }
  for (size_t i = 0; i < std::min(left.parameters.size(), right.parameters.size()); ++i) {
    // AdamW makes a whole step of a gradient that is nearly 0, so the order of a sum shows there. A step is up to 1e-2.
    const torch::Tensor difference = (left.parameters[i] - right.parameters[i]).abs();
    EXPECT_LT(difference.max().item<double>(), 100 * tolerance) << i;
  }
}

// The same by plain LibTorch: all rows of a step in one batch.
Trained by_hand() {
  const TrainingOptions options = few_steps();
  ModelConfig config = small_llama();
  config.initial_deviation = 0.2;
  const auto model = make_model(config, {.seed = 1});
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : model->named_parameters()) {
    if (parameter.key() == "lm_head.weight") continue;  // tied
    (parameter.value().dim() > 1 ? matrices : vectors).push_back(parameter.value());
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto adam = [&](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(1).betas({options.beta1, options.beta2}).weight_decay(decay));
  };
  // A tied parameter once, as its norm counts once.
  std::vector<torch::Tensor> all = matrices;
  all.insert(all.end(), vectors.begin(), vectors.end());
  groups.emplace_back(matrices, adam(options.weight_decay));
  groups.emplace_back(vectors, adam(0));
  torch::optim::AdamW optimizer(groups);
  const std::vector<int32_t> tokens = documents();
  const PackedRows rows = packed(tokens);
  RowOrder order(rows.count(), options.seed);
  Trained trained;
  for (int64_t step = 0; step < options.steps; ++step) {
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < options.batch; ++i)
      chosen.push_back(order.row(step * options.batch + i));
    const Rows batch = rows.read(chosen);
    const torch::Tensor loss = model->forward(batch.tokens, batch.targets, batch.documents);
    trained.losses.push_back(loss.item<double>());
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(all, options.clip_norm);
    for (auto& group : optimizer.param_groups()) {
      group.options().set_lr(learning_rate_at(options, step));
    }
    optimizer.step();
  }
  for (const auto& parameter : model->named_parameters()) {
    trained.parameters.push_back(parameter.value().detach());
  }
  return trained;
}

TEST(LanguageModelTrainingTest, AStepIsTheMeanOverAllTargetsOnAnyRanksStagesAndMicroBatches) {
  const Trained expected = by_hand();
  for (const Setting& setting :
       {Setting{1, 0, 6}, Setting{1, 3, 2}, Setting{1, 1, 4}, Setting{2, 0, 1}, Setting{2, 1, 3},
        Setting{2, 2, 2}, Setting{2, 3, 1}, Setting{2, 3, 2}, Setting{4, 3, 1}, Setting{4, 2, 2}}) {
    SCOPED_TRACE(::testing::Message() << setting.ranks << " ranks, stage " << setting.stage << ", "
                                      << setting.micro_batch << " rows a micro-batch");
    expect_near(train(setting), expected);
  }
  Setting recomputed{2, 3, 2};
  recomputed.recompute = zeropage::EveryBlocks::each();
  expect_near(train(recomputed), expected);
}

// A row's tokens over 2 and 4 ranks, beside one rank that has all: of a Llama with shared heads of keys, its biases and scaled
// positions, and of GPT-2, in rows of one document and of several that begin on other ranks.
TEST(LanguageModelTrainingTest, RowsOverSeveralRanksTrainAsOnOneRank) {
  ModelConfig llama = small_configs()[1];
  llama.heads = 8;
  llama.key_value_heads = 2;
  ModelConfig gpt2 = small_gpt2();
  gpt2.heads = gpt2.key_value_heads = 4;
  gpt2.head_width = 6;
  TrainingOptions ten = few_steps();
  ten.steps = 10;
  const auto each = zeropage::EveryBlocks::each();
  for (const ModelConfig& config : {llama, gpt2}) {
    for (const bool joins_documents : {true, false}) {
      const Setting whole{.config = config, .joins_documents = joins_documents};
      const Trained one = train(whole, ten);
      ASSERT_EQ(one.losses.size(), 10);
      ASSERT_EQ(one.held_out.size(), 2);
      const auto compare = [&](Setting setting) {
        SCOPED_TRACE(::testing::Message()
                     << "GPT-2 " << (config.architecture == Architecture::kGpt2) << ", joined "
                     << joins_documents << ", ranks " << setting.ranks << ", context "
                     << setting.context << ", form " << static_cast<int>(setting.form) << ", stage "
                     << setting.stage);
        setting.config = config;
        setting.joins_documents = joins_documents;
        Trained other = train(setting, ten);
        // GPT-2's biases of keys change no output, so AdamW makes steps of what sums leave of a gradient of 0.
        if (config.architecture == Architecture::kGpt2) other.parameters.clear();
        expect_near(other, one);
        ASSERT_EQ(other.held_out.size(), 2);
        EXPECT_NEAR(other.held_out[0], one.held_out[0], 1e-5);
        EXPECT_NEAR(other.held_out[1], one.held_out[1], 1e-5);
      };
      for (const auto form : {parallel::ContextForm::kRing, parallel::ContextForm::kUlysses}) {
        for (const int stage : {0, 3}) {
          compare({.ranks = 2, .stage = stage, .micro_batch = 2, .context = 2, .form = form});
          compare({.ranks = 4,
                   .stage = stage,
                   .micro_batch = 3,
                   .recompute = each,
                   .context = 4,
                   .form = form});
        }
      }
      compare({.ranks = 2, .stage = 3, .micro_batch = 1, .recompute = each, .context = 2});
      // Two readers of rows, of two ranks each; the last rows of a step are those of one of them.
      compare({.ranks = 4, .stage = 2, .micro_batch = 4, .context = 2});
    }
  }
}

TEST(LanguageModelTrainingTest, WhatCannotHaveItsRowsOverSeveralRanksIsRefused) {
  run_ranks(2, [&](World& world) {
    ModelConfig drops = small_gpt2();
    drops.attention_dropout = 0.1;
    EXPECT_THAT(error_of([&] { new_model(drops, 1, world, {.context = 2}); }),
                HasSubstr("rows over 2 ranks: the model drops 0.1 of attention's weights"));
    const OpenOptions by_heads{.context = 2, .context_form = parallel::ContextForm::kUlysses};
    EXPECT_THAT(error_of([&] { new_model(small_gpt2(), 1, world, by_heads); }),
                HasSubstr("the model's 3 heads are no multiple"));
    EXPECT_THAT(error_of([&] { new_model(small_llama(), 1, world, {.context = 3}); }),
                HasSubstr("rows over 3 ranks: they do not divide the world's 2"));
    WrappedModel model = new_model(small_llama(), 1, world, {.context = 2});
    const torch::NoGradGuard no_grad;
    KeyValueCache cache(3, 8);
    EXPECT_THAT(error_of([&] { model->next_logits(random_tokens(small_llama(), 1, 4), cache); }),
                HasSubstr("grows by a token, which no ranks can split"));
  });
}

TEST(LanguageModelTrainingTest, WithLessPrecisionAndTheOptimizerElsewhereLearnsAlike) {
  const Trained expected = by_hand();
  Setting on_host{2, 3, 1};
  on_host.options.offload.optimizer = Tier::kHost;
  on_host.options.offload.parameters = Tier::kHost;
  expect_near(train(on_host), expected);
  Setting low{2, 3, 1};
  low.options.compute_dtype = torch::kBFloat16;
  low.options.optimizer_state = StateFormat::kBf16;
  const Trained trained = train(low);
  for (size_t i = 0; i < trained.losses.size(); ++i) {
    EXPECT_NEAR(trained.losses[i], expected.losses[i], 0.1) << i;
  }
}

TEST(LanguageModelTrainingTest, GoesOnAtAnotherNumberOfRanksAndStage) {
  const DiskFolder disk;
  const Trained whole = train({1, 0, 1});
  TrainingOptions part = few_steps();
  part.save = disk.path() + "/run";
  part.save_every = 1;
  // The schedule is that of all steps, so the first part is cut off by an error in its third step.
  run_ranks(2, [&](World& world) {
    ModelConfig config = small_llama();
    config.initial_deviation = 0.2;
    WrappedModel model = new_model(config, 1, world, {.sharding = {.stage = stage_of(3)}});
    const std::vector<int32_t> tokens = documents();
    const PackedRows rows = packed(tokens);
    EXPECT_THAT(error_of([&] {
                  Trainer trainer(model, rows, part, {.step = [](const TrainedStep& step) {
                                    TORCH_CHECK(step.step < 3, "cut off");
                                  }});
                  trainer.resume(/*if_there=*/false);
                  trainer.run();
                }),
                HasSubstr("cut off"));
  });
  const Trained rest = train({4, 2, 1}, part, /*resumes=*/true);
  ASSERT_EQ(rest.losses.size(), 2) << "steps 3 and 4";
  EXPECT_NEAR(rest.losses[0], whole.losses[2], 1e-5);
  EXPECT_NEAR(rest.losses[1], whole.losses[3], 1e-5);
  run_ranks(1, [&](World& world) {
    WrappedModel model = new_model(small_llama(), 1, world);
    const std::vector<int32_t> tokens = documents();
    const PackedRows rows = packed(tokens);
    EXPECT_THAT(error_of([&] { Trainer(model, rows, part, {}).resume(/*if_there=*/false); }),
                HasSubstr("has a state of another run"));
  });
}

TEST(LanguageModelTrainingTest, ARunThatGoesOnNotesWhatDiffersAndNothingElse) {
  const DiskFolder disk;
  TrainingOptions options = few_steps();
  options.save = disk.path() + "/run";
  const auto notes_of = [&](const TrainingOptions& now) {
    std::vector<std::string> notes;
    run_ranks(1, [&](World& world) {
      WrappedModel model = new_model(small_llama(), 1, world, {.sharding = {.stage = stage_of(1)}});
      const PackedRows rows = packed(documents());
      Trainer trainer(model, rows, now,
                      {.note = [&](const std::string& note) { notes.push_back(note); }});
      trainer.resume(/*if_there=*/true);
      trainer.run();
    });
    return notes;
  };
  EXPECT_THAT(notes_of(options), ElementsAre());
  options.steps = 6;
  EXPECT_THAT(notes_of(options), ElementsAre(HasSubstr("goes on behind step 4")));
  options.steps = 8;
  options.weight_decay = 0.5;
  options.beta2 = 0.99;
  EXPECT_THAT(notes_of(options), ElementsAre(HasSubstr("goes on behind step 6"),
                                             "the state's weight decay was 0.01, and is now 0.5",
                                             "the state's beta2 was 0.95, and is now 0.99"));
  options.steps = 5;
  EXPECT_THAT(notes_of(options),
              ElementsAre(HasSubstr("goes on behind step 8"),
                          "the state has made 8 steps, and 5 were asked for: nothing is trained"));
}

TEST(LanguageModelTrainingTest, AdaptersAloneAreTrainedAndHeld) {
  Setting setting{2, 3, 1};
  setting.adapters =
      AdapterTargets{.options = {.rank = 2, .alpha = 4}, .layers = {"q_proj", "up_proj"}};
  const Trained sharded = train(setting);
  setting.ranks = 1;
  setting.stage = 0;
  expect_near(sharded, train(setting));

  // A rank has its share of the frozen weights, and of the adapters' values and two states; gradients are gone.
  run_ranks(2, [&](World& world) {
    ModelConfig config = small_llama();
    config.width = 192;
    config.mlp_width = 512;
    WrappedModel model = new_model(
        config, 1, world,
        {.sharding = {.stage = stage_of(3), .page_bytes = 1 << 16}, .adapters = setting.adapters});
    const std::vector<int32_t> tokens = documents();
    const PackedRows rows = packed(tokens);
    const TrainingOptions options = few_steps();
    Trainer trainer(model, rows, options, {});
    trainer.run();
    int64_t frozen = 0, adapters = 0;
    for (const auto& parameter : model.named_parameters()) {
      if (parameter.key() == "lm_head.weight") continue;
      (parameter.value().requires_grad() ? adapters : frozen) += parameter.value().numel();
    }
    const auto held = memory_report(world).ranks[0].held;
    const double expected = static_cast<double>(4 * frozen + 12 * adapters) / 2;
    EXPECT_NEAR(static_cast<double>(held[Kind::kParameter] + held[Kind::kOptimizerState]), expected,
                0.03 * expected)
        << "shards are rounded up to 256 elements";
  });
}

TEST(LanguageModelTrainingTest, RowsHaveDocumentsAndNoTargetBehindTheirEnd) {
  const TokenText text = TokenText::of(std::vector<int32_t>{5, 6, 0, 7, 0, 8, 9, 1, 2});
  const Rows rows = PackedRows(text, /*length=*/4, DocumentMark{0}).read({0, 1});
  const auto same = [](const torch::Tensor& left, const std::vector<int64_t>& right) {
    return torch::equal(left.flatten(), torch::tensor(right));
  };
  EXPECT_TRUE(same(rows.tokens, {5, 6, 0, 7, 0, 8, 9, 1}));
  EXPECT_TRUE(same(rows.targets, {6, 0, -100, 0, -100, 9, 1, 2}));
  EXPECT_TRUE(same(rows.documents, {0, 0, 0, 1, 0, 1, 1, 1}));
  EXPECT_EQ(rows.learned(), 6);
  // llm.c's files have the token in front of a document.
  const Rows first = PackedRows(text, 4, DocumentMark{0, /*is_first=*/true}).read({0, 1});
  EXPECT_TRUE(same(first.targets, {6, -100, 7, -100, 8, 9, 1, 2}));
  EXPECT_TRUE(same(first.documents, {0, 0, 1, 1, 1, 1, 1, 1}));
  const Rows joined = PackedRows(text, 4, std::nullopt).read({0});
  EXPECT_FALSE(joined.documents.defined());
  EXPECT_EQ(joined.learned(), 4);
  EXPECT_THAT(error_of([&] { PackedRows(text, 9, std::nullopt); }),
              HasSubstr("the text has 9 tokens, and a row 9 and a target behind them"));
}

TEST(LanguageModelTrainingTest, ConversationsArePackedWholeAndAnswersAloneAreLearned) {
  const std::vector<text::ChatExample> examples = {
      {{1, 2, 3, 4}, {0, 0, 1, 1}, 1}, {{5, 6, 7}, {0, 1, 0}, 2}, {{8, 9}, {0, 1}, 5}};
  const ChatRows rows(examples, /*length=*/6, "chat.jsonl");
  ASSERT_EQ(rows.count(), 2) << "the second example does not fit behind the first";
  const Rows read = rows.read({0, 1});
  const auto same = [](const torch::Tensor& left, const std::vector<int64_t>& right) {
    return torch::equal(left.flatten(), torch::tensor(right));
  };
  EXPECT_TRUE(same(read.tokens, {1, 2, 3, 4, 0, 0, 5, 6, 7, 8, 9, 0}));
  EXPECT_TRUE(same(read.targets, {-100, 3, 4, -100, -100, -100, 6, -100, -100, 9, -100, -100}));
  EXPECT_TRUE(same(read.documents, {0, 0, 0, 0, -1, -1, 0, 0, 0, 1, 1, -1}));
  EXPECT_EQ(read.learned(), 4);
  EXPECT_THAT(error_of([&] { ChatRows(examples, 3, "chat.jsonl"); }),
              HasSubstr("chat.jsonl: 1 of 3 examples are longer than a row of 3 tokens, the first "
                        "in line 1 with 4"));
  EXPECT_THAT(error_of([&] { ChatRows({}, 3, "chat.jsonl"); }), HasSubstr("has no example"));
}

TEST(LanguageModelTrainingTest, EveryRowComesOnceAnEpochInAnotherOrderEach) {
  RowOrder order(10, 3);
  std::vector<std::vector<int64_t>> epochs(3);
  for (int64_t place = 0; place < 30; ++place) {
    epochs[static_cast<size_t>(place / 10)].push_back(order.row(place));
  }
  for (const auto& epoch : epochs) {
    EXPECT_EQ(std::set<int64_t>(epoch.begin(), epoch.end()).size(), 10);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_EQ(order.row(4), epochs[0][4]) << "an epoch before, again";
  EXPECT_NE(RowOrder(10, 4).row(0) * 10 + RowOrder(10, 4).row(1), epochs[0][0] * 10 + epochs[0][1]);
}

TEST(LanguageModelTrainingTest, TheRateRisesAndFallsAsACosine) {
  const TrainingOptions options{.steps = 110, .learning_rate = 2, .least_rate = 0.1, .warm_up = 10};
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 0), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 9), 2);
  EXPECT_DOUBLE_EQ(learning_rate_at(options, 10), 2);
  EXPECT_NEAR(learning_rate_at(options, 60), 1.1, 1e-12);
  EXPECT_NEAR(learning_rate_at(options, 110), 0.2, 1e-12);
}

TEST(LanguageModelTrainingTest, OptionsThatMakeNoSenseAreAllNamed) {
  EXPECT_THAT(error_of([] {
                check({.steps = 0, .batch = 2, .micro_batch = 3, .learning_rate = -1, .beta2 = 1});
              }),
              AllOf(HasSubstr("steps: expected 1 or more"), HasSubstr("micro_batch: more rows"),
                    HasSubstr("learning_rate: expected"), HasSubstr("beta2: expected")));
}

}  // namespace
}  // namespace zeropage::training_test
