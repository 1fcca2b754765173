// Training over the stages of a pipeline: what it computes, and what it refuses.
#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/matrix_products.h"
#include "tests/pipeline/pipeline_models.h"
#include "zeropage/ledger.h"

namespace zeropage::pipeline_test {
namespace {

using namespace zeropage::pipeline_models;
using parallel::ScheduleKind;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;
using testing::try_ranks;

// Compares what every rank says with a run without a pipeline.
void expect_same(const Outcome& expected, const std::vector<Outcome>& by_rank, double tolerance) {
  size_t seen = 0;
  for (const Outcome& actual : by_rank) {
    ASSERT_EQ(actual.losses.size(), expected.losses.size());
    for (size_t step = 0; step < expected.losses.size(); ++step) {
      const double loss = expected.losses[step], norm = expected.norms[step];
      EXPECT_LE(std::abs(actual.losses[step] - loss), tolerance * loss) << "step " << step;
      EXPECT_LE(std::abs(actual.norms[step] - norm), tolerance * norm) << "step " << step;
    }
    for (const auto& [name, values] : actual.weights) {
      ASSERT_TRUE(expected.weights.contains(name)) << name;
      if (tolerance == 0) {
        EXPECT_TRUE(torch::equal(values, expected.weights.at(name))) << name;
      }
      ++seen;
    }
  }
  EXPECT_GE(seen, expected.weights.size());
}

struct HowToRun {
  ScheduleKind schedule;
  int chunks;
};
constexpr HowToRun kSchedules[] = {{ScheduleKind::kGPipe, 1},
                                   {ScheduleKind::kOneForwardOneBackward, 1},
                                   {ScheduleKind::kInterleaved, 2},
                                   {ScheduleKind::kZeroBubble, 1}};

TEST(PipelineTest, HasTheBitsOfAsManyMicroStepsOnOneRankAtEveryStageAndSchedule) {
  constexpr int kSteps = 3;
  for (const int data : {1, 2}) {
    for (const int stage : {0, 1, 2, 3}) {
      const Outcome expected = train_whole({.data = data, .stage = stage}, kSteps);
      for (const auto& [schedule, chunks] : kSchedules) {
        const Shape shape{
            .pipeline = 2, .data = data, .stage = stage, .schedule = schedule, .chunks = chunks};
        SCOPED_TRACE(::testing::Message() << shape);
        expect_same(expected, train_pipeline_by_rank(shape, kSteps), 0);
      }
    }
  }
}

TEST(PipelineTest, ComputesTheSameLossesAndNormsOverEveryMesh) {
  constexpr int kSteps = 10;
  std::map<std::pair<int, Head>, Outcome> expected;
  int mesh = 0;
  for (const int ranks : {2, 4, 8}) {
    for (const int pipeline : {1, 2, 4}) {
      for (const int tensor : {1, 2}) {
        if (ranks % (pipeline * tensor) != 0) continue;
        // Stages, schedules and heads in turn, so that each meets each.
        Shape shape{.pipeline = pipeline,
                    .data = ranks / (pipeline * tensor),
                    .tensor = tensor,
                    .stage = mesh % 4};
        const HowToRun& how = kSchedules[(mesh + mesh / 4) % 4];
        shape.schedule = how.schedule;
        shape.chunks = how.chunks;
        shape.head = mesh % 3 == 1 ? Head::kTied : Head::kOwn;
        ++mesh;
        SCOPED_TRACE(::testing::Message() << shape);
        auto& whole = expected[{shape.data, shape.head}];
        if (whole.losses.empty()) {
          whole = train_whole({.data = shape.data, .head = shape.head}, kSteps);
        }
        std::vector<Outcome> by_rank = train_pipeline_by_rank(shape, kSteps);
        expect_same(whole, by_rank, 1e-12);
      }
    }
  }
}

TEST(PipelineTest, HasThoseBitsInBFloat16WithAScaledLossToo) {
  for (const int stage : {0, 3}) {
    Shape shape{.data = 2, .stage = stage, .low_precision = true};
    const Outcome expected = train_whole(shape, 3);
    shape.pipeline = 2;
    for (const ScheduleKind schedule :
         {ScheduleKind::kOneForwardOneBackward, ScheduleKind::kZeroBubble}) {
      shape.schedule = schedule;
      SCOPED_TRACE(::testing::Message() << shape);
      expect_same(expected, train_pipeline_by_rank(shape, 3), 0);
    }
  }
}

TEST(PipelineTest, AnActionBeginsWhenItsMessageIsThereAndStepsAreTimedInTheOrderOfTheSchedule) {
  constexpr double kSlow = 0.03;
  const Shape shape{.pipeline = 2, .schedule = ScheduleKind::kGPipe};
  run_ranks(2, [&](World& world) {
    PipelineOptions options;
    options.run_forward = [&](const std::function<at::Tensor()>& forward) {
      if (world.rank() == 0) std::this_thread::sleep_for(std::chrono::duration<double>(kSlow));
      return forward();
    };
    PipelineRun run(world, shape, options);
    run.step(0);
    const parallel::TimedStep step = run.pipeline.timed_step();
    parallel::check_times(step, parallel::GPipe().actions(2, shape.micro_batches), "the step");
    for (size_t micro_batch = 0; micro_batch < 4; ++micro_batch) {
      EXPECT_GE(step.timeline[1][micro_batch].begin_s,
                step.timeline[0][micro_batch].begin_s + kSlow);
    }
  });
}

// The most activations of the first stage in a step, in bytes.
int64_t activations_of_first_stage(ScheduleKind schedule, int micro_batches) {
  const Shape shape{.pipeline = 2, .schedule = schedule, .micro_batches = micro_batches};
  std::atomic<int64_t> bytes = 0;
  run_ranks(2, [&](World& world) {
    PipelineRun run(world, shape);
    run.step(0);
    const memory::Ledger& ledger = *memory::Ledger::current();
    memory::Ledger::current()->reset_peak();
    const int64_t before = ledger.activation_peak();
    run.step(1);
    if (world.rank() == 0) bytes = ledger.activation_peak() - before;
  });
  return bytes;
}

TEST(PipelineTest, ItsFirstStageHoldsTheActivationsOfAsManyMicroBatchesAsStagesNotOfAll) {
  constexpr int kStages = 2;
  const int64_t of_few = activations_of_first_stage(ScheduleKind::kGPipe, 8);
  const int64_t of_many = activations_of_first_stage(ScheduleKind::kGPipe, 16);
  const int64_t of_one = (of_many - of_few) / 8;
  EXPECT_GT(of_one, kBatch * kLength * kWidth * 8);
  for (const int micro_batches : {8, 16}) {
    const int64_t most =
        activations_of_first_stage(ScheduleKind::kOneForwardOneBackward, micro_batches);
    EXPECT_LE(most, of_many * kStages / 16 + of_one) << micro_batches;
  }
}

// Each rank's products in a step of micro-batches, the second of which has no weight and a loss that is no number;
// and what the step leaves.
std::pair<std::vector<int64_t>, std::map<std::string, torch::Tensor>> weighted_step(
    ScheduleKind schedule) {
  const Shape shape{.pipeline = 3, .stage = 2, .schedule = schedule};
  std::mutex mutex;
  std::vector<int64_t> products(3);
  std::map<std::string, torch::Tensor> weights;
  run_ranks(shape.ranks(), [&](World& world) {
    PipelineRun run(world, shape);
    const std::vector<torch::Tensor> inputs = {tokens_of(0), tokens_of(1), tokens_of(2),
                                               tokens_of(3)};
    const testing::MatrixProducts counted;
    run.pipeline.run(inputs,
                     [](const torch::Tensor& output, int64_t micro_batch) {
                       return loss_of(output, micro_batch) * (micro_batch == 1 ? std::nan("") : 1);
                     },
                     {1, 0, 2, 1});
    products[static_cast<size_t>(world.rank())] = counted.seen();
    const StepReport report = run.pipeline.accumulator().step(run.optimizer);
    EXPECT_EQ(report.skipped, Skipped::kNo);
    EXPECT_EQ(report.weight, 4);
    visit_parameters(run.model, [&](const std::string& name, const torch::Tensor& values) {
      const std::lock_guard lock(mutex);
      weights[name] = values.clone();
    });
  });
  return {products, weights};
}

TEST(PipelineTest, ZeroBubbleMakesTheMatrixProductsOf1f1bAndLeavesItsBitsForAnyWeights) {
  const auto [products, weights] = weighted_step(ScheduleKind::kOneForwardOneBackward);
  const auto [split_products, split_weights] = weighted_step(ScheduleKind::kZeroBubble);
  EXPECT_THAT(products, ::testing::Each(::testing::Gt(0)));
  EXPECT_EQ(split_products, products);
  for (const auto& [name, values] : weights) {
    EXPECT_TRUE(torch::equal(split_weights.at(name), values)) << name;
  }
}

// What each rank throws.
std::vector<std::string> errors_of(const Shape& shape, const std::function<void(World&)>& run) {
  std::vector<std::string> errors;
  for (const std::exception_ptr& error : try_ranks(shape.ranks(), run)) {
    errors.push_back(message_of(error));
  }
  return errors;
}

TEST(PipelineTest, SkipsAStepOnAllRanksWhereAGradientOfOneStageIsNotFinite) {
  const Shape shape{.pipeline = 2, .data = 2, .stage = 2};
  run_ranks(shape.ranks(), [&](World& world) {
    PipelineRun run(world, shape);
    if (world.rank() == 3) {
      run.model.named_parameters()["blocks.4.up.bias"].register_hook(
          [](const torch::Tensor& gradient) { return gradient / 0.0; });
    }
    const StepReport report = run.step(0);
    EXPECT_EQ(report.skipped, Skipped::kNotFinite);
    EXPECT_EQ(report.not_finite, std::vector<std::string>{"blocks.4.up.bias"});
  });
}

TEST(PipelineTest, SaysOnAllRanksWhichRankFailedAndWhatTheyWereDoing) {
  for (const ScheduleKind schedule :
       {ScheduleKind::kGPipe, ScheduleKind::kOneForwardOneBackward, ScheduleKind::kZeroBubble}) {
    const Shape shape{.pipeline = 3, .schedule = schedule};
    const auto errors = errors_of(shape, [&](World& world) {
      PipelineRun run(world, shape);
      run.pipeline.run(std::vector<torch::Tensor>(4, tokens_of(0)),
                       [&](const torch::Tensor& output, int64_t micro_batch) {
                         ZP_CHECK(micro_batch < 2, "out of text; give it more");
                         return loss_of(output, 0);
                       });
    });
    EXPECT_THAT(errors[2], HasSubstr("stage 2 of 3, forward of micro-batch 2: out of text"));
    for (const int rank : {0, 1}) {
      EXPECT_THAT(errors[static_cast<size_t>(rank)],
                  AllOf(HasSubstr(c10::str("stage ", rank, " of 3, ")),
                        HasSubstr("of micro-batch "), HasSubstr("rank 2")));
    }
  }
}

// Where ranks catch their errors, no rank waits for another, whose words say what failed. Of each rank; "": nothing.
void expect_goes_on(const Shape& shape,
                    const std::function<void(int rank, bool& fails, PipelineOptions&)>& change,
                    const std::function<std::string(int rank)>& words_of_rank) {
  static std::map<int, Outcome> by_micro_batches;
  auto& expected = by_micro_batches[shape.micro_batches];
  if (expected.losses.empty()) {
    expected = train_whole({.micro_batches = shape.micro_batches}, 2);
  }
  run_ranks(shape.ranks(), [&](World& world) {
    bool fails = false;
    PipelineOptions options;
    change(world.rank(), fails, options);
    PipelineRun run(world, shape, options);
    for (int step = 0; step < 2; ++step) {
      fails = true;
      const std::string error = testing::error_of([&] { run.step(step); });
      EXPECT_THAT(error, HasSubstr(words_of_rank(world.rank())));
      EXPECT_THAT(error, HasSubstr("the next run() may follow"));
      EXPECT_EQ(run.pipeline.accumulator().micro_step(), 0);
      fails = false;
      EXPECT_EQ(run.step(step).norm, expected.norms[static_cast<size_t>(step)]);
      EXPECT_EQ(run.loss(), expected.losses[static_cast<size_t>(step)]);
    }
  });
}

// Before the first message over a boundary, after some, and in every stage.
TEST(PipelineTest, GoesOnAfterAnErrorOfAnyStageAndAllRanksSayWhich) {
  int forwards = 0;  // that the failing rank ends before it
  for (const auto& [schedule, chunks] : kSchedules) {
    const Shape shape{.pipeline = 3, .schedule = schedule, .chunks = chunks, .micro_batches = 6};
    for (const int failing : {0, 1, 2}) {
      forwards = 3 - forwards;
      SCOPED_TRACE(::testing::Message() << shape << ", rank " << failing << ", " << forwards);
      int left = forwards;  // of the failing rank alone
      expect_goes_on(
          shape,
          [&](int rank, bool& fails, PipelineOptions& options) {
            if (rank != failing) return;
            options.run_forward = [&](const std::function<at::Tensor()>& forward) {
              left = fails ? left - 1 : forwards;
              ZP_CHECK(!fails || left >= 0, "out of memory");
              return forward();
            };
          },
          [&](int rank) {
            return rank == failing ? std::string(": out of memory")
                                   : c10::str("rank ", failing, " failed in stage ");
          });
    }
    forwards = 3 - forwards;
  }
}

// Both ranks run out of memory in the middle of a step, say, where the first waits for a gradient already.
TEST(PipelineTest, GoesOnAfterErrorsOfSeveralRanksAtOnce) {
  for (const int stage : {0, 3}) {
    std::array<int, 2> left = {2, 1};
    expect_goes_on(
        {.pipeline = 2, .stage = stage},
        [&](int rank, bool& fails, PipelineOptions& options) {
          options.run_forward = [&left, &fails, rank](const std::function<at::Tensor()>& forward) {
            int& of_rank = left[static_cast<size_t>(rank)];
            of_rank = fails ? of_rank - 1 : 2 - rank;
            ZP_CHECK(!fails || of_rank >= 0, "out of memory");
            return forward();
          };
        },
        [](int rank) { return c10::str("forward of micro-batch ", 2 - rank, ": out of memory"); });
  }
}

TEST(PipelineTest, GoesOnAfterAnErrorInTheMiddleOfABackward) {
  for (const ScheduleKind schedule :
       {ScheduleKind::kOneForwardOneBackward, ScheduleKind::kZeroBubble}) {
    const Shape shape{.pipeline = 2, .schedule = schedule};
    const Outcome expected = train_whole({}, 1);
    run_ranks(2, [&](World& world) {
      PipelineRun run(world, shape);
      int calls = 0;
      if (world.rank() == 0) {
        // The last micro-batch's, whose other gradients have been reduced.
        run.model.named_parameters()["embedding.weight"].register_hook(
            [&](const torch::Tensor&) { ZP_CHECK(++calls != 4, "no luck"); });
      }
      EXPECT_THAT(testing::error_of([&] { run.step(0); }), HasSubstr("no luck"));
      EXPECT_EQ(run.step(0).norm, expected.norms[0]);
    });
  }
}

// The ranks catch their errors, so none hears of another by its end.
TEST(PipelineTest, AnErrorEndsAllRanksOfAMeshWithOtherAxesInItsWords) {
  for (const Shape& shape : {Shape{.pipeline = 2, .data = 2, .stage = 3},
                             Shape{.pipeline = 2, .data = 2}, Shape{.pipeline = 2, .tensor = 2}}) {
    SCOPED_TRACE(::testing::Message() << shape);
    std::atomic<int> caught = 0;
    const auto errors = errors_of(shape, [&](World& world) {
      PipelineRun run(world, shape);
      const std::vector<torch::Tensor> inputs(4, tokens_of(0));
      const auto run_step = [&] {
        run.pipeline.run(inputs, [&](const torch::Tensor& output, int64_t micro_batch) {
          ZP_CHECK(world.rank() != 3 || micro_batch < 2, "out of text");
          return loss_of(output, 0);
        });
        run.pipeline.accumulator().step(run.optimizer);
      };
      EXPECT_THAT(testing::error_of(run_step), HasSubstr("out of text")) << world.rank();
      // Nobody's world goes before all have ended.
      ++caught;
      while (caught < shape.ranks()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_THAT(testing::error_of(run_step), Not(HasSubstr("may follow")));
    });
    // They cannot meet at their end either.
    EXPECT_THAT(errors, ::testing::Each(HasSubstr("out of text")));
  }
}

TEST(PipelineTest, AnErrorBeforeTheFirstMessageOrInAnEvaluationIsToldToo) {
  const Shape shape{.pipeline = 2};
  const auto run_all = [&](World& world) {
    PipelineRun run(world, shape);
    const std::vector<torch::Tensor> few(3, tokens_of(0)), all(4, tokens_of(0));
    const auto loss = [](const torch::Tensor& output, int64_t) { return loss_of(output, 0); };
    EXPECT_THAT(testing::error_of([&] { run.pipeline.run(few, loss); }),
                HasSubstr("expected the inputs of 4 micro-batches on the first rank, got 3"));
    EXPECT_THAT(testing::error_of([&] {
                  run.pipeline.run(all, loss, {1, 1});
                }),
                HasSubstr("expected a weight for each of 4 micro-batches"));
    const auto stops = [](const torch::Tensor&, int64_t micro_batch) {
      ZP_CHECK(micro_batch != 1, "no label");
    };
    EXPECT_THAT(testing::error_of([&] { run.pipeline.evaluate(all, 4, stops); }),
                AllOf(HasSubstr("forward of micro-batch 1: no label"), HasSubstr("may go on")));
    int64_t seen = 0;
    run.pipeline.evaluate(all, 4, [&](const torch::Tensor&, int64_t) { ++seen; });
    EXPECT_EQ(seen, world.rank() == 1 ? 4 : 0);
    run.step(0);
  };
  run_ranks(2, run_all);
  run_ranks(2, run_all, {.hosts = testing::host_labels({0, 1})});
}

TEST(PipelineTest, RefusesARunBeforeTheOneBeforeWasSteppedAndAsManyMicroStepsAsItWasNotMadeFor) {
  const Shape shape{.pipeline = 2};
  run_ranks(2, [&](World& world) {
    PipelineRun run(world, shape);
    const std::vector<torch::Tensor> inputs(4, tokens_of(0));
    const auto run_step = [&] {
      run.pipeline.run(inputs,
                       [](const torch::Tensor& output, int64_t) { return loss_of(output, 0); });
    };
    run_step();
    EXPECT_THAT(testing::error_of(run_step), HasSubstr("the run before was not stepped"));
    run.pipeline.accumulator().step(run.optimizer);
    run.pipeline.accumulator().set_micro_steps(3);
    EXPECT_THAT(testing::error_of(run_step),
                HasSubstr("expected 4 micro-steps, as the pipeline was made for, but "
                          "accumulator().set_micro_steps(3)"));
    // Nothing was sent.
    run.pipeline.accumulator().set_micro_steps(4);
    run_step();
    run.pipeline.accumulator().step(run.optimizer);
  });
}

// Before anything is sent, so that no rank waits for another.
TEST(PipelineTest, RefusesAParkedModelAndGoesOnWhenItIsBack) {
  const Shape shape{.pipeline = 2, .data = 2, .stage = 3};
  const testing::DiskFolder disk;
  run_ranks(shape.ranks(), [&](World& world) {
    PipelineRun run(world, shape);
    const std::vector<torch::Tensor> inputs(4, tokens_of(0));
    run.step(0);
    run.model.park(memory::Tier::kNvme, disk.path());
    EXPECT_THAT(testing::error_of([&] { run.pipeline.evaluate(inputs, 4, {}); }),
                HasSubstr("Pipeline::evaluate: the model is parked; call resume() first"));
    EXPECT_THAT(testing::error_of([&] { run.step(1); }),
                HasSubstr("Pipeline::run: the model is parked; call resume() first"));
    run.model.resume();
    run.pipeline.evaluate(inputs, 4, {});
    run.step(1);
  });
}

TEST(PipelineTest, AnEvaluationLeavesTheTimesOfTheStepBeforeIt) {
  const Shape shape{.pipeline = 2, .schedule = ScheduleKind::kGPipe};
  run_ranks(2, [&](World& world) {
    PipelineRun run(world, shape);
    run.step(0);
    run.pipeline.evaluate(std::vector<torch::Tensor>(2, tokens_of(0)), 2, {});
    parallel::check_times(run.pipeline.timed_step(),
                          parallel::GPipe().actions(2, shape.micro_batches), "the step");
  });
}

// The words of the first rank that has some.
std::string first_error_of(const Shape& shape, const std::function<void(World&)>& run) {
  for (const std::string& error : errors_of(shape, run)) {
    if (!error.empty()) return error;
  }
  return "";
}

// A run of two ranks whose layers and loss are changed.
struct Changed {
  std::function<void(PipelineLayers&, Model&)> layers = [](PipelineLayers&, Model&) {};
  PipelineStageOptions options = {};
  std::vector<torch::Tensor> inputs = std::vector<torch::Tensor>(4, tokens_of(0));
  int ranks = 2;
};

std::string error_of(const Changed& changed) {
  return first_error_of({.pipeline = changed.ranks}, [&](World& world) {
    const Mesh mesh(world, {{"pipeline", changed.ranks}, {"data", 1}});
    const auto stage = pipeline_stage<Model>([] { return Model(Head::kTied, torch::kDouble); },
                                             [&](Model& model) {
                                               PipelineLayers layers = layers_of_model(model);
                                               changed.layers(layers, model);
                                               return layers;
                                             },
                                             mesh["pipeline"], changed.options);
    Pipeline::Model model(stage, mesh, Options());
    Pipeline pipeline(model, {.accumulator = {.micro_steps = 4}});
    pipeline.run(changed.inputs,
                 [](const torch::Tensor& output, int64_t) { return loss_of(output, 0); });
  });
}

TEST(PipelineTest, RefusesModelsThatCannotBeCutSo) {
  EXPECT_EQ(error_of({}), "");
  EXPECT_THAT(error_of({.layers = [](auto& layers, Model&) { layers.resize(1); }}),
              HasSubstr("expected at least a layer for each of 2 stages, got 1"));
  EXPECT_THAT(error_of({.options = {.chunks = 0}}),
              HasSubstr("PipelineStageOptions::chunks: expected 1 or more stages a rank, got 0"));
  EXPECT_THAT(
      error_of({.options = {.first_layers = {0, 9}}}),
      HasSubstr("expected 2 numbers that begin with 0, rise, and stay below 8, got [0, 9]"));
  EXPECT_THAT(error_of({.layers =
                            [](auto& layers, Model&) {
                              for (size_t index = 4; index < 8; ++index)
                                layers[index].modules.clear();
                            }}),
              HasSubstr("stage 1 of 2 would have no parameter; give it a layer that has some"));
  EXPECT_THAT(error_of({.layers = [](auto& layers, Model&) { layers[2].modules.clear(); }}),
              HasSubstr("parameter \"blocks.1.norm.weight\" is in no layer"));
  EXPECT_THAT(
      error_of({.layers = [](auto& layers,
                             Model& model) { layers[3].modules.push_back(model->blocks->ptr(5)); },
                .ranks = 3}),
      HasSubstr("is used by layers on 2 ranks, 1 to 2 of 3: expected one rank, or the "
                "first and the last"));
}

// The third layer has no parameter, so who has which is the same, but one rank would leave it to the other.
TEST(PipelineTest, RefusesRanksThatCutTheModelElsewhere) {
  EXPECT_THAT(first_error_of({.pipeline = 2},
                             [](World& world) {
                               const Mesh mesh(world, {{"pipeline", 2}, {"data", 1}});
                               const auto layers = [](Model& model) {
                                 PipelineLayers layers = layers_of_model(model);
                                 layers.insert(
                                     layers.begin() + 2,
                                     {"doubled", {}, [](const torch::Tensor& x) { return 2 * x; }});
                                 return layers;
                               };
                               const auto stage = pipeline_stage<Model>(
                                   [] { return Model(Head::kOwn, torch::kDouble); }, layers,
                                   mesh["pipeline"], {.first_layers = {0, 2 + world.rank()}});
                             }),
              HasSubstr("first layer of each stage, and the end: [0, 2, 9]"));
}

TEST(PipelineTest, RefusesWhatCannotPassBetweenStages) {
  const auto with_last_of_first_stage = [](auto change) {
    return Changed{.layers = [change](PipelineLayers& layers, Model& model) {
      layers[3].forward = [forward = layers[3].forward, change, model](
                              const torch::Tensor& x) mutable { return change(forward(x), model); };
    }};
  };
  EXPECT_THAT(error_of(with_last_of_first_stage(
                  [](const torch::Tensor&, Model&) { return torch::Tensor(); })),
              HasSubstr("expected one tensor for the next stage, got an undefined one"));
  EXPECT_THAT(error_of(with_last_of_first_stage(
                  [](const torch::Tensor& x, Model&) { return x.to(torch::kLong); })),
              AllOf(HasSubstr("stage 0 of 2, forward of micro-batch 0: "),
                    HasSubstr("its output is Long [2, 5, 8], which has no gradient to send back")));
  EXPECT_THAT(error_of(with_last_of_first_stage([](const torch::Tensor& x, Model& model) {
                return model->blocks[5]->as<Block>()->up(x.to(torch::kMeta));
              })),
              HasSubstr("it was computed by a layer of another stage"));
  Changed shapes;
  shapes.inputs[2] = tokens_of(0).narrow(1, 0, 3);
  EXPECT_THAT(error_of(shapes),
              AllOf(HasSubstr("forward of micro-batch 2: "),
                    HasSubstr("expected Double [2, 5, 8], as at the first micro-batch of the step, "
                              "got Double [2, 3, 8]")));
  Changed few;
  few.inputs.pop_back();
  EXPECT_THAT(error_of(few),
              HasSubstr("expected the inputs of 4 micro-batches on the first rank, got 3"));
}

std::string error_of(Shape shape) {
  return first_error_of(shape, [&](World& world) { PipelineRun(world, shape).step(0); });
}

TEST(PipelineTest, RefusesSchedulesThatCannotRun) {
  EXPECT_THAT(error_of({.pipeline = 4, .micro_batches = 3}),
              AllOf(HasSubstr("1f1b"), HasSubstr("3")));
  EXPECT_THAT(
      error_of(
          {.pipeline = 2, .schedule = ScheduleKind::kInterleaved, .chunks = 2, .micro_batches = 3}),
      HasSubstr("interleaved"));
  EXPECT_THAT(error_of({.pipeline = 2, .schedule = ScheduleKind::kGPipe, .chunks = 2}),
              HasSubstr("Pipeline: "));
  EXPECT_THAT(error_of({.pipeline = 3, .schedule = ScheduleKind::kZeroBubble, .micro_batches = 2}),
              HasSubstr("zero-bubble: expected at least 3 micro-batches"));
}

TEST(PipelineTest, RefusesAMeshWithStagesForAModelThatIsWhole) {
  EXPECT_THAT(first_error_of({.pipeline = 2},
                             [](World& world) {
                               const Mesh mesh(world, {{"pipeline", 2}, {"data", 1}});
                               DistributedDataParallel model(torch::nn::Linear(2, 2), mesh);
                             }),
              HasSubstr("the module is no stage of a pipeline; make it by pipeline_stage("));
}

}  // namespace
}  // namespace zeropage::pipeline_test
