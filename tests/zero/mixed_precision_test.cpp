// options.compute_dtype and what belongs to it: who stays fp32, inputs, the dtypes in which gradients
// travel and add up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/errors.h"
#include "tests/harness/mixed_precision_reference.h"
#include "tests/harness/ranks.h"
#include "tests/harness/tiny_models.h"
#include "zero/agreement/agreement_hashes.h"
#include "zero/setup/sharded_model.h"
#include "zero/setup/slow_precision.h"
#include "zeropage/testing.h"
#include "zeropage/zeropage.h"

namespace zeropage::mixed_precision_test {
namespace {

using namespace zeropage::testing;
using memory::Kind;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using memory::operator""_KiB;
using torch::kBFloat16;
using torch::kFloat;
using torch::kHalf;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr int kSteps = 4;

template <typename Module>
void train(DistributedDataParallel<Module>& model, torch::ScalarType dtype) {
  Optimizer<AdamW> optimizer(model, AdamWOptions(0.01));
  for (int step = 0; step < kSteps; ++step) {
    const Samples samples = samples_of(model.world().rank(), step);
    optimizer.zero_grad();
    // In fp32: the wrapper casts what goes into the module.
    const torch::Tensor outputs = model(samples.inputs);
    EXPECT_EQ(outputs.scalar_type(), dtype);
    loss_of(outputs, {samples.inputs, samples.targets.to(dtype)}).backward();
    optimizer.step();
  }
}

TEST(SlowPrecisionTest, IsToldWhereTheProcessorHasNoInstructionsForIt) {
  const zero::HostPrecisions none{}, bfloat16_alone{.bfloat16 = true};
  EXPECT_EQ(zero::words_on_slow_precision({kFloat, torch::kDouble}, none), "");
  EXPECT_EQ(zero::words_on_slow_precision({kFloat, kBFloat16}, bfloat16_alone), "");
  EXPECT_THAT(
      zero::words_on_slow_precision({kFloat, kBFloat16}, none),
      HasSubstr("zeropage: the model computes in bfloat16, for which this host's processor "
                "has no instructions (avx512_bf16, amx_bf16): a step may take several times "
                "as long as in float"));
  EXPECT_THAT(zero::words_on_slow_precision({kHalf}, bfloat16_alone),
              HasSubstr("computes in half"));
}

// In a process that computes in half nowhere else, as ctest's shards may; so no more than once is all that is sure.
TEST(SlowPrecisionTest, IsToldOnceAProcessByRankZero) {
  ::testing::internal::CaptureStderr();
  for (int times = 0; times < 2; ++times) {
    run_ranks(2, [](World& world) {
      Options options;
      options.compute_dtype = kHalf;
      DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(4, 4), world, options);
    });
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  const size_t first = said.find("computes in half");
  if (zero::HostPrecisions::of_this_host().half) {
    EXPECT_EQ(first, std::string::npos);
  } else if (first != std::string::npos) {
    EXPECT_EQ(said.find("computes in half", first + 1), std::string::npos) << said;
  }
}

class MixedPrecisionTest
    : public ::testing::TestWithParam<std::tuple<int, int, torch::ScalarType>> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  int ranks() const { return std::get<0>(GetParam()); }
  int stage() const { return std::get<1>(GetParam()); }
  torch::ScalarType dtype() const { return std::get<2>(GetParam()); }
  Options options() const {
    Options options;
    options.stage = stage_of(stage());
    options.update_by = UpdateBy::kClass;  // whose bits a plain run has
    options.page_bytes = 4_KiB;
    options.compute_dtype = dtype();
    return options;
  }
  Reference reference() const { return {.ranks = ranks(), .dtype = dtype()}; }

  template <typename Module>
  void expect_bits(const std::vector<torch::Tensor>& expected, const Options& options) const {
    run_ranks(ranks(), [&](comm::World& world) {
      DistributedDataParallel<Module> model(make<Module>(), world, options);
      train(model, dtype());
      EXPECT_TRUE(same_bits(expected, model.parameters())) << "rank " << world.rank();
    });
  }
};

TEST_P(MixedPrecisionTest, TrainsMastersThatBeginWithTheFp32Values) {
  Reference rounded = reference();
  rounded.masters = MastersBegin::kRounded;
  const auto expected = train_reference_in<Oddball>(reference());
  EXPECT_FALSE(same_bits(expected, train_reference_in<Oddball>(rounded)))
      << "the bits would not show with what masters began";
  expect_bits<Oddball>(expected, options());
}

TEST_P(MixedPrecisionTest, GivesDeferredModulesTheSameBits) {
  const auto expected = train_reference_in<Oddball>(reference());
  run_ranks(ranks(), [&](comm::World& world) {
    std::optional<DeferredModule<Oddball>> deferred;
    {
      const std::lock_guard lock(generator_mutex());
      torch::manual_seed(7);
      deferred.emplace([] { return Oddball(); });
    }
    DistributedDataParallel<Oddball> model(std::move(*deferred), world, options());
    EXPECT_EQ(model.buffers()[0].scalar_type(), torch::kInt64);
    train(model, dtype());
    EXPECT_TRUE(same_bits(expected, model.parameters())) << "rank " << world.rank();
  });
}

TEST_P(MixedPrecisionTest, KeepsLayerNormsInFp32WhereTheyAreSelected) {
  Reference with_norm = reference();
  with_norm.staying = {"norm.weight", "norm.bias"};
  Options staying = options();
  staying.stays_fp32 = ModuleSelection::of_type<torch::nn::LayerNorm>();
  expect_bits<Transformer>(train_reference_in<Transformer>(with_norm), staying);
}

TEST_P(MixedPrecisionTest, SumsInFp32BetweenRanksWhereToldTo) {
  Reference wide = reference();
  wide.wire = kFloat;
  Options options = this->options();
  options.reduce_dtype = kFloat;
  const auto expected = train_reference_in<Oddball>(wide);
  if (ranks() > 1) {
    EXPECT_FALSE(same_bits(expected, train_reference_in<Oddball>(reference())));
  }
  expect_bits<Oddball>(expected, options);
}

INSTANTIATE_TEST_SUITE_P(RanksStagesDtypes, MixedPrecisionTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(kBFloat16, kHalf)),
                         [](const auto& info) {
                           return c10::str("Ranks", std::get<0>(info.param), "Stage",
                                           std::get<1>(info.param), std::get<2>(info.param));
                         });

// ---- batch norm, at every stage ----

class ComputeDtypeTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  Options options(torch::ScalarType dtype = kBFloat16) const {
    Options options;
    options.stage = stage_of(GetParam());
    options.update_by = UpdateBy::kClass;  // whose bits a plain run has
    options.page_bytes = 4_KiB;
    options.compute_dtype = dtype;
    return options;
  }
};

TEST_P(ComputeDtypeTest, LeavesBatchNormsInFp32WhichTakeLowerInputs) {
  Reference reference;
  for (const char* norm : {"norm1.", "norm2."}) {
    reference.staying.insert({std::string(norm) + "weight", std::string(norm) + "bias"});
  }
  for (const int ranks : {1, 2, 3}) {
    reference.ranks = ranks;
    const auto expected = train_reference_in<ConvNet>(reference);
    run_ranks(ranks, [&](comm::World& world) {
      DistributedDataParallel<ConvNet> model(make<ConvNet>(), world, options());
      EXPECT_EQ(model->norm1->weight.scalar_type(), kFloat);
      EXPECT_EQ(model->norm1->running_mean.scalar_type(), kFloat);
      EXPECT_EQ(model->conv1->weight.scalar_type(), kBFloat16);
      train(model, kBFloat16);
      EXPECT_EQ(model->norm1->running_mean.scalar_type(), kFloat);
      EXPECT_TRUE(same_bits(expected, model.parameters())) << ranks << " ranks";
    });
  }
}

// ---- dtypes ----

TEST_P(ComputeDtypeTest, CastsAllFp32ParametersAlsoFrozenOnesAndNoBuffer) {
  for (const auto dtype : {kBFloat16, kHalf}) {
    run_ranks(2, [&](comm::World& world) {
      Oddball net = make<Oddball>();
      net->register_buffer("table", torch::full({3}, 0.1));
      net->register_buffer("wide", torch::full({3}, 0.1, torch::kDouble));
      const auto* impl = net->first->weight.unsafeGetTensorImpl();
      const auto values = make<Oddball>()->named_parameters();
      DistributedDataParallel<Oddball> model(net, world, options(dtype));
      EXPECT_EQ(model->first->weight.unsafeGetTensorImpl(), impl);
      EXPECT_TRUE(model->tied.is_same(model->last->weight));
      EXPECT_FALSE(model->frozen->weight.requires_grad());
      EXPECT_EQ(model->strided.strides(), make<Oddball>()->strided.strides());
      for (const auto& parameter : model.named_parameters()) {
        EXPECT_EQ(parameter.value().scalar_type(), dtype) << parameter.key();
        EXPECT_TRUE(torch::equal(parameter.value(), values[parameter.key()].to(dtype)))
            << parameter.key();
      }
      const auto buffers = model.named_buffers();
      EXPECT_EQ(buffers["steps"].scalar_type(), torch::kInt64);
      EXPECT_TRUE(torch::equal(buffers["table"], torch::full({3}, 0.1)));
      EXPECT_EQ(buffers["wide"].scalar_type(), torch::kDouble);
    });
  }
}

TEST_P(ComputeDtypeTest, HoldsParametersInItAndMastersInFp32) {
  run_ranks(2, [&](comm::World& world) {
    const DistributedDataParallel<Oddball> model(make<Oddball>(), world, options());
    const zero::ParameterPages& pages = *sharded_parameters_of(model).pages;
    int64_t parameter_bytes = 0;
    int64_t master_bytes = 0;
    int64_t gradient_bytes = 0;
    for (size_t page = 0; page < pages.layouts().size(); ++page) {
      const zero::PageLayout& layout = pages.layouts()[page];
      const int64_t owned = pages.owned(page).numel();
      parameter_bytes += 2 * (GetParam() == 3 ? owned : layout.padded_numel(2));
      if (!layout.requires_grad) continue;
      master_bytes += 4 * owned;
      gradient_bytes += 4 * (GetParam() >= 2 ? owned : layout.padded_numel(2));
    }
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kParameter, parameter_bytes);
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kMasterWeights, master_bytes);
    EXPECT_KIND_BYTES_EQ(*memory::Ledger::current(), Kind::kGradient, 0);
    EXPECT_EQ(pages.plan().gradient_bytes(), gradient_bytes);
  });
}

// Beside gradients: a byte for each parameter that says whether it has one, and what ranks compare.
constexpr int64_t kAgreementBytes = 2 + static_cast<int64_t>(zero::kToldBytes);

// Bytes of parameters and gradients that one step of a model sends, by operation, in fp32 where dtype is unset.
comm::WireTraffic sent_in_a_step(int stage, const Options& options) {
  comm::WireTraffic sent;
  run_ranks(2, [&](comm::World& world) {
    torch::nn::Linear linear(64, 64);
    DistributedDataParallel<torch::nn::Linear> model(linear, world, options);
    Optimizer<SGD> optimizer(model, SGDOptions(0.1));
    const comm::WireTraffic before = world.communicator().wire_traffic();
    model(torch::ones({2, 64})).sum().backward();
    optimizer.step();
    const comm::WireTraffic after = world.communicator().wire_traffic();
    if (world.rank() != 0) return;
    sent.all_gather.bytes = after.all_gather.bytes - before.all_gather.bytes;
    sent.reduce_scatter.bytes = after.reduce_scatter.bytes - before.reduce_scatter.bytes;
    sent.all_reduce.bytes = after.all_reduce.bytes - before.all_reduce.bytes - kAgreementBytes;
  });
  EXPECT_EQ(stage == 0, sent.reduce_scatter.bytes == 0);
  return sent;
}

TEST_P(ComputeDtypeTest, HalvesWhatTravels) {
  Options in_fp32 = options();
  in_fp32.compute_dtype.reset();
  const comm::WireTraffic wide = sent_in_a_step(GetParam(), in_fp32);
  const comm::WireTraffic low = sent_in_a_step(GetParam(), options());
  EXPECT_EQ(wide.all_gather.bytes, 2 * low.all_gather.bytes);
  EXPECT_EQ(low.all_gather.bytes > 0, GetParam() > 0);
  EXPECT_EQ(wide.reduce_scatter.bytes, 2 * low.reduce_scatter.bytes);
  // At stage 0 gradients.
  EXPECT_EQ(wide.all_reduce.bytes, 2 * low.all_reduce.bytes);
}

TEST_P(ComputeDtypeTest, DoublesWhatGradientsTravelInWhereReducedInFp32) {
  Options in_fp32 = options();
  in_fp32.reduce_dtype = kFloat;
  const comm::WireTraffic wide = sent_in_a_step(GetParam(), in_fp32);
  const comm::WireTraffic low = sent_in_a_step(GetParam(), options());
  EXPECT_EQ(wide.all_gather.bytes, low.all_gather.bytes) << "parameters travel as they are";
  EXPECT_EQ(wide.reduce_scatter.bytes, 2 * low.reduce_scatter.bytes);
  EXPECT_EQ(wide.all_reduce.bytes, 2 * low.all_reduce.bytes);
}

TEST_P(ComputeDtypeTest, RoundsTheMeanOverRanksOnlyWhereItTravelsSo) {
  for (const auto reduce : {kFloat, kBFloat16}) {
    run_ranks(2, [&](comm::World& world) {
      Options options = this->options();
      options.reduce_dtype = reduce;
      DistributedDataParallel<torch::nn::Linear> model(make<Oddball>()->first, world, options);
      // 1 and 2^-8: their sum is no bfloat16.
      (model->weight.sum() * (world.rank() == 0 ? 1.0 : 1.0 / 256)).backward();
      const GatheredGradients whole(model);
      EXPECT_EQ(model->weight.grad().scalar_type(), kFloat);
      const double expected = reduce == kFloat ? 0.5 + 1.0 / 512 : 0.5;
      EXPECT_TRUE(model->weight.grad().eq(expected).all().item<bool>()) << model->weight.grad();
    });
  }
}

TEST_P(ComputeDtypeTest, LeavesGradientsOfFp32ParametersWhereOnlyTheWireIsLow) {
  run_ranks(2, [&](comm::World& world) {
    Options options = this->options();
    options.compute_dtype.reset();
    options.reduce_dtype = kBFloat16;
    DistributedDataParallel<torch::nn::Linear> model(make<Oddball>()->first, world, options);
    EXPECT_EQ(model->weight.scalar_type(), kFloat);
    // Each is rounded on its way: 1 + 2^-9 is 1 in bfloat16.
    (model->weight.sum() * (1 + 1.0 / 512)).backward();
    const GatheredGradients whole(model);
    EXPECT_EQ(model->weight.grad().scalar_type(), kFloat);
    EXPECT_TRUE(model->weight.grad().eq(1.0).all().item<bool>()) << model->weight.grad();
  });
}

// ---- accumulation by hand ----

// 1 + 2^-8 + 2^-8 is a bfloat16, but in bfloat16 neither of the small ones counts.
constexpr double kTerms[] = {1, 1.0 / 256, 1.0 / 256};
constexpr double kSumInFp32 = 1 + 1.0 / 128;

TEST_P(ComputeDtypeTest, AddsBackwardsUpInFp32OrInItself) {
  for (const auto accumulate : {kFloat, kBFloat16}) {
    for (const bool syncs : {true, false}) {
      run_ranks(2, [&](comm::World& world) {
        Options options = this->options();
        options.accumulate_dtype = accumulate;
        DistributedDataParallel<torch::nn::Linear> model(make<Oddball>()->first, world, options);
        const auto backward = [&](double term) { (model->weight.sum() * term).backward(); };
        for (const double term : {kTerms[0], kTerms[1]}) {
          if (syncs) {
            backward(term);
          } else {
            const auto guard = model.no_sync();
            backward(term);
            EXPECT_EQ(model->weight.grad().scalar_type(), accumulate);
          }
        }
        backward(kTerms[2]);
        const GatheredGradients whole(model);
        EXPECT_EQ(model->weight.grad().scalar_type(), accumulate);
        const double expected = accumulate == kFloat ? kSumInFp32 : 1.0;
        EXPECT_TRUE(model->weight.grad().eq(expected).all().item<bool>())
            << "syncs " << syncs << ": " << model->weight.grad();
      });
    }
  }
}

TEST_P(ComputeDtypeTest, AddsRandomBackwardsUpToTheBitsOfAnFp32Sum) {
  for (const bool syncs : {true, false}) {
    // By rank and backward, of a copy in plain LibTorch.
    const auto plain = [](int rank, int step) {
      Oddball net = make<Oddball>();
      net->to(kBFloat16);
      const Samples samples = samples_in(rank, step, kBFloat16);
      loss_of(net->forward(samples.inputs), samples).backward();
      return net->first->weight.grad().to(kFloat);
    };
    torch::Tensor expected;
    torch::Tensor low;
    if (syncs) {
      for (int step = 0; step < 3; ++step) {
        const torch::Tensor mean = mean_gradient({plain(0, step), plain(1, step)});
        expected = step == 0 ? mean : expected + mean;
        low = step == 0 ? mean.to(kBFloat16) : low + mean.to(kBFloat16);
      }
    } else {
      const auto sum_of = [&](int rank) {
        return plain(rank, 0) + plain(rank, 1) + plain(rank, 2);
      };
      expected = mean_gradient({sum_of(0), sum_of(1)});
      low = expected.to(kBFloat16);
    }
    EXPECT_FALSE(torch::equal(expected, low.to(kFloat))) << "the bits would show nothing";
    run_ranks(2, [&](comm::World& world) {
      Options options = this->options();
      options.reduce_dtype = kFloat;
      DistributedDataParallel<Oddball> model(make<Oddball>(), world, options);
      const auto backward = [&](int step) {
        const Samples samples = samples_in(world.rank(), step, kBFloat16);
        loss_of(model(samples.inputs), samples).backward();
      };
      for (int step = 0; step < 3; ++step) {
        if (syncs || step == 2) {
          backward(step);
        } else {
          const auto guard = model.no_sync();
          backward(step);
        }
      }
      const GatheredGradients whole(model);
      EXPECT_TRUE(torch::equal(model->first->weight.grad(), expected)) << "syncs " << syncs;
    });
  }
}

// ---- inputs ----

struct TakesAnythingImpl : torch::nn::Module {
  TakesAnythingImpl() { weight = register_parameter("weight", torch::ones({3})); }
  torch::Tensor forward(const torch::Tensor& x, torch::Tensor wide, const torch::Tensor& indices,
                        const torch::Tensor& mask, const torch::Tensor& nothing, double number,
                        const std::vector<torch::Tensor>& several, int* address) {
    dtypes = {x.scalar_type(), wide.scalar_type(), indices.scalar_type(), mask.scalar_type(),
              several[0].scalar_type()};
    EXPECT_FALSE(nothing.defined());
    EXPECT_EQ(number, 0.1);
    *address = 5;
    return (x * weight).sum();
  }
  torch::Tensor weight;
  std::vector<torch::ScalarType> dtypes;
};
TORCH_MODULE(TakesAnything);

TEST_P(ComputeDtypeTest, CastsTensorsOfFloatingPointAmongTheArgumentsAndNothingElse) {
  run_ranks(1, [&](comm::World& world) {
    DistributedDataParallel<TakesAnything> model(TakesAnything(), world, options());
    const torch::Tensor x = torch::full({3}, 2.0).requires_grad_();
    int address = 0;
    const torch::Tensor out =
        model(x, torch::ones({3}, torch::kDouble), torch::tensor({1}), torch::tensor({true}),
              torch::Tensor(), 0.1, std::vector<torch::Tensor>{torch::ones({3})}, &address);
    EXPECT_THAT(model->dtypes,
                ::testing::ElementsAre(kBFloat16, kBFloat16, torch::kInt64, torch::kBool, kFloat));
    EXPECT_EQ(address, 5);
    EXPECT_EQ(x.scalar_type(), kFloat) << "the caller's tensor is as it was";
    EXPECT_EQ(out.scalar_type(), kBFloat16);
    out.backward();
    EXPECT_TRUE(x.grad().eq(1).all().item<bool>()) << "a cast that autograd knows";
    EXPECT_EQ(x.grad().scalar_type(), kFloat);
  });
}

// ---- one storage, several names ----

struct Half : torch::nn::Module {
  explicit Half(const torch::Tensor& of_whole) { weight = register_parameter("weight", of_whole); }
  torch::Tensor weight;
};

// Two modules whose parameters are the halves of one storage.
struct HalvesImpl : torch::nn::Module {
  HalvesImpl() {
    const torch::Tensor whole = torch::full({8}, 1.0 + 1.0 / 4096);
    left = register_module("left", std::make_shared<Half>(whole.detach().narrow(0, 0, 4)));
    right = register_module("right", std::make_shared<Half>(whole.detach().narrow(0, 4, 4)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return (x * left->weight + x * right->weight).sum();
  }
  std::shared_ptr<Half> left, right;
};
TORCH_MODULE(Halves);

TEST_P(ComputeDtypeTest, KeepsAStorageInFp32ThatAModuleShareWhichStays) {
  run_ranks(2, [&](comm::World& world) {
    for (const bool stays : {true, false}) {
      Options options = this->options();
      if (stays) options.stays_fp32 = ModuleSelection::named({"right"});
      DistributedDataParallel<Halves> model(Halves(), world, options);
      const auto dtype = stays ? kFloat : kBFloat16;
      EXPECT_EQ(model->left->weight.scalar_type(), dtype);
      EXPECT_EQ(model->right->weight.scalar_type(), dtype);
      Optimizer<SGD> optimizer(model, SGDOptions(1.0));
      model->forward(torch::ones({4}, dtype)).backward();
      optimizer.step();
      const double expected = 1.0 / 4096;  // of a master, too
      EXPECT_TRUE(model->left->weight.eq(expected).all().item<bool>()) << model->left->weight;
      EXPECT_TRUE(model->right->weight.eq(expected).all().item<bool>()) << model->right->weight;
    }
  });
}

TEST_P(ComputeDtypeTest, KeepsATiedWeightInFp32WhichAModuleRegistersThatStays) {
  run_ranks(2, [&](comm::World& world) {
    for (const char* name : {"last", ""}) {
      Options options = this->options();
      options.stays_fp32 = ModuleSelection::named({name});
      DistributedDataParallel<Oddball> model(make<Oddball>(), world, options);
      EXPECT_TRUE(model->tied.is_same(model->last->weight));
      EXPECT_EQ(model->tied.scalar_type(), kFloat) << name;
      EXPECT_EQ(model->first->weight.scalar_type(), kBFloat16) << name;
      EXPECT_EQ(model->scale.scalar_type(), *name == 0 ? kFloat : kBFloat16) << name;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, ComputeDtypeTest, ::testing::Values(0, 1, 2, 3));

// ---- who stays ----

// blocks: a LayerNorm, a linear layer and a group norm; a head; a batch norm.
struct ZooImpl : torch::nn::Module {
  ZooImpl() {
    blocks->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    blocks->push_back(torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false)));
    blocks->push_back(torch::nn::GroupNorm(2, 4));
    register_module("blocks", blocks);
    register_module("head", head);
    register_module("batch", batch);
    register_parameter("own", torch::ones({4}));
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{torch::nn::LinearOptions(4, 4).bias(false)};
  torch::nn::BatchNorm2d batch{4};
};
TORCH_MODULE(Zoo);

std::vector<std::string> staying_in_fp32(const std::optional<ModuleSelection>& selection) {
  Options options;
  options.compute_dtype = kBFloat16;
  if (selection) options.stays_fp32 = *selection;
  std::vector<std::string> names;
  for (const zero::NamedParameter& parameter : zero::parameters_of(*Zoo(), options)) {
    if (parameter.dtype == kFloat) names.push_back(parameter.name());
  }
  return names;
}

TEST(ModuleSelectionTest, IsBatchNormsByDefaultAndMayBeNone) {
  EXPECT_THAT(staying_in_fp32({}), UnorderedElementsAre("batch.weight", "batch.bias"));
  EXPECT_THAT(staying_in_fp32(ModuleSelection::none()), ::testing::IsEmpty());
}

TEST(ModuleSelectionTest, IsByTypeOfHoldersAndOfClassesAlsoDerivedOnes) {
  EXPECT_THAT(staying_in_fp32(ModuleSelection::of_type<torch::nn::LayerNorm>()),
              UnorderedElementsAre("blocks.0.weight", "blocks.0.bias"));
  EXPECT_THAT(
      staying_in_fp32(ModuleSelection::of_type<torch::nn::LayerNormImpl, torch::nn::GroupNorm>()),
      UnorderedElementsAre("blocks.0.weight", "blocks.0.bias", "blocks.2.weight", "blocks.2.bias"));
  using Base = torch::nn::Cloneable<torch::nn::LinearImpl>;
  EXPECT_THAT(staying_in_fp32(ModuleSelection::of_type<Base>()),
              UnorderedElementsAre("blocks.1.weight", "head.weight"));
}

TEST(ModuleSelectionTest, IsByWholeNamesWithWildcards) {
  const auto named = [](const std::vector<std::string>& patterns) {
    return staying_in_fp32(ModuleSelection::named(patterns));
  };
  EXPECT_THAT(named({"head"}), UnorderedElementsAre("head.weight"));
  EXPECT_THAT(named({"hea"}), ::testing::IsEmpty()) << "no prefixes";
  EXPECT_THAT(named({"blocks"}), ::testing::IsEmpty()) << "its own parameters only: it has none";
  EXPECT_THAT(named({""}), UnorderedElementsAre("own"));
  EXPECT_THAT(named({"b*.[01]", "hea?"}), UnorderedElementsAre("blocks.0.weight", "blocks.0.bias",
                                                               "blocks.1.weight", "head.weight"));
  EXPECT_EQ(named({"*"}).size(), 9U);
  EXPECT_EQ(named({"?*.?"}).size(), 5U);
}

TEST(ModuleSelectionTest, IsByAnyRuleAndByTheUnionOfSelections) {
  const auto wide = ModuleSelection::where([](const std::string& name, const auto& module) {
    return name != "head" && module.parameters(/*recurse=*/false).size() == 1;
  });
  EXPECT_THAT(staying_in_fp32(wide), UnorderedElementsAre("own", "blocks.1.weight"));
  EXPECT_THAT(staying_in_fp32(wide | ModuleSelection::named({"head"})),
              UnorderedElementsAre("own", "blocks.1.weight", "head.weight"));
  EXPECT_THAT(staying_in_fp32(ModuleSelection::none() | ModuleSelection::named({"head"})),
              UnorderedElementsAre("head.weight"));
}

// ---- refusals ----

template <typename Module>
std::string refusal_of(Module module, const Options& options) {
  std::string words;
  run_ranks(1, [&](comm::World& world) {
    words = error_of([&] { DistributedDataParallel<Module> model(module, world, options); });
  });
  return words;
}

Options in_bfloat16(int stage = 1) {
  Options options;
  options.stage = stage_of(stage);
  options.compute_dtype = kBFloat16;
  return options;
}

TEST(ComputeDtypeErrorTest, RefusesFp32AndWhatIsNoFloatingPoint) {
  for (const auto dtype : {kFloat, torch::kInt32}) {
    Options options;
    options.compute_dtype = dtype;
    EXPECT_THAT(
        refusal_of(torch::nn::Linear(3, 3), options),
        HasSubstr(c10::str("options.compute_dtype: expected bfloat16, half, double or unset, got ",
                           dtype)));
  }
}

TEST(ComputeDtypeErrorTest, RefusesWhatDoubleDoesNotHave) {
  const auto refusal = [](const std::function<void(Options&)>& change) {
    Options options;
    options.compute_dtype = torch::kDouble;
    change(options);
    return refusal_of(torch::nn::Linear(3, 3), options);
  };
  EXPECT_EQ(refusal([](Options&) {}), "");
  const std::vector<std::pair<const char*, std::function<void(Options&)>>> refused = {
      {"reduce_dtype: gradients in double travel", [](Options& o) { o.reduce_dtype = kFloat; }},
      {"accumulate_dtype: gradients in double are",
       [](Options& o) { o.accumulate_dtype = kFloat; }},
      {"low_precision_update: is about bfloat16",
       [](Options& o) { o.low_precision_update = LowPrecisionUpdate::kNearest; }},
      {"update_by: the fused update", [](Options& o) { o.update_by = UpdateBy::kFused; }},
      {"optimizer_state: only the fused update",
       [](Options& o) { o.optimizer_state = StateFormat::k8Bit; }},
      {"offload.optimizer: the step on the host",
       [](Options& o) { o.offload.optimizer = memory::Tier::kHost; }},
      {"world_invariant: sums in fp32", [](Options& o) { o.world_invariant = true; }}};
  for (const auto& [words, change] : refused) {
    EXPECT_THAT(refusal(change), HasSubstr(std::string("options.") + words));
  }
}

TEST(ComputeDtypeErrorTest, RefusesParametersThatTrainInAnotherPrecisionThanFp32) {
  torch::nn::Linear wide(3, 3);
  wide->to(torch::kDouble);
  EXPECT_THAT(refusal_of(wide, in_bfloat16()),
              HasSubstr("parameter \"weight\" trains in Double, but options.compute_dtype is "
                        "BFloat16: expected an fp32 module"));
  torch::nn::Linear half(3, 3);
  half->to(kHalf);
  EXPECT_THAT(refusal_of(half, in_bfloat16()), HasSubstr("trains in Half"));
  for (auto& parameter : wide->parameters()) parameter.requires_grad_(false);
  EXPECT_EQ(refusal_of(wide, in_bfloat16()), "") << "frozen ones may be anything";
  EXPECT_EQ(wide->weight.scalar_type(), torch::kDouble);
}

TEST(ComputeDtypeErrorTest, RefusesParametersThatAGraphStillKnowsInFp32) {
  for (const int stage : {0, 1, 2, 3}) {
    torch::nn::Linear linear(3, 3);
    {
      // Saves no tensor.
      const torch::Tensor sum = linear->weight.sum();
      EXPECT_THAT(refusal_of(linear, in_bfloat16(stage)),
                  HasSubstr("parameter \"weight\": a graph that used it in Float is alive"));
    }
    {
      const torch::Tensor out = linear(torch::ones({2, 3}, torch::requires_grad()));
      EXPECT_THAT(refusal_of(linear, in_bfloat16(stage)), HasSubstr("graph that used it"));
    }
    EXPECT_EQ(linear->weight.scalar_type(), kFloat) << "nothing was moved";
    EXPECT_EQ(refusal_of(linear, in_bfloat16(stage)), "");
    EXPECT_EQ(linear->weight.scalar_type(), kBFloat16);
  }
}

TEST(ComputeDtypeErrorTest, RefusesParametersOfWhichAViewIsAlive) {
  for (const int stage : {0, 3}) {
    torch::nn::Linear linear(3, 3);
    {
      const torch::Tensor view = linear->bias.detach();
      EXPECT_THAT(
          refusal_of(linear, in_bfloat16(stage)),
          HasSubstr("parameter \"bias\": something else holds its memory, such as a view of "
                    "it or a graph that used it, and would not notice when the parameter is "
                    "cast to options.compute_dtype"));
    }
    EXPECT_EQ(refusal_of(linear, in_bfloat16(stage)), "");
  }
  // A view may live on of a parameter that keeps its dtype.
  torch::nn::BatchNorm1d norm(3);
  const torch::Tensor view = norm->weight.detach();
  EXPECT_EQ(refusal_of(norm, in_bfloat16()), "");
}

TEST(ComputeDtypeErrorTest, RefusesStochasticRoundingInHalf) {
  Options options = in_bfloat16();
  options.compute_dtype = kHalf;
  options.low_precision_update = LowPrecisionUpdate::kStochasticRounding;
  EXPECT_THAT(refusal_of(torch::nn::Linear(3, 3), options),
              HasSubstr("kStochasticRounding is for bfloat16, but compute_dtype is half"));
}

TEST(ComputeDtypeErrorTest, RefusesDtypesThatGradientsCannotHave) {
  Options options = in_bfloat16();
  options.accumulate_dtype = kHalf;
  EXPECT_THAT(refusal_of(torch::nn::Linear(3, 3), options),
              HasSubstr("options.accumulate_dtype: expected float or compute_dtype, got Half"));
  options.accumulate_dtype = torch::kDouble;
  EXPECT_THAT(refusal_of(torch::nn::Linear(3, 3), options),
              HasSubstr("options.accumulate_dtype: expected float or compute_dtype, got Double"));
  options.compute_dtype.reset();
  EXPECT_THAT(refusal_of(torch::nn::Linear(3, 3), options),
              HasSubstr("options.accumulate_dtype: expected float, bfloat16, half or unset"));
  for (const auto dtype : {torch::kDouble, torch::kInt64}) {
    Options nonsense = in_bfloat16();
    nonsense.reduce_dtype = dtype;
    EXPECT_THAT(refusal_of(torch::nn::Linear(3, 3), nonsense),
                HasSubstr(c10::str(
                    "options.reduce_dtype: expected float, bfloat16, half or unset, got ", dtype)));
  }
}

// Without compute_dtype, the parameters' dtype is what "theirs" would be.
TEST(ComputeDtypeErrorTest, RefusesToAddUpInAnotherLowerPrecisionThanTheParameters) {
  torch::nn::Linear low(3, 3);
  low->to(kBFloat16);
  Options options;
  options.accumulate_dtype = kHalf;
  EXPECT_THAT(
      refusal_of(low, options),
      HasSubstr("options.accumulate_dtype: expected float or the dtype of parameter \"weight\", "
                "BFloat16, got Half"));
  options.accumulate_dtype = kBFloat16;
  EXPECT_EQ(refusal_of(low, options), "");
}

TEST(ComputeDtypeErrorTest, RefusesAnOptimizerOverBareParameters) {
  run_ranks(1, [](comm::World& world) {
    torch::nn::Linear linear(3, 3);
    EXPECT_THAT(error_of([&] {
                  Optimizer<SGD> optimizer(linear->parameters(), world, SGDOptions(1.0),
                                           in_bfloat16());
                }),
                HasSubstr("options.compute_dtype: an optimizer over bare parameters does not see "
                          "the module that would be cast"));
    EXPECT_EQ(linear->weight.scalar_type(), kFloat);
  });
}

TEST(ComputeDtypeErrorTest, NamesTheParameterThatStaysOnOneRankOnly) {
  const auto errors = try_ranks(2, [](comm::World& world) {
    Options options = in_bfloat16();
    if (world.rank() == 1) options.stays_fp32 = ModuleSelection::named({""});
    DistributedDataParallel<torch::nn::Linear> model(torch::nn::Linear(3, 3), world, options);
  });
  EXPECT_THAT(message_of(errors[0]),
              HasSubstr("rank 0 has parameter \"weight\": Float to BFloat16 [3, 3]; rank 1 has "
                        "parameter \"weight\": Float [3, 3]"));
}

}  // namespace
}  // namespace zeropage::mixed_precision_test
