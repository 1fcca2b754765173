// examples/language_model/generate: texts that go on.
#include "examples/language_model/generate/generation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "examples/language_model/weights/open_model.h"
#include "tests/examples/language_model/small_models.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/zeropage.h"

namespace zeropage::generation_test {
namespace {

using namespace language_model;
using namespace zeropage::testing;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Lt;

WrappedModel shared_model(const ModelConfig& of, World& world, int stage) {
  ModelConfig config = of;
  config.initial_deviation = 0.2;
  return new_model(config, /*seed=*/1, world,
                   {.sharding = {.stage = stage_of(stage), .page_bytes = 4096}});
}

// Without a cache: the whole sequence for each token.
std::vector<int32_t> greedy_by_hand(LanguageModel& model, std::vector<int32_t> sequence,
                                    int count) {
  std::vector<int32_t> answer;
  model.eval();
  const torch::NoGradGuard no_grad;
  for (int i = 0; i < count; ++i) {
    const torch::Tensor logits = model.logits(torch::tensor(sequence, torch::kLong).unsqueeze(0));
    answer.push_back(logits[0][-1].argmax().item<int32_t>());
    sequence.push_back(answer.back());
  }
  return answer;
}

TEST(LanguageModelGenerationTest, TakesTheMostProbableTokensWithAndWithoutACacheOnAnyRanks) {
  for (const ModelConfig& config : all_small_configs()) {
    SCOPED_TRACE(name_of(config.architecture));
    const auto plain = drawn(config);
    const std::vector<int32_t> prompt = {3, 1, 4, 1, 5};
    const std::vector<int32_t> expected = greedy_by_hand(*plain, prompt, 12);
    for (const int stage : {0, 3}) {
      run_ranks(2, [&](World& world) {
        WrappedModel model = shared_model(config, world, stage);
        std::vector<int32_t> told;
        const auto answers = generate(model, {{.tokens = prompt}}, {.most_tokens = 12},
                                      [&](size_t, int32_t token) { told.push_back(token); });
        EXPECT_EQ(answers, std::vector<std::vector<int32_t>>{expected});
        EXPECT_EQ(told, expected);
      });
    }
  }
}

TEST(LanguageModelGenerationTest, RanksMayHaveOtherPromptsNoneAndAnswersOfOtherLengths) {
  const auto plain = drawn(small_llama());
  run_ranks(3, [&](World& world) {
    WrappedModel model = shared_model(small_llama(), world, 3);
    std::vector<Prompt> prompts;
    if (world.rank() == 0) prompts = {{.tokens = {1, 2, 3}}, {.tokens = {4}}};
    if (world.rank() == 1) prompts = {{.tokens = {7, 8, 9, 10, 11, 12}}};
    const auto answers = generate(model, prompts, {.most_tokens = 5 + world.rank()});
    ASSERT_EQ(answers.size(), prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(answers[i], greedy_by_hand(*plain, prompts[i].tokens, 5 + world.rank()));
    }
  });
}

TEST(LanguageModelGenerationTest, EndsWithAnEndTokenOrWithTheModelsLongestSequence) {
  run_ranks(1, [&](World& world) {
    WrappedModel model = shared_model(small_llama(), world, 0);
    const Prompt prompt{.tokens = {3, 1, 4}};
    const auto whole = generate(model, {prompt}, {.most_tokens = 1000})[0];
    EXPECT_EQ(whole.size(), 32 - 3);
    const int32_t end = whole[4];
    const auto first = std::find(whole.begin(), whole.end(), end) + 1;
    EXPECT_EQ(generate(model, {prompt}, {.most_tokens = 1000, .end_tokens = {39, end}})[0],
              std::vector<int32_t>(whole.begin(), first));
  });
}

TEST(LanguageModelGenerationTest, PromptsThatDoNotFitAreRefusedOnAllRanks) {
  run_ranks(2, [&](World& world) {
    WrappedModel model = shared_model(small_llama(), world, 3);
    const auto error = [&](std::vector<int32_t> tokens) {
      std::vector<Prompt> prompts = {{.tokens = {1}}};
      if (world.rank() == 1) prompts[0].tokens = std::move(tokens);
      return error_of([&] { generate(model, prompts, {}); });
    };
    EXPECT_THAT(error({}), HasSubstr("the prompt has no token"));
    EXPECT_THAT(error({40}), HasSubstr("token 40, and the model's vocabulary ends at 39"));
    EXPECT_THAT(error(std::vector<int32_t>(32, 1)), HasSubstr("no room for an answer"));
  });
}

TEST(LanguageModelGenerationTest, DrawsByTheirProbabilities) {
  const torch::Tensor logits = torch::tensor({0.5, 0.25, 0.125, 0.0625, 0.0625}).log();
  const auto shares = [&](const SamplingOptions& options) {
    std::vector<double> counts(5);
    Sampler sampler(options, /*seed=*/1);
    for (int i = 0; i < 8000; ++i)
      counts[static_cast<size_t>(sampler.choose(logits))] += 1.0 / 8000;
    return counts;
  };
  const auto expect_near = [](const std::vector<double>& got, const std::vector<double>& expected) {
    for (size_t i = 0; i < 5; ++i) EXPECT_NEAR(got[i], expected[i], 0.02) << i;
  };
  expect_near(shares({.temperature = 0}), {1, 0, 0, 0, 0});
  expect_near(shares({.temperature = 1}), {0.5, 0.25, 0.125, 0.0625, 0.0625});
  expect_near(shares({.temperature = 1, .top_k = 2}), {2.0 / 3, 1.0 / 3, 0, 0, 0});
  // 0.5 + 0.25 is enough for 0.75, and not for 0.76.
  expect_near(shares({.temperature = 1, .top_p = 0.75}), {2.0 / 3, 1.0 / 3, 0, 0, 0});
  expect_near(shares({.temperature = 1, .top_p = 0.76}), {4.0 / 7, 2.0 / 7, 1.0 / 7, 0, 0});
  // Squares of the probabilities.
  expect_near(shares({.temperature = 0.5, .top_k = 2}), {0.8, 0.2, 0, 0, 0});
}

TEST(LanguageModelGenerationTest, TheSameSeedGivesTheSameAnswer) {
  run_ranks(1, [&](World& world) {
    WrappedModel model = shared_model(small_llama(), world, 0);
    const GenerationOptions options{.sampling = {.temperature = 1}, .most_tokens = 20};
    const auto answer = [&](uint64_t seed) {
      return generate(model, {{.tokens = {1}, .seed = seed}}, options)[0];
    };
    EXPECT_EQ(answer(1), answer(1));
    EXPECT_NE(answer(1), answer(2));
    EXPECT_THAT(answer(3), Each(Lt(40)));
  });
}

}  // namespace
}  // namespace zeropage::generation_test
