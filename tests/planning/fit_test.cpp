// What is chosen below limits of memory, and that training then keeps below them, with the same bits.
#include "zeropage/fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/disk_folder.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/harness/square_layers.h"
#include "zero/plan/byte_plan.h"
#include "zeropage/bytes.h"
#include "zeropage/context_parallel.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/experts.h"
#include "zeropage/zeropage.h"

namespace zeropage::fit_test {
namespace {

using namespace memory;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::run_ranks;

constexpr int64_t kWidth = 256;
constexpr int kLayers = 24;
constexpr int64_t kParameterBytes = kLayers * kWidth * kWidth * 4;

torch::nn::Sequential make_layers() {
  return testing::square_layers(kLayers, kWidth);
}

torch::Tensor sample() {
  return torch::ones({16, kWidth});
}

Options limited(int64_t device_bytes, int64_t host_bytes = Options::kNoLimit) {
  Options options;
  options.device_memory_bytes = device_bytes;
  options.host_memory_bytes = host_bytes;
  return options;
}

Fitted fit_layers(comm::World& world, const Options& options, const FitOptions& fit_options = {}) {
  return fit(make_layers, sample(), world, options, fit_options);
}

// The weights after some steps, as a number each, and the most that a rank held meanwhile.
struct Trained {
  std::vector<size_t> weights;
  int64_t peak_bytes = 0;
};
Trained train(comm::World& world, const Options& options) {
  const auto construct = [] {
    static std::mutex random;
    const std::lock_guard lock(random);
    torch::manual_seed(1);
    return make_layers();
  };
  DistributedDataParallel<torch::nn::Sequential> model(construct(), world, options);
  Optimizer<torch::optim::AdamW> optimizer(model);
  const std::shared_ptr<Ledger> ledger = Ledger::current();
  ledger->reset_peak();
  for (int step = 0; step < 3; ++step) {
    model(sample()).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Trained trained;
  trained.peak_bytes = ledger->at_peak().total() + ledger->offloaded_at_peak(Tier::kHost).total();
  visit_parameters(model, [&](const std::string&, const torch::Tensor& values) {
    const std::string_view bytes(static_cast<const char*>(values.const_data_ptr()),
                                 values.nbytes());
    trained.weights.push_back(std::hash<std::string_view>()(bytes));
  });
  return trained;
}

// 16 bytes a parameter at stage 0, 4 at stage 3 on four ranks.
TEST(FitTest, TakesTheCheapestThatFitsAndTrainingKeepsBelowTheLimit) {
  run_ranks(4, [](comm::World& world) {
    Options plain;
    plain.stage = stage_of(0);
    const Trained expected = train(world, plain);
    std::string last;
    for (const int64_t limit :
         {8 * kParameterBytes, 4 * kParameterBytes, 5 * kParameterBytes / 2}) {
      const Fitted fitted = fit_layers(world, limited(limit));
      EXPECT_NE(fitted.description, last) << "a lower limit has another setting";
      last = fitted.description;
      const Trained trained = train(world, fitted.options);
      EXPECT_LE(trained.peak_bytes, limit) << fitted.description;
      EXPECT_EQ(trained.weights, expected.weights) << fitted.description;
    }
    // What has room keeps the stage that sends least.
    EXPECT_THAT(fit_layers(world, limited(1_GiB)).description, HasSubstr("stage "));
    EXPECT_FALSE(zero::shards_parameters(fit_layers(world, limited(1_GiB)).options));
    EXPECT_TRUE(
        zero::shards_gradients(fit_layers(world, limited(5 * kParameterBytes / 2)).options));
  });
}

TEST(FitTest, SaysWhenMicroStepsAreReducedAndCountsWhatTheScriptAsksFor) {
  run_ranks(2, [](comm::World& world) {
    EXPECT_THAT(fit_layers(world, limited(1_GiB), {.micro_steps = 4}).description,
                HasSubstr("; micro-steps are reduced once a step: each rank has whole gradients"));
    EXPECT_THAT(fit_layers(world, limited(1_GiB)).description, Not(HasSubstr("micro-steps")));
    // Whole gradients beside the shards, which fit only where micro-steps are reduced each.
    const Options tight = limited(11 * kParameterBytes / 4);
    const FitOptions once{.micro_steps = 4,
                          .reduce = ReduceMicroSteps::kOnce,
                          .stages = {3},
                          .policies = {CheckpointPolicy::kNone}};
    FitOptions each = once;
    each.reduce = ReduceMicroSteps::kAuto;
    EXPECT_THAT(fit_layers(world, tight, each).description,
                HasSubstr("micro-steps are reduced at each micro-step: gradients are sharded"));
    EXPECT_THAT(error_of([&] { fit_layers(world, tight, once); }),
                HasSubstr("no setting keeps below the limits"));
  });
}

TEST(FitTest, TakesSmallerPagesBeforeAnythingLeaves) {
  run_ranks(2, [](comm::World& world) {
    FitOptions stage_3{.stages = {3}, .policies = {CheckpointPolicy::kNone}};
    const Fitted roomy = fit_layers(world, limited(1_GiB), stage_3);
    EXPECT_EQ(roomy.options.page_bytes, Options::kPageBytesOfDevice);
    EXPECT_EQ(roomy.options.prefetch_bytes, Options::kTwoLargestPages);
  });
}

TEST(FitTest, UsesTheDiskThatMayBeUsed) {
  const testing::DiskFolder folder;
  run_ranks(1, [&](comm::World& world) {
    // The host is the device: its tensors count to both.
    const Options options = limited(Options::kNoLimit, 7 * kParameterBytes / 2);
    EXPECT_THAT(error_of([&] { fit_layers(world, options); }), HasSubstr("of host missing"));
    const FitOptions with_disk{.nvme_directory = folder.path(), .may_step_in_backward = true};
    const Fitted fitted = fit_layers(world, options, with_disk);
    EXPECT_EQ(fitted.options.offload.optimizer, Tier::kNvme);
    EXPECT_EQ(fitted.options.offload.nvme_directory, folder.path());
    EXPECT_LE(train(world, fitted.options).peak_bytes, options.host_memory_bytes)
        << fitted.description;
  });
}

TEST(FitTest, LeavesTheDeviceRoomForWhatTheScriptHolds) {
  run_ranks(2, [](comm::World& world) {
    const Options options = limited(8 * kParameterBytes);
    const Fitted all = fit_layers(world, options);
    const Fitted beside = fit_layers(world, options, {.besides_device_bytes = 4 * kParameterBytes});
    EXPECT_NE(all.description, beside.description);
    EXPECT_LE(train(world, beside.options).peak_bytes, 4 * kParameterBytes) << beside.description;
  });
}

TEST(FitTest, RefusesOnAllRanksWhatNothingFits) {
  run_ranks(2, [](comm::World& world) {
    const std::string error = error_of([&] { fit_layers(world, limited(kParameterBytes)); });
    EXPECT_THAT(error, HasSubstr("fit(): no setting keeps below the limits of memory\n"));
    EXPECT_THAT(error, HasSubstr("nothing fits; nearest: stage 3"));
    EXPECT_THAT(error, HasSubstr(" of device missing"));
    // Ranks are as they were.
    EXPECT_THAT(fit_layers(world, limited(1_GiB)).description, HasSubstr("stage "));
  });
}

// What nothing is left of is not without a limit.
TEST(FitTest, RefusesALimitThatIsUsedUpBeforeItBegins) {
  run_ranks(2, [](comm::World& world) {
    const torch::Tensor data = torch::empty({4_MiB}, torch::kByte);
    EXPECT_THAT(error_of([&] { fit_layers(world, limited(Options::kNoLimit, 4_MiB)); }),
                HasSubstr(" of host missing"));
  });
  const WorldDescription described{.ranks = 8, .host_memory_bytes = 1, .nvme_bytes = 3};
  EXPECT_EQ(described.bytes_of_rank(Tier::kHost), 1);
  EXPECT_EQ(described.bytes_of_rank(Tier::kNvme), 1);
  EXPECT_EQ(WorldDescription{.ranks = 8}.bytes_of_rank(Tier::kHost), 0) << "not known";
}

// A residual block, which its recompute leaves the input of.
struct ResidualImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return x + down(torch::gelu(up(torch::layer_norm(x, {x.size(-1)}))));
  }
  torch::nn::Linear up = register_module("up", torch::nn::Linear(32, 128));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(128, 32));
};
TORCH_MODULE(Residual);

torch::nn::Sequential make_blocks() {
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(Residual());
  return net;
}

// A step of the net, as a script makes it that is told what to recompute.
int64_t peak_of_step(comm::World& world, const Fitted& fitted, const torch::Tensor& x) {
  DistributedDataParallel<torch::nn::Sequential> model(make_blocks(), world, fitted.options);
  Optimizer<torch::optim::AdamW> optimizer(model);
  auto recompute = zeropage::recompute(model, fitted);
  Ledger::current()->reset_peak();
  for (int step = 0; step < 2; ++step) {
    torch::Tensor loss;
    {
      const ActivationScope forward(recompute);
      loss = model(x).square().mean();
    }
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return static_cast<int64_t>(world.max(static_cast<double>(Ledger::current()->at_peak().total())));
}

TEST(FitTest, FindsTheBlocksOfAListByItselfAndSaysWhatTheScriptDoes) {
  run_ranks(2, [](comm::World& world) {
    const torch::Tensor x = torch::ones({512, 32});
    Fitted all;
    const int64_t peak = peak_of_step(world, all, x);
    const Fitted fitted = fit(make_blocks, x, world, limited(peak * 2 / 3),
                              {.policies = {CheckpointPolicy::kNone, CheckpointPolicy::kBlocks}});
    EXPECT_EQ(fitted.checkpointing, CheckpointPolicy::kBlocks);
    EXPECT_THAT(fitted.description, HasSubstr("checkpoint blocks, the 8 of the module itself"));
    EXPECT_THAT(fitted.for_script,
                HasSubstr("around forward and loss: ActivationScope forward(recompute), with auto "
                          "recompute = zeropage::recompute(model, fitted)"));
    EXPECT_LE(peak_of_step(world, fitted, x), peak * 2 / 3) << fitted.description;
    // Who names a list that is not there is told.
    EXPECT_THAT(error_of([&] {
                  fit(make_blocks, x, world, limited(peak * 2 / 3), {.blocks = {"layers"}});
                }),
                HasSubstr("expected the name of a ModuleList or Sequential, got \"layers\""));
  });
}

parallel::ExpertsOptions options_of_experts() {
  parallel::ExpertsOptions options(64, 256, /*experts=*/4, /*active=*/4);
  options.activation = parallel::ExpertActivation::kGelu;
  return options;
}

// Attention, and a mixture of experts that takes all of them for each token, so that tokens are spread as a plan has it.
struct SparseImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = qkv(x).view({x.size(0), x.size(1), 3, 4, 16}).transpose(1, 3).unbind(2);
    const torch::Tensor mixed = torch::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], {}, /*dropout_p=*/0, /*is_causal=*/true);
    return experts(x + mixed.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear qkv = register_module("qkv", torch::nn::Linear(64, 192));
  parallel::Experts experts = register_module("experts", parallel::Experts(options_of_experts()));
};
TORCH_MODULE(Sparse);

// On a mesh of one of those axes alone, plainly at stage 0.
class FitOnAMeshTest : public ::testing::TestWithParam<std::string> {
 protected:
  static FitOptions plainly() { return {.stages = {0}, .policies = {CheckpointPolicy::kNone}}; }
  static FitOptions on(const std::string& axis, int ranks) {
    FitOptions options = plainly();
    (axis == "context" ? options.context : options.expert) = ranks;
    return options;
  }
  // The most that a rank holds in training.
  static int64_t peak(comm::World& world, const torch::Tensor& x, const Options& options) {
    const std::string axis = GetParam();
    const comm::Mesh mesh(world, {{"data", 1}, {axis, world.size()}});
    Sparse sparse;
    if (axis == "context") parallel::context_parallel(sparse, mesh["context"]);
    if (axis == "expert") expert_parallel(*sparse, mesh);
    DistributedDataParallel<Sparse> model(sparse, mesh, options);
    Optimizer<torch::optim::AdamW> optimizer(model);
    Ledger::current()->reset_peak();
    for (int step = 0; step < 2; ++step) {
      model(x).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    return static_cast<int64_t>(
        world.max(static_cast<double>(Ledger::current()->at_peak().total())));
  }
};

TEST_P(FitOnAMeshTest, CountsWhatARankHoldsThatSharesRowsOrExperts) {
  run_ranks(2, [](comm::World& world) {
    const auto construct = [] { return Sparse(); };
    const torch::Tensor x = torch::ones({2, 1024, 64});  // this rank's tokens
    Options plain;
    plain.stage = stage_of(0);
    const int64_t held = peak(world, x, plain);
    const FitOptions on_mesh = on(GetParam(), 2);
    const Fitted fitted = fit(construct, x, world, limited(held * 107 / 100), on_mesh);
    EXPECT_LE(peak(world, x, fitted.options), held * 107 / 100) << fitted.description;
    EXPECT_THAT(error_of([&] { fit(construct, x, world, limited(held * 96 / 100), on_mesh); }),
                HasSubstr("no setting keeps below the limits"));
  });
}

TEST(FitTest, PlansForTheAxesThatItIsTold) {
  run_ranks(2, [](comm::World& world) {
    const Options roomy = limited(8_GiB);
    const torch::Tensor x = torch::ones({2, 16, 64});
    EXPECT_THAT(error_of([&] {
                  fit([] { return torch::nn::Linear(64, 64); }, x, world, roomy, {.expert = 2});
                }),
                HasSubstr("the module has no layer of experts"));
    // The zig-zag order gives each rank two chunks.
    const torch::Tensor odd = torch::ones({2, 15, 64});
    EXPECT_THAT(error_of([&] { fit([] { return Sparse(); }, odd, world, roomy, {.context = 2}); }),
                HasSubstr("15"));
  });
}

INSTANTIATE_TEST_SUITE_P(Axes, FitOnAMeshTest, ::testing::Values("context", "expert"));

TEST(FitTest, SaysWhichMicroBatchFitsWhereNothingElseDoes) {
  run_ranks(1, [](comm::World& world) {
    const torch::Tensor x = torch::ones({512, 32});
    const Options tight = limited(peak_of_step(world, {}, x) / 3);
    const FitOptions whole{.policies = {CheckpointPolicy::kNone}};
    const std::string error = error_of([&] { fit(make_blocks, x, world, tight, whole); });
    EXPECT_THAT(error, HasSubstr("with micro-batches of "));
    EXPECT_THAT(error, HasSubstr(" samples instead of 512 it fits: give fit() a sample of "));
    // Followed.
    const auto number_behind = [&](const std::string& words) {
      return std::stoll(error.substr(error.find(words) + words.size()));
    };
    const int64_t samples = number_behind("a sample of ");
    FitOptions followed = whole;
    followed.micro_steps = number_behind("FitOptions::micro_steps = ");
    EXPECT_EQ(samples * followed.micro_steps, 512);
    const Fitted fitted = fit(make_blocks, x.narrow(0, 0, samples), world, tight, followed);
    EXPECT_THAT(fitted.description, HasSubstr("stage "));
    // Targets that are flattened have a multiple of the samples.
    const std::string with_loss = error_of([&] {
      fit(
          make_blocks, x, torch::ones({512 * 32}),
          [](const torch::Tensor& output, const torch::Tensor& target) {
            return torch::mse_loss(output.flatten(), target);
          },
          world, tight, whole);
    });
    EXPECT_THAT(with_loss, HasSubstr("with micro-batches of "));
  });
}

TEST(FitTest, IsComparedWithWhatIsHeldWhereMemoryRunsOut) {
  run_ranks(2, [](comm::World& world) {
    const torch::Tensor x = torch::ones({256, 32});
    const FitOptions whole{.policies = {CheckpointPolicy::kNone}};
    const Options limits = limited(peak_of_step(world, {}, x) * 11 / 10);
    const Fitted fitted = fit(make_blocks, x, world, limits, whole);
    EXPECT_LE(peak_of_step(world, fitted, x), limits.device_memory_bytes);
    // Four times the samples that fit() was shown.
    const std::string error = error_of([&] {
      peak_of_step(world, fitted, torch::ones({1024, 32}));
    });
    EXPECT_THAT(error, HasSubstr("fit() had counted on "));
    EXPECT_THAT(error, HasSubstr("; with what is asked for there is more of activation ("));
    EXPECT_THAT(error, HasSubstr("fit()\n")) << "a column of the table";
    // A run with other options is another one.
    Fitted other = fitted;
    other.options.stage = stage_of(3);
    other.options.page_bytes = 64_KiB;
    EXPECT_THAT(error_of([&] {
                  peak_of_step(world, other, torch::ones({2048, 32}));
                }),
                Not(HasSubstr("fit() had counted on ")));
  });
}

// Rank 0 alone constructs the model; the others wait for what it chose.
TEST(FitTest, TellsAllRanksWhatTheModelsConstructorThrows) {
  run_ranks(2, [](comm::World& world) {
    const auto construct = []() -> torch::nn::Sequential {
      throw std::runtime_error("no such vocabulary");
    };
    EXPECT_THAT(error_of([&] { fit(construct, sample(), world, limited(1_GiB)); }),
                HasSubstr("no such vocabulary"));
  });
}

TEST(FitTest, RefusesLimitsAndChoicesThatContradictEachOther) {
  run_ranks(1, [](comm::World& world) {
    const auto refused = [&](const Options& options, const FitOptions& fit_options = {}) {
      return error_of([&] { fit_layers(world, options, fit_options); });
    };
    EXPECT_THAT(refused(Options()), HasSubstr("expected a limit to fit into"));
    Options offloads = limited(1_GiB);
    offloads.offload.optimizer = Tier::kHost;
    EXPECT_THAT(refused(offloads), HasSubstr("options.offload.optimizer is host; leave it out"));
    EXPECT_THAT(refused(limited(1_GiB), {.tiers = {Tier::kNvme}}),
                HasSubstr("kNvme needs FitOptions::nvme_directory"));
    Options moves = limited(1_GiB);
    moves.offload.parameters = Tier::kHost;
    EXPECT_THAT(refused(moves), HasSubstr("options.offload.parameters is host; leave it out"));
    EXPECT_THAT(refused(limited(1_GiB), {.context = 2}),
                HasSubstr("divides the 1 of the world, got 2 and 1"));
    EXPECT_THAT(refused(limited(1_GiB), {.expert = 0}), HasSubstr("got 1 and 0"));
    EXPECT_THAT(refused(limited(1_GiB), {.stages = {0, 7}}),
                HasSubstr("expected stages from 0 to 3, got 7"));
    EXPECT_THAT(refused(limited(1_GiB), {.besides_bytes = -1}),
                HasSubstr("FitOptions::besides_bytes: expected 0 or more bytes to leave free"));
    EXPECT_THAT(refused(limited(1_GiB), {.besides_device_bytes = -1}),
                HasSubstr("FitOptions::besides_device_bytes: expected 0 or more"));
    EXPECT_THAT(refused(limited(1_GiB), {.nvme_bytes = 5}), HasSubstr("5 B of no folder"));
    EXPECT_THAT(refused(limited(1_GiB), {.nvme_directory = "/no/such"}), HasSubstr("/no/such"));
    Options by_class = limited(1_GiB);
    by_class.update_by = UpdateBy::kClass;
    EXPECT_THAT(refused(by_class, {.tiers = {Tier::kHost}}), HasSubstr("a fused update"));
    EXPECT_THAT(refused(limited(1_GiB), {.stages = {}}), HasSubstr("nothing to try"));
    EXPECT_THAT(refused(limited(1_MiB, 1_KiB)), HasSubstr("of host missing"));
  });
}

}  // namespace
}  // namespace zeropage::fit_test
