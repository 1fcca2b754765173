// A bit that flips in the memory of one rank, in what several ranks have: it ends in an error that names the parameter, the
// rank and the step, before a state is saved. Runs in which nothing flips end without one: tests/scripts/ and tests/habits/
// compare in each step.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/pipeline/pipeline_models.h"
#include "zero/model_parts.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/experts.h"
#include "zeropage/zeropage.h"

namespace zeropage::replicas_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int64_t kFeatures = 2048;

// Each parameter has more lines of the cache than ranks look at in each backward: what flips here they see in a comparison of
// all.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kFeatures})));
    up = register_module("up", torch::nn::Linear(kFeatures, 16));
    down = register_module("down", torch::nn::Linear(16, kFeatures));
    table = register_buffer("table", torch::ones({64, kFeatures}));
    small = register_buffer("small", torch::ones({2, 3}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return down(torch::relu(up(norm(x)))) * table[0] * small[0][0];
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::Tensor table, small;
};
TORCH_MODULE(Net);

using Model = DistributedDataParallel<Net>;

// In a line that none of the first backwards samples.
constexpr int64_t kElement = 40 * 16;

void flip_a_bit(const torch::Tensor& values, int64_t element = kElement) {
  static_cast<uint32_t*>(values.mutable_data_ptr())[element] ^= 1U << 5;
}

// In this rank's shard.
void flip_a_bit_of_shard(const Model& model, const std::string& name) {
  const ModelRef ref(model);
  const zero::ShardedModel& sharded = ref->sharded();
  for (const zero::PlacedParameter& placed : sharded.pages->parameters()) {
    if (placed.parameter.name() != name) continue;
    const Range owned = sharded.pages->owned(placed.page);
    const Range range = intersection(owned, placed.range);
    ASSERT_GT(range.numel(), kElement);
    flip_a_bit(sharded.memory->owned(placed.page), range.begin - owned.begin + kElement);
  }
}

Options options_of(int stage, int64_t every) {
  Options options;
  options.stage = stage_of(stage);
  options.compare_replicas = every;
  options.page_bytes = 4096;
  return options;
}

// Called before each step, with the number of steps made.
using BeforeStep = std::function<void(int made)>;

template <typename Wrapped>
void train(Wrapped& model, torch::optim::Optimizer& optimizer, int steps,
           const BeforeStep& before_step) {
  for (int made = 0; made < steps; ++made) {
    before_step(made);
    optimizer.zero_grad();
    model(torch::ones({2, kFeatures})).square().mean().backward();
    optimizer.step();
  }
}

struct Flip {
  int rank = 0;
  int after = 3;  // steps
  std::function<void(Model&)> in = nullptr;
};

// What each rank throws.
std::vector<std::string> errors_of(int ranks, const Options& options, const Flip& flip,
                                   int steps = 6) {
  std::vector<std::string> messages;
  const auto errors = try_ranks(ranks, [&](World& world) {
    torch::manual_seed(1);
    Model model(Net(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    train(model, optimizer, steps, [&](int made) {
      if (made == flip.after && world.rank() == flip.rank) flip.in(model);
    });
  });
  for (const std::exception_ptr& error : errors) messages.push_back(message_of(error));
  return messages;
}

void flip_in_up(Model& model) {
  flip_a_bit(model->up->weight.detach());
}

class ReplicasTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WholeParameters, ReplicasTest, ::testing::Values(0, 1, 2));

TEST_P(ReplicasTest, NamesTheRankTheParameterAndTheStepOfABitThatFlipped) {
  for (const int rank : {0, 2}) {
    for (const std::string& error :
         errors_of(3, options_of(GetParam(), 2), {.rank = rank, .in = flip_in_up})) {
      EXPECT_THAT(error, AllOf(HasSubstr("step(): ranks must have this alike after 3 steps. values "
                                         "of parameter \"up.weight\": rank 0 has norm "),
                               HasSubstr(rank == 0 ? ", rank 1 has norm " : ", rank 2 has norm "),
                               HasSubstr(rank == 0 ? "2 of 3 ranks have what rank 1 has"
                                                   : "2 of 3 ranks have what rank 0 has"),
                               HasSubstr("restart from the last saved state")));
    }
  }
}

TEST_P(ReplicasTest, ComparesOnceInSoManySteps) {
  for (const std::string& error :
       errors_of(2, options_of(GetParam(), 5), {.rank = 1, .after = 4, .in = flip_in_up})) {
    EXPECT_THAT(error, HasSubstr("after 4 steps. values of parameter \"up.weight\""));
  }
  for (const int64_t every : {7, 0}) {
    for (const std::string& error :
         errors_of(2, options_of(GetParam(), every), {.rank = 1, .after = 4, .in = flip_in_up})) {
      EXPECT_EQ(error, "") << "no comparison came";
    }
  }
}

TEST_P(ReplicasTest, CountsStepsAndNotTheirMicroSteps) {
  const auto run = [&](int flipped_after) {
    const auto errors = try_ranks(2, [&](World& world) {
      torch::manual_seed(1);
      Options options = options_of(GetParam(), 3);
      options.world_invariant = true;
      Model model(Net(), world, options);
      Optimizer<SGD> optimizer(model, SGDOptions(0.1));
      Accumulator accumulator(model, {.micro_steps = 2});
      for (int made = 0; made < 3; ++made) {
        if (made == flipped_after && world.rank() == 1) flip_in_up(model);
        for (int micro = 0; micro < 2; ++micro) {
          accumulator.backward(model(torch::ones({2, kFeatures})).square().mean());
        }
        accumulator.step(optimizer);
      }
    });
    return message_of(errors.front());
  };
  EXPECT_THAT(run(2), HasSubstr("after 2 steps. values of parameter \"up.weight\""));
  // From its owner all ranks have it after the step, so it is gone, or alike.
  if (GetParam() > 0) {
    EXPECT_EQ(run(1), "");
  }
}

TEST_P(ReplicasTest, ComparesParametersInLessPrecision) {
  Options options = options_of(GetParam(), 1);
  options.compute_dtype = torch::kBFloat16;
  for (const std::string& error : errors_of(2, options, {.rank = 1, .in = [](Model& model) {
                                                           flip_a_bit(model->up->weight.detach(),
                                                                      kElement / 2);
                                                         }})) {
    EXPECT_THAT(error, HasSubstr("after 3 steps. values of parameter \"up.weight\""));
  }
}

TEST_P(ReplicasTest, AreComparedByASaveWithWhateverOption) {
  const auto save = [&](int64_t every) {
    const DiskFolder folder;
    const auto errors = try_ranks(3, [&](World& world) {
      torch::manual_seed(1);
      Model model(Net(), world, options_of(GetParam(), every));
      Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
      train(model, optimizer, 2, [](int) {});
      if (world.rank() == 1) flip_in_up(model);
      save_state(folder.path() + "/state", model, optimizer);
    });
    return message_of(errors.back());
  };
  EXPECT_THAT(save(1000), HasSubstr("saving state: ranks must have this alike after 2 steps. "
                                    "values of parameter \"up.weight\": rank 0 has norm "));
  EXPECT_EQ(save(0), "");
}

TEST_P(ReplicasTest, CountStepsOfALoadedState) {
  const DiskFolder folder;
  const std::string state = folder.path() + "/state";
  const auto train_from = [&](bool resumes) {
    const auto errors = try_ranks(2, [&](World& world) {
      torch::manual_seed(1);
      Model model(Net(), world, options_of(GetParam(), 1));
      Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
      if (resumes) load_state(state, model, optimizer);
      train(model, optimizer, 5, [&](int made) {
        if (resumes && made == 4 && world.rank() == 1) flip_in_up(model);
      });
      save_state(state, model, optimizer);
    });
    return message_of(errors.back());
  };
  EXPECT_EQ(train_from(false), "");
  EXPECT_THAT(train_from(true), HasSubstr("after 9 steps. values of parameter \"up.weight\""));
}

// Written by no operator, since buffers that one writes are rank 0's on all ranks.
void flip_in_table(Model& model) {
  flip_a_bit(model->table);
}

TEST_P(ReplicasTest, NamesABufferThatNobodyWrites) {
  Options options = options_of(GetParam(), 2);
  for (const bool broadcasts : {false, true}) {
    options.broadcast_buffers = broadcasts;
    for (const std::string& error : errors_of(3, options, {.rank = 2, .in = flip_in_table})) {
      EXPECT_THAT(error,
                  AllOf(HasSubstr("after 3 steps. values of buffer \"table\": rank 0 has "),
                        HasSubstr("rank 2 has "), HasSubstr("2 of 3 ranks have what rank 0 has")));
    }
  }
}

TEST_P(ReplicasTest, LeavesOutBuffersThatAScriptWrites) {
  for (const bool broadcasts : {false, true}) {
    Options options = options_of(GetParam(), 1);
    options.broadcast_buffers = broadcasts;
    const Flip write{.rank = 1, .in = [](Model& model) {
                       const torch::NoGradGuard no_grad;
                       model->small.add_(1);
                       model->table.add_(1);
                     }};
    for (const std::string& error : errors_of(2, options, write)) EXPECT_EQ(error, "");
  }
}

TEST_P(ReplicasTest, ThrowBeforeAnythingIsUpdated) {
  const auto errors = try_ranks(2, [&](World& world) {
    torch::manual_seed(1);
    Model model(Net(), world, options_of(GetParam(), 1));
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    train(model, optimizer, 2, [](int) {});
    if (world.rank() == 1) flip_in_up(model);
    const torch::Tensor before = model->up->weight.detach().clone();
    EXPECT_THAT(error_of([&] { train(model, optimizer, 1, [](int) {}); }),
                HasSubstr("values of parameter \"up.weight\""));
    EXPECT_TRUE(torch::equal(before, model->up->weight));
    throw std::runtime_error("came to its end");
  });
  for (const std::exception_ptr& error : errors) EXPECT_EQ(message_of(error), "came to its end");
}

// Two groups of two ranks have all of the model each.
TEST(ShardsOfGroupsTest, NameTheShardInWhichABitFlipped) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    Options options = options_of(3, 2);
    options.shard_within = 2;
    options.offload.optimizer = tier;
    options.offload.parameters = tier;
    const auto errors =
        errors_of(4, options,
                  {.rank = 3, .in = [](Model& model) { flip_a_bit_of_shard(model, "up.weight"); }});
    // The other shard is alike, and who has it ends since the others have.
    for (const int rank : {1, 3}) {
      EXPECT_THAT(errors[static_cast<size_t>(rank)],
                  HasSubstr("after 3 steps. values of shard 1 of parameter \"up.weight\": rank 1 "
                            "has norm "));
      EXPECT_THAT(errors[static_cast<size_t>(rank)], HasSubstr(", rank 3 has norm "));
    }
    for (const std::string& error : errors) EXPECT_NE(error, "");
  }
}

TEST(ShardsOfGroupsTest, AreComparedByASave) {
  const DiskFolder folder;
  const auto errors = try_ranks(4, [&](World& world) {
    torch::manual_seed(1);
    Options options = options_of(3, 1000);
    options.shard_within = 2;
    Model model(Net(), world, options);
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    train(model, optimizer, 2, [](int) {});
    if (world.rank() == 2) flip_a_bit_of_shard(model, "down.weight");
    save_state(folder.path() + "/state", model, optimizer);
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(message_of(error),
                HasSubstr("saving state: ranks must have this alike after 2 steps. values of shard "
                          "0 of parameter \"down.weight\": rank 0 has norm "));
  }
}

TEST(ShardsOfGroupsTest, TakeAMessageOnlyWhereTheyAreCompared) {
  std::vector<int64_t> messages;
  run_ranks(4, [&](World& world) {
    torch::manual_seed(1);
    Options options = options_of(3, 3);
    options.shard_within = 2;
    Model model(Net(), world, options);
    Optimizer<SGD> optimizer(model, SGDOptions(0.1));
    const auto& replicas = *ModelRef(model)->sharded().pages->worlds().replicas;
    train(model, optimizer, 6, [&](int) {
      if (world.rank() == 0)
        messages.push_back(replicas.communicator().wire_traffic().all_reduce.messages);
    });
    if (world.rank() == 0)
      messages.push_back(replicas.communicator().wire_traffic().all_reduce.messages);
  });
  std::vector<int64_t> of_steps;
  for (size_t step = 1; step < messages.size(); ++step) {
    of_steps.push_back(messages[step] - messages[step - 1]);
  }
  EXPECT_EQ(of_steps[1], of_steps[0]);
  EXPECT_EQ(of_steps[2], of_steps[0] + 1);
  EXPECT_EQ(of_steps[3], of_steps[0]);
  EXPECT_EQ(of_steps[5], of_steps[0] + 1);
}

class ReplicasOfSlicesTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, ReplicasOfSlicesTest, ::testing::Values(0, 1, 2, 3));

// Two data-parallel ranks have the same slices, and two of a tensor-parallel group the same norm.
std::vector<std::exception_ptr> errors_of_slices(int stage,
                                                 const std::function<void(Model&, int)>& flip) {
  return try_ranks(4, [&](World& world) {
    torch::manual_seed(1);
    const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
    Net net;
    tensor_parallel(net, mesh["tensor"], {{"up", Cut::column()}, {"down", Cut::row()}});
    Model model(net, mesh, options_of(stage, 2));
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    train(model, optimizer, 6, [&](int made) {
      if (made == 3) flip(model, world.rank());
    });
  });
}

TEST_P(ReplicasOfSlicesTest, NameAWholeParameterOfATensorParallelGroup) {
  const auto errors = errors_of_slices(GetParam(), [&](Model& model, int rank) {
    // Alike on both ranks that have these samples, so the group alone sees it.
    if (rank % 2 != 1) return;
    if (GetParam() < 3) {
      flip_a_bit(model->norm->weight.detach());
    } else {
      flip_a_bit_of_shard(model, "norm.weight");
    }
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(
        message_of(error),
        AllOf(HasSubstr("after 3 steps. values of "), HasSubstr("parameter \"norm.weight\": rank "),
              HasSubstr("The ranks of a tensor-parallel group trained on with other "
                        "values")));
  }
}

TEST_P(ReplicasTest, NameASliceThatTwoRanksHave) {
  const auto errors = errors_of_slices(GetParam(), [&](Model& model, int rank) {
    if (rank == 3) flip_a_bit(model->up->weight.detach());
  });
  for (const int rank : {1, 3}) {
    EXPECT_THAT(message_of(errors[static_cast<size_t>(rank)]),
                HasSubstr("values of slice 1 of parameter \"up.weight\": rank 1 has norm "));
  }
}

struct ExpertNetImpl : torch::nn::Module {
  ExpertNetImpl() {
    experts = register_module("experts", parallel::Experts(parallel::ExpertsOptions(64, 64, 4, 2)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return experts(x); }
  parallel::Experts experts{nullptr};
};
TORCH_MODULE(ExpertNet);

TEST_P(ReplicasTest, NameExpertsThatTwoRanksHave) {
  const auto errors = try_ranks(4, [&](World& world) {
    torch::manual_seed(1);
    const Mesh mesh(world, {{"data", 2}, {"expert", 2}});
    ExpertNet net;
    expert_parallel(net, mesh);
    DistributedDataParallel<ExpertNet> model(net, mesh, options_of(GetParam(), 2));
    Optimizer<SGD> optimizer(model, SGDOptions(0.01));
    for (int made = 0; made < 6; ++made) {
      optimizer.zero_grad();
      if (made == 3 && world.rank() == 3) {
        for (const auto& parameter : model->named_parameters()) {
          if (parameter.key() == "experts.w_up") flip_a_bit(parameter.value().detach());
        }
      }
      model(torch::ones({4, 64}) * (1 + world.rank())).square().mean().backward();
      optimizer.step();
    }
  });
  for (const int rank : {1, 3}) {
    EXPECT_THAT(message_of(errors[static_cast<size_t>(rank)]),
                AllOf(HasSubstr("after 3 steps. values of slice 1 of parameter \"experts."),
                      HasSubstr("rank 1 has norm "), HasSubstr("rank 3 has norm ")));
  }
}

// A pipeline's first and last stage have the embedding, which is the head.
TEST_P(ReplicasOfSlicesTest, NameATiedWeightOfAPipeline) {
  using namespace zeropage::pipeline_models;
  const auto errors = try_ranks(4, [&](World& world) {
    const Mesh mesh(world, {{"pipeline", 2}, {"data", 2}});
    const auto stage = pipeline_stage<pipeline_models::Model>(
        [] { return pipeline_models::Model(Head::kTied, torch::kFloat); }, layers_of_model,
        mesh["pipeline"]);
    Options options = options_of(GetParam(), 2);
    Pipeline::Model model(stage, mesh, options);
    Shape shape{.pipeline = 2, .data = 2, .stage = GetParam(), .head = Head::kTied};
    Optimizer<SGD> optimizer(model, SGDOptions(0.01));
    Pipeline pipeline(model, {.accumulator = accumulator_of(shape)});
    for (int made = 0; made < 6; ++made) {
      // On both ranks of the last stage, so that they have it alike.
      if (made == 3 && mesh["pipeline"].rank() == 1) {
        const ModelRef ref(model);
        const zero::ShardedModel& sharded = ref->sharded();
        for (const zero::PlacedParameter& placed : sharded.pages->parameters()) {
          if (!placed.parameter.is_tied) continue;
          const zero::PageMemory& memory = *sharded.memory;
          flip_a_bit(GetParam() < 3 ? memory.whole(placed.page) : memory.owned(placed.page), 3);
        }
      }
      const auto sample = [&](int64_t micro_batch) {
        return sample_of(shape, made, micro_batch, mesh["data"].rank());
      };
      std::vector<torch::Tensor> inputs;
      for (int64_t index = 0; index < shape.micro_batches; ++index) {
        inputs.push_back(tokens_of(sample(index)));
      }
      pipeline.run(inputs, [&](const torch::Tensor& logits, int64_t micro_batch) {
        return loss_of(logits, sample(micro_batch));
      });
      pipeline.accumulator().step(optimizer);
    }
  });
  // The weight is smaller than a shard, so at stage 3 the first rank of each stage has all of it.
  for (const size_t rank : {0, 2}) {
    EXPECT_THAT(message_of(errors[rank]),
                AllOf(HasSubstr("after 3 steps. values of "),
                      HasSubstr("parameter \"embedding.weight\": rank 0 has norm "),
                      HasSubstr(", rank 2 has norm ")));
  }
  for (const std::exception_ptr& error : errors) EXPECT_NE(message_of(error), "");
}

TEST(OptionsOfOptimizersTest, AreComparedInEachStepWithWhateverOption) {
  const auto errors = try_ranks(2, [&](World& world) {
    torch::manual_seed(1);
    Model model(Net(), world, options_of(1, 0));
    Optimizer<AdamW> optimizer(model, AdamWOptions(1e-3));
    train(model, optimizer, 6, [&](int made) {
      if (made == 2 && world.rank() == 1) optimizer.param_groups()[0].options().set_lr(2e-3);
    });
  });
  for (const std::exception_ptr& error : errors) {
    EXPECT_THAT(message_of(error),
                HasSubstr("after 2 steps. lr of parameter group 0 of optimizer 0"));
  }
}

}  // namespace
}  // namespace zeropage::replicas_test
