#include "zeropage/distributed_data_parallel.h"

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/ranks.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"
#include "zero/pages/parameter_pages.h"
#include "zeropage/ledger.h"
#include "zeropage/optimizer.h"

namespace zeropage::distributed_data_parallel_test {
namespace {

using namespace zeropage::testing;
using torch::optim::SGD;
using torch::optim::SGDOptions;

torch::nn::Linear make_linear(double weight = 1.0) {
  torch::nn::Linear linear(torch::nn::LinearOptions(7, 7).bias(false));
  const torch::NoGradGuard no_grad;
  linear->weight.fill_(weight);
  return linear;
}

Options at_stage(int stage) {
  Options options;
  options.stage = stage_of(stage);
  return options;
}

// The gradient of sum(linear(x)) is the same in every row: the column sums of x.
void backward(DistributedDataParallel<torch::nn::Linear>& model, double value) {
  model(torch::full({1, 7}, value)).sum().backward();
}

class DistributedDataParallelTest : public ::testing::TestWithParam<int> {
 protected:
  Options options() const { return at_stage(GetParam()); }

  // What the optimizer applies: with SGD of rate 1, the change of the weights.
  static double applied_gradient(DistributedDataParallel<torch::nn::Linear>& model,
                                 torch::optim::Optimizer& optimizer) {
    const double before = model->weight.sum().item<double>();
    optimizer.step();
    return (before - model->weight.sum().item<double>()) / 49.0;
  }
};

TEST_P(DistributedDataParallelTest, GivesEveryRankRankZerosParametersAndBuffers) {
  run_ranks(3, [&](comm::World& world) {
    ConvNet net;
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(world.rank());
      for (auto& buffer : net->buffers()) buffer.fill_(world.rank() + 5);
    }
    DistributedDataParallel<ConvNet> model(net, world, options());
    for (const auto& parameter : model.parameters())
      EXPECT_TRUE(parameter.eq(0).all().item<bool>());
    for (const auto& buffer : model.buffers()) EXPECT_TRUE(buffer.eq(5).all().item<bool>());
  });
}

TEST_P(DistributedDataParallelTest, KeepsTheModuleItself) {
  run_ranks(2, [&](comm::World& world) {
    auto linear = make_linear();
    const bool sharded = options().stage.parameters;
    const auto view = sharded ? torch::Tensor() : linear->weight.detach()[2];
    const auto* impl = linear->weight.unsafeGetTensorImpl();
    DistributedDataParallel<torch::nn::Linear> model(linear, world, options());
    EXPECT_EQ(model->weight.unsafeGetTensorImpl(), impl);
    {
      const torch::NoGradGuard no_grad;
      model->weight.fill_(4);
    }
    if (!sharded) {
      EXPECT_TRUE(view.eq(4).all().item<bool>()) << "a view taken before wrapping follows";
    }
    EXPECT_EQ(model.named_parameters().keys(), std::vector<std::string>{"weight"});
    const auto x = torch::randn({2, 7});
    EXPECT_TRUE(torch::equal(model(x), linear(x)));
  });
}

TEST_P(DistributedDataParallelTest, NamesWhatItsForwardMakesAndLeavesPagesTheirNames) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    const memory::Ledger& ledger = *memory::Ledger::current();
    const memory::Breakdown before = ledger.now();
    const auto y = model(torch::ones({100, 7}));
    memory::Breakdown after = ledger.now();
    EXPECT_GE(after[memory::Kind::kActivation], 100 * 7 * 4);
    EXPECT_LT(after[memory::Kind::kActivation], 2 * 100 * 7 * 4) << "a page is not an activation";
    {
      const memory::KindScope repeated(memory::Kind::kRecompute);
      const auto again = model(torch::ones({100, 7}));
      EXPECT_EQ(ledger.now()[memory::Kind::kActivation], after[memory::Kind::kActivation]);
      EXPECT_GE(ledger.now()[memory::Kind::kRecompute], 100 * 7 * 4);
    }
    EXPECT_EQ(memory::current_kind(), memory::Kind::kActivationAndOther);
    EXPECT_EQ(before[memory::Kind::kActivation], 0);
    y.sum().backward();
  });
}

TEST_P(DistributedDataParallelTest, AveragesGradientsOverRanks) {
  run_ranks(3, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    backward(model, world.rank());  // 0, 1, 2
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 1.0);
  });
}

TEST_P(DistributedDataParallelTest, AccumulatesWithoutAveragingInsideNoSync) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    const comm::WireTraffic sent_before = world.communicator().wire_traffic();
    {
      const auto guard = model.no_sync();
      backward(model, world.rank());
      backward(model, world.rank());
    }
    EXPECT_EQ(world.communicator().wire_traffic().all_reduce, sent_before.all_reduce);
    EXPECT_EQ(world.communicator().wire_traffic().reduce_scatter, sent_before.reduce_scatter);
    EXPECT_EQ(model->weight.grad()[0][0].item<double>(), 2.0 * world.rank());
    backward(model, world.rank() + 1);
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), (3 * 0 + 1 + 3 * 1 + 1) / 2.0);
  });
}

TEST_P(DistributedDataParallelTest, AveragesInStepWhatNoSyncLeft) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    {
      const auto guard = model.no_sync();
      backward(model, world.rank());
    }
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 0.5);
  });
}

TEST_P(DistributedDataParallelTest, AveragesInStepWhatALocalBackwardAddedToAMean) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    backward(model, 2 * world.rank());  // mean 1
    {
      const auto guard = model.no_sync();
      backward(model, world.rank());  // mean 0.5
    }
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 1.5);
  });
}

TEST_P(DistributedDataParallelTest, ForgetsAMeanThatWasZeroedAfterALocalBackward) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(Oddball(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->unused->parameters()) parameter.zero_();
    }
    const auto reach = [&](double weight, double bias) {
      (weight * model->unused->weight.sum() + bias * model->unused->bias.sum()).backward();
    };
    reach(100, 100);
    {
      const auto guard = model.no_sync();
      reach(100, 0);  // reopens the page of both
    }
    model->unused->weight.mutable_grad().zero_();
    model->unused->bias.mutable_grad().reset();
    reach(world.rank(), 2 * world.rank());
    optimizer.step();
    EXPECT_TRUE(model->unused->weight.eq(-0.5).all().item<bool>()) << model->unused->weight;
    EXPECT_TRUE(model->unused->bias.eq(-1.0).all().item<bool>()) << model->unused->bias;
    // A local backward that does not reach what was zeroed does not bring it back.
    optimizer.zero_grad();
    reach(100, 100);
    for (const bool zeroes : {false, true}) {
      const auto guard = model.no_sync();
      if (zeroes) model->unused->bias.mutable_grad().reset();
      (0 * model->unused->weight.sum()).backward();
    }
    optimizer.step();
    EXPECT_TRUE(model->unused->weight.eq(-100.5).all().item<bool>()) << model->unused->weight;
    EXPECT_TRUE(model->unused->bias.eq(-1.0).all().item<bool>()) << model->unused->bias;
  });
}

TEST_P(DistributedDataParallelTest, RefusesToScaleAMeanThatIsKeptBesideALocalGradient) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    backward(model, 1);
    {
      const auto guard = model.no_sync();
      backward(model, 1);
      model->weight.mutable_grad().mul_(0.5);
      EXPECT_THAT(
          [&] { backward(model, 1); },
          ::testing::Throws<c10::Error>(::testing::Property(
              &c10::Error::what_without_backtrace,
              ::testing::HasSubstr("was changed in place after a backward under no_sync()"))));
    }
  });
}

TEST_P(DistributedDataParallelTest, RefusesBackwardOverAGraphFromBeforeTheStep) {
  run_ranks(2, [&](comm::World& world) {
    torch::nn::Sequential net(torch::nn::Linear(7, 7), torch::nn::Linear(7, 7));
    DistributedDataParallel<torch::nn::Sequential> model(net, world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    const auto loss = model(torch::ones({1, 7})).sum();
    loss.backward({}, /*retain_graph=*/true);
    optimizer.step();
    EXPECT_THAT([&] { loss.backward(); },
                ::testing::Throws<c10::Error>(
                    ::testing::Property(&c10::Error::what_without_backtrace,
                                        ::testing::HasSubstr("modified by an inplace operation"))));
  });
}

TEST_P(DistributedDataParallelTest, RefusesToStepAfterABackwardThatThrew) {
  run_ranks(2, [&](comm::World& world) {
    torch::nn::Sequential net(torch::nn::Linear(7, 7), torch::nn::Linear(7, 7));
    DistributedDataParallel<torch::nn::Sequential> model(net, world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    auto hidden = net[0]->as<torch::nn::Linear>()->forward(torch::ones({1, 7}));
    hidden.register_hook(
        [](torch::Tensor) -> torch::Tensor { throw std::runtime_error("user's hook"); });
    auto output = net[1]->as<torch::nn::Linear>()->forward(hidden).sum();
    EXPECT_THROW(output.backward(), std::runtime_error);
    EXPECT_THROW(optimizer.step(), c10::Error);
    model.zero_grad();
    model(torch::ones({1, 7})).sum().backward();
    optimizer.step();
  });
}

TEST_P(DistributedDataParallelTest, AddsSeveralAveragedBackwards) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    backward(model, world.rank());      // mean 0.5
    backward(model, 3 * world.rank());  // mean 1.5
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 2.0);
    // Nobody zeroed: the next step sees the old gradient too, as with any optimizer.
    backward(model, world.rank());
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 2.5);
  });
}

TEST_P(DistributedDataParallelTest, ForgetsGradientsHoweverTheyAreZeroed) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    const std::vector<std::function<void()>> ways = {
        [&] { optimizer.zero_grad(); }, [&] { optimizer.zero_grad(/*set_to_none=*/false); },
        [&] { model.zero_grad(); }, [&] { model->zero_grad(/*set_to_none=*/false); },
        [&] { model->weight.mutable_grad().reset(); }};
    for (const auto& zero : ways) {
      backward(model, 100);
      zero();
      backward(model, world.rank());
      EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 0.5);
      optimizer.zero_grad();
    }
  });
}

TEST_P(DistributedDataParallelTest, LeavesParametersThatNoRankUsedAlone) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(Oddball(), world, options());
    Optimizer<torch::optim::AdamW> optimizer(model,
                                             torch::optim::AdamWOptions(0.1).weight_decay(0.5));
    const auto before = model->unused->weight.detach().clone();
    const Samples samples = samples_of(world.rank(), 0);
    loss_of(model(samples.inputs), samples).backward();
    EXPECT_FALSE(model->unused->weight.grad().defined());
    optimizer.step();
    EXPECT_TRUE(torch::equal(model->unused->weight, before));
  });
}

TEST_P(DistributedDataParallelTest, CountsARankWithoutAGradientAsZero) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<Oddball> model(Oddball(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    {
      const torch::NoGradGuard no_grad;
      model->unused->bias.zero_();
    }
    auto loss = model(torch::zeros({1, 7})).sum() * 0;
    if (world.rank() == 1) loss = loss + 3 * model->unused->bias.sum();
    loss.backward();
    optimizer.step();
    EXPECT_TRUE(model->unused->bias.eq(-1.5).all().item<bool>());
  });
}

TEST_P(DistributedDataParallelTest, WaitsInStepForARankWhoseBackwardReachedNothing) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    if (world.rank() == 0) backward(model, 2);
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 1.0);
  });
}

TEST_P(DistributedDataParallelTest, TakesRankZerosBuffersAtTheEndOfEachBackwardThatAverages) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<ConvNet> model(ConvNet(), world, options());
    const auto means_of_ranks = [&] {
      return world.gather_text("means", c10::str(model->norm1->running_mean));
    };
    const auto x = torch::full({4, 7}, 1.0 + world.rank());
    const auto loss = model(x).sum();
    EXPECT_EQ(model->norm1->num_batches_tracked.item<int64_t>(), 1);
    auto means = means_of_ranks();
    EXPECT_NE(means[0], means[1]);
    const auto version = model->norm1->running_mean._version();
    loss.backward();
    means = means_of_ranks();
    EXPECT_EQ(means[0], means[1]);
    EXPECT_EQ(model->norm1->running_mean._version(), version) << "graphs that saved it go on";
    {
      const torch::NoGradGuard no_grad;
      model(x);
      model(torch::ones({4, 7}));
    }
    means = means_of_ranks();
    EXPECT_EQ(means[0], means[1]) << "without a backward a forward begins with rank 0's";
    model.eval();
    // One rank may evaluate alone.
    if (world.rank() == 0) model(torch::ones({4, 7}));
  });
}

// A rotary table that no forward writes, one that some do, statistics, and a count.
struct TablesImpl : torch::nn::Module {
  TablesImpl() {
    table = register_buffer("table", torch::ones({kRows, 7}));
    codes = register_buffer("codes", torch::ones({kRows, 7}));
    mean = register_buffer("mean", torch::ones({7}));
    count = register_buffer("count", torch::zeros({}, torch::kInt64));
    linear = register_module("linear", torch::nn::Linear(7, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x * table[0] + codes[0]); }

  static constexpr int64_t kRows = 8192;
  torch::Tensor table, codes, mean, count;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Tables);

constexpr int64_t kTableBytes = TablesImpl::kRows * 7 * 4;

// A backward of each of two ranks, after which both have rank 0's buffers. Returns the bytes of buffers that a rank sent
// or passed on.
class BackwardsOverTables {
 public:
  BackwardsOverTables(comm::World& world, const Options& options)
      : world_(world), model_(Tables(), world, options) {}

  Tables& tables() { return model_.module(); }
  DistributedDataParallel<Tables>& model() { return model_; }

  int64_t sent_in_backward() {
    return sent_in([&] { model_(torch::ones({2, 7})).sum().backward(); });
  }
  int64_t sent_in(const std::function<void()>& call) {
    const int64_t before = world_.communicator().wire_traffic().broadcast.bytes;
    call();
    const int64_t own = world_.communicator().wire_traffic().broadcast.bytes - before;
    // The root of two ranks sends all there is.
    const auto of_all = torch::tensor({static_cast<double>(own)}, torch::kDouble);
    world_.communicator().all_reduce(of_all, comm::ReduceOp::kMax, "bytes").wait();
    return static_cast<int64_t>(of_all.item<double>());
  }
  void expect_alike(const std::string& after) {
    for (const auto& buffer : model_.named_buffers()) {
      const auto sums = world_.gather_text(
          buffer.key(), c10::str(buffer.value().to(torch::kDouble).sum().item<double>()));
      EXPECT_EQ(sums[0], sums[1]) << buffer.key() << " after " << after;
    }
  }

 private:
  comm::World& world_;
  DistributedDataParallel<Tables> model_;
};

TEST_P(DistributedDataParallelTest, SendsBuffersOnlyWhereSomebodyMayHaveWrittenThem) {
  constexpr int64_t kStatistics = 7 * 4, kCount = 8;
  run_ranks(2, [&](comm::World& world) {
    const torch::NoGradGuard no_grad;
    BackwardsOverTables run(world, options());
    const auto sent = [&] {
      const torch::AutoGradMode on(true);
      return run.sent_in_backward();
    };
    EXPECT_EQ(sent(), kStatistics) << "batch norms write past the version, so always";
    EXPECT_EQ(sent(), kStatistics);
    run.tables()->codes.add_(world.rank());
    run.tables()->count.add_(1);
    EXPECT_EQ(sent(), kStatistics + kTableBytes + kCount);
    run.expect_alike("a write on all ranks");
    EXPECT_EQ(sent(), kStatistics);
    // One rank alone: the others send and take it, too.
    for (const int rank : {0, 1}) {
      if (world.rank() == rank) run.tables()->table.mul_(2);
      EXPECT_EQ(sent(), kStatistics + kTableBytes) << "rank " << rank;
      run.expect_alike("a write on a rank");
      EXPECT_EQ(run.tables()->table.sum().item<double>(), 2 * 7 * TablesImpl::kRows);
      EXPECT_EQ(sent(), kStatistics);
    }
    // Another storage.
    if (world.rank() == 1) run.tables()->table.set_data(torch::zeros({TablesImpl::kRows, 7}));
    EXPECT_EQ(sent(), kStatistics + kTableBytes);
    run.expect_alike("set_data()");
    // Past the version: all of it at once, and of a small one any element.
    if (world.rank() == 1) run.tables()->table.data().mul_(3);
    if (world.rank() == 0) *run.tables()->count.data_ptr<int64_t>() = 17;
    EXPECT_EQ(sent(), kStatistics + kTableBytes + kCount);
    run.expect_alike("data_ptr()");
    EXPECT_EQ(run.tables()->count.item<int64_t>(), 17);
    EXPECT_EQ(sent(), kStatistics);
    // A single element, within 64 backwards.
    if (world.rank() == 1) run.tables()->table.data_ptr<float>()[4321] = 5;
    int64_t in_64 = 0;
    for (int time = 0; time < 64; ++time) in_64 += sent();
    EXPECT_EQ(in_64, 64 * kStatistics + kTableBytes);
    run.expect_alike("a single element");
  });
}

TEST_P(DistributedDataParallelTest, SendsWhatWasWrittenInEvalModeWithTheNextTrainingBackward) {
  run_ranks(2, [&](comm::World& world) {
    BackwardsOverTables run(world, options());
    run.sent_in_backward();
    run.model().eval();
    {
      const torch::NoGradGuard no_grad;
      run.tables()->codes.add_(world.rank());
      // One rank may evaluate alone, and at stage 3 all do.
      if (world.rank() == 0 || GetParam() == 3) run.model()(torch::ones({2, 7}));
    }
    EXPECT_EQ(run.sent_in_backward(), 0) << "of a frozen module";
    run.model().train();
    EXPECT_GE(run.sent_in_backward(), kTableBytes);
    run.expect_alike("training goes on");
  });
}

// They wait for each other whatever mode each is in.
TEST_P(DistributedDataParallelTest, SendsBuffersAlikeWhereOneRankIsInEvalMode) {
  run_ranks(2, [&](comm::World& world) {
    BackwardsOverTables run(world, options());
    if (world.rank() == 1) run.model().eval();
    const torch::NoGradGuard no_grad;
    run.tables()->codes.add_(world.rank());
    const torch::AutoGradMode on(true);
    EXPECT_GE(run.sent_in_backward(), kTableBytes);
    run.expect_alike("a backward");
  });
}

TEST_P(DistributedDataParallelTest, SendsNoTableBeforeATrainingForwardWithoutGradients) {
  run_ranks(2, [&](comm::World& world) {
    BackwardsOverTables run(world, options());
    const torch::NoGradGuard no_grad;
    const auto forward = [&] { run.model()(torch::ones({2, 7})); };
    EXPECT_EQ(run.sent_in(forward), 7 * 4);
    if (world.rank() == 1) run.tables()->codes.add_(1);
    EXPECT_EQ(run.sent_in(forward), 7 * 4 + kTableBytes);
    run.expect_alike("a forward");
  });
}

TEST_P(DistributedDataParallelTest, RunsBackwardOverSharedModulesAndRetainedGraphs) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    const auto x = torch::full({1, 7}, 1.0 + world.rank());
    const auto loss = model(x).sum() + model(x).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 6.0);
  });
}

TEST_P(DistributedDataParallelTest, TakesGuardsOfNoSyncThatMoveAndEndInAnyOrder) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    const auto is_local = [&] {
      model.zero_grad();
      const comm::WireTraffic before = world.communicator().wire_traffic();
      backward(model, 1.0 + world.rank());
      const comm::WireTraffic after = world.communicator().wire_traffic();
      return after.all_reduce.messages == before.all_reduce.messages;
    };
    std::optional<NoSync> guard;
    EXPECT_FALSE(is_local());
    guard = model.no_sync();
    EXPECT_TRUE(is_local());
    guard = model.no_sync();
    EXPECT_TRUE(is_local()) << "the new guard is in force, and the old one has ended";
    NoSync moved = std::move(*guard);
    guard.reset();
    EXPECT_TRUE(is_local()) << "what was moved from ended nothing";
    {
      std::vector<NoSync> several;
      several.push_back(model.no_sync());
      several.push_back(std::move(moved));
      several.push_back(model.no_sync());
      several.erase(several.begin());
      EXPECT_TRUE(is_local());
    }
    EXPECT_FALSE(is_local());
  });
}

TEST_P(DistributedDataParallelTest, RecoversFromABackwardThatThrewBeforeAnyExchange) {
  run_ranks(2, [&](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, options());
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    auto input = torch::full({1, 7}, 5.0);
    auto output = model(input);
    output.register_hook(
        [](torch::Tensor) -> torch::Tensor { throw std::runtime_error("user's hook"); });
    EXPECT_THROW(output.sum().backward(), std::runtime_error);
    backward(model, world.rank());
    EXPECT_DOUBLE_EQ(applied_gradient(model, optimizer), 0.5);
  });
}

TEST_P(DistributedDataParallelTest, MayBeDestroyedBeforeOrAfterItsOptimizer) {
  run_ranks(2, [&](comm::World& world) {
    auto linear = make_linear();
    auto model =
        std::make_unique<DistributedDataParallel<torch::nn::Linear>>(linear, world, options());
    auto optimizer = std::make_unique<Optimizer<SGD>>(*model, SGDOptions(1.0));
    backward(*model, world.rank());
    model.reset();
    optimizer->step();
    EXPECT_EQ(linear->weight[0][0].item<double>(), 0.5);
    optimizer.reset();
    if (options().stage.parameters) {
      EXPECT_THAT(
          [&] {
            linear(torch::ones({1, 7}));
          },
          ::testing::Throws<c10::Error>(
              ::testing::Property(&c10::Error::what_without_backtrace,
                                  ::testing::HasSubstr("outlived the DistributedDataParallel"))));
      return;
    }
    // A plain module again.
    linear->zero_grad();
    linear(torch::full({1, 7}, 1.0 + world.rank())).sum().backward();
    EXPECT_EQ(linear->weight.grad()[0][0].item<double>(), 1.0 + world.rank());
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, DistributedDataParallelTest, ::testing::Values(0, 1, 2, 3));

TEST(DataParallelErrorTest, RefusesSetsThatCannotBeUpdated) {
  run_ranks(1, [](comm::World& world) {
    for (const Stage& stage : {Stage{.gradients = true}, Stage{.parameters = true}}) {
      Options options;
      options.stage = stage;
      EXPECT_THAT(
          [&] { DistributedDataParallel<torch::nn::Linear>(make_linear(), world, options); },
          ::testing::Throws<c10::Error>(
              ::testing::Property(&c10::Error::what_without_backtrace,
                                  ::testing::HasSubstr("leaves the optimizer state whole"))));
    }
    EXPECT_THROW(stage_of(4), c10::Error);
  });
}

TEST(DataParallelErrorTest, NamesWhatDiffersBetweenRanksBeforeAnythingIsExchanged) {
  const auto errors = try_ranks(2, [](comm::World& world) {
    torch::nn::Linear linear(7, world.rank() == 0 ? 5 : 6);
    DistributedDataParallel<torch::nn::Linear> model(linear, world);
  });
  for (const auto& error : errors) {
    EXPECT_THAT(message_of(error),
                ::testing::HasSubstr("parameter \"weight\": Float [5, 7]; rank 1 has parameter "
                                     "\"weight\": Float [6, 7]"));
  }
  const auto options = try_ranks(2, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, at_stage(world.rank()));
  });
  EXPECT_THAT(message_of(options[1]),
              ::testing::HasSubstr("rank 0 has options.stage: 0; rank 1 has options.stage: 1"));
}

TEST(DataParallelErrorTest, RefusesDifferentTensorsOverTheSameMemory) {
  run_ranks(1, [](comm::World& world) {
    auto first = make_linear();
    auto second = make_linear();
    second->weight.set_data(first->weight.data());
    torch::nn::Sequential both(first, second);
    try {
      DistributedDataParallel<torch::nn::Sequential> model(both, world);
      ADD_FAILURE() << "accepted";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  ::testing::HasSubstr("\"0.weight\" and \"1.weight\""));
    }
  });
}

TEST(DataParallelErrorTest, RefusesAParameterOfAnotherDevice) {
  run_ranks(1, [](comm::World& world) {
    auto module = std::make_shared<torch::nn::Module>();
    module->register_parameter("elsewhere", torch::empty({3}, torch::kMeta));
    try {
      zero::ParameterPages pages(world, zero::parameters_of(*module), {.page_bytes = 4096});
      ADD_FAILURE() << "accepted";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  ::testing::HasSubstr("parameter \"elsewhere\": expected it on cpu, got meta"));
    }
  });
}

TEST(DataParallelErrorTest, RefusesParametersThatCannotBeShardedElementByElement) {
  const auto refusal = [](torch::Tensor tensor) {
    std::string message;
    run_ranks(1, [&](comm::World& world) {
      auto module = std::make_shared<torch::nn::Module>();
      module->register_parameter("odd", tensor);
      try {
        zero::ParameterPages pages(world, zero::parameters_of(*module), {.page_bytes = 4096});
      } catch (const c10::Error& error) {
        message = error.what_without_backtrace();
      }
    });
    return message;
  };
  EXPECT_THAT(refusal(torch::zeros({3}, torch::kComplexFloat)),
              ::testing::HasSubstr("trains in ComplexFloat"));
  EXPECT_THAT(refusal(torch::zeros({1}).expand({3})),
              ::testing::HasSubstr("leave gaps or repeat elements"));
  EXPECT_THAT(refusal(torch::zeros({4, 4}).narrow(1, 0, 2)),
              ::testing::HasSubstr("leave gaps or repeat elements"));
}

TEST(DataParallelErrorTest, RefusesSparseGradients) {
  const auto errors = try_ranks(2, [](comm::World& world) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true));
    DistributedDataParallel<torch::nn::Embedding> model(embedding, world);
    model(torch::zeros({1}, torch::kInt64)).sum().backward();
  });
  EXPECT_THAT(message_of(errors[0]), ::testing::HasSubstr("sparse gradients are not reduced"));
}

TEST(DataParallelErrorTest, LetsGradientsOfAShardBeChanged) {
  run_ranks(2, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, at_stage(1));
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    backward(model, world.rank());  // mean 0.5
    EXPECT_EQ(model->weight.grad().sum().item<double>(), 0.5 * 49) << "the mean, on every rank";
    model->weight.mutable_grad().mul_(4);
    optimizer.step();
    EXPECT_EQ(model->weight[0][0].item<double>(), -1.0);
  });
}

TEST(DataParallelErrorTest, LetsWholeGradientsBeChanged) {
  run_ranks(2, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world, at_stage(0));
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    backward(model, world.rank());  // mean 0.5
    model->weight.mutable_grad().mul_(4);
    optimizer.step();
    EXPECT_EQ(model->weight[0][0].item<double>(), -1.0);
    model->weight.mutable_grad() = torch::full({7, 7}, -3.0);
    optimizer.step();
    EXPECT_EQ(model->weight[0][0].item<double>(), 2.0);
  });
}

TEST(DataParallelErrorTest, NoticesAParameterThatWasReplaced) {
  run_ranks(1, [](comm::World& world) {
    DistributedDataParallel<torch::nn::Linear> model(make_linear(), world);
    Optimizer<SGD> optimizer(model, SGDOptions(1.0));
    backward(model, 1);
    model->weight.set_data(torch::zeros({7, 7}));
    try {
      optimizer.step();
      ADD_FAILURE() << "accepted";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  ::testing::HasSubstr("no longer lives in its page"));
    }
  });
}

}  // namespace
}  // namespace zeropage::distributed_data_parallel_test
