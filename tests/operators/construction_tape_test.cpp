#include "operators/construction_tape.h"

#include <cmath>
#include <map>
#include <thread>

#include <ATen/ScalarOps.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "memory/storage.h"
#include "zeropage/check.h"
#include "zeropage/testing.h"

namespace zeropage::operators::construction_tape_test {
namespace {

using memory::operator""_KiB;

using ::testing::AllOf;
using ::testing::HasSubstr;

using Named = std::map<std::string, at::Tensor>;
using Construct = std::function<std::shared_ptr<torch::nn::Module>()>;

at::Tensor default_state() {
  return at::detail::getDefaultCPUGenerator().get_state();
}

Named tensors_of(const torch::nn::Module& module) {
  Named tensors;
  for (const auto& item : module.named_parameters()) tensors[item.key()] = item.value();
  for (const auto& item : module.named_buffers()) tensors[item.key()] = item.value();
  return tensors;
}

std::vector<at::Tensor> deferred_of(const Named& tensors, const ConstructionTape& tape) {
  std::vector<at::Tensor> targets;
  for (const auto& [name, tensor] : tensors) {
    if (tape.holds(tensor)) targets.push_back(tensor);
  }
  return targets;
}

// What a replay gives every target, through the target's own geometry.
class Values {
 public:
  Values(const ConstructionTape& tape, const std::vector<at::Tensor>& targets) {
    tape.replay(targets, [this](const c10::StorageImpl& meta, at::Tensor values) {
      EXPECT_EQ(values.dim(), 1);
      EXPECT_EQ(values.nbytes(), meta.nbytes());
      EXPECT_TRUE(values_.emplace(&meta, values).second) << "a storage was handed over twice";
    });
  }

  at::Tensor of(const at::Tensor& meta) const {
    const auto found = values_.find(meta.storage().unsafeGetStorageImpl());
    if (found == values_.end()) return {};
    EXPECT_EQ(found->second.scalar_type(), meta.scalar_type());
    return found->second.as_strided(meta.sizes(), meta.strides(), meta.storage_offset());
  }
  size_t size() const { return values_.size(); }

 private:
  std::map<const c10::StorageImpl*, at::Tensor> values_;
};

// Constructs plainly and deferred from one seed and compares every bit, the flags and the generator.
void expect_parity(const Construct& construct, uint64_t seed = 5) {
  torch::manual_seed(seed);
  const auto plain = construct();
  const auto plain_state = default_state();

  torch::manual_seed(seed);
  std::shared_ptr<torch::nn::Module> deferred;
  const ConstructionTape tape([&] { deferred = construct(); });
  const Named expected = tensors_of(*plain), metas = tensors_of(*deferred);
  ASSERT_EQ(metas.size(), expected.size());
  const Values values(tape, deferred_of(metas, tape));
  for (const auto& [name, meta] : metas) {
    const at::Tensor& wanted = expected.at(name);
    const at::Tensor got = tape.holds(meta) ? values.of(meta) : meta;
    EXPECT_EQ(meta.requires_grad(), wanted.requires_grad()) << name;
    EXPECT_EQ(got.scalar_type(), wanted.scalar_type()) << name;
    EXPECT_EQ(meta.strides(), wanted.strides()) << name;
    EXPECT_TRUE(torch::equal(got, wanted)) << name << "\n" << got << "\n" << wanted;
  }
  EXPECT_TRUE(torch::equal(default_state(), plain_state)) << "the generator went another way";
}

// A module whose constructor is a function.
class ModuleOf : public torch::nn::Module {
 public:
  explicit ModuleOf(const std::function<void(ModuleOf&)>& construct) { construct(*this); }
  using torch::nn::Module::register_buffer;
  using torch::nn::Module::register_module;
  using torch::nn::Module::register_parameter;

  at::Tensor kept;
};

Construct module_of(const std::function<void(ModuleOf&)>& construct) {
  return [construct] { return std::make_shared<ModuleOf>(construct); };
}

std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    return memory::message_of(error);
  }
  return "no error";
}

std::string recording_error(const std::function<void()>& construct) {
  return error_of([&] { const ConstructionTape tape(construct); });
}

std::string replay_error(const Construct& construct) {
  return error_of([&] {
    std::shared_ptr<torch::nn::Module> module;
    const ConstructionTape tape([&] { module = construct(); });
    const Values values(tape, deferred_of(tensors_of(*module), tape));
  });
}

// The constructors of layers initialise once, the model a second time.
std::shared_ptr<torch::nn::Module> two_passes(int64_t layers, int64_t width, bool seed) {
  torch::nn::Sequential model;
  for (int64_t layer = 0; layer < layers; ++layer) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  const torch::NoGradGuard no_grad;
  if (seed) torch::manual_seed(77);
  for (at::Tensor& parameter : model->parameters()) {
    if (parameter.dim() > 1) {
      torch::nn::init::normal_(parameter, 0, 0.02);
    } else {
      parameter.fill_(0.5);
    }
  }
  return model.ptr();
}

TEST(ConstructionTapeTest, GivesEveryLayerThePlainConstructorsBits) {
  expect_parity([] {
    torch::nn::Sequential model(
        torch::nn::Linear(64, 32), torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
        torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 8).padding_idx(3)),
        torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4), torch::nn::ConvTranspose2d(3, 4, 3),
        torch::nn::GroupNorm(2, 4), torch::nn::Bilinear(3, 4, 5), torch::nn::PReLU());
    return model.ptr();
  });
}

TEST(ConstructionTapeTest, GivesRecurrentLayersAndAttentionThePlainBits) {
  expect_parity(module_of([](ModuleOf& module) {
    module.register_module(
        "lstm", torch::nn::LSTM(torch::nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true)));
    module.register_module("gru", torch::nn::GRU(4, 3));
    module.register_module("attention", torch::nn::MultiheadAttention(8, 2));
    module.register_module("encoder", torch::nn::TransformerEncoderLayer(8, 2));
  }));
}

TEST(ConstructionTapeTest, TakesNoMemoryWhileRecording) {
  const auto ledger = std::make_shared<memory::Ledger>("rank 0/1");
  const memory::LedgerScope scope(ledger);
  std::shared_ptr<torch::nn::Module> module;
  const ConstructionTape tape([&] { module = two_passes(4, 256, true); });
  for (const auto& parameter : module->parameters()) EXPECT_TRUE(parameter.is_meta());
  EXPECT_PEAK_BYTES_LE(*ledger, 0);
}

TEST(ConstructionTapeTest, GivesTheInitialisersThePlainBits) {
  expect_parity(module_of([](ModuleOf& module) {
    const torch::NoGradGuard no_grad;
    const auto parameter = [&](const char* name, at::IntArrayRef sizes) {
      return module.register_parameter(name, torch::empty(sizes));
    };
    torch::nn::init::orthogonal_(parameter("tall", {7, 3}), 2.0);
    torch::nn::init::orthogonal_(parameter("wide", {3, 7}));
    torch::nn::init::xavier_normal_(parameter("xavier", {5, 6}));
    torch::nn::init::kaiming_normal_(parameter("kaiming", {5, 6}));
    torch::nn::init::eye_(parameter("eye", {4, 6}));
    torch::nn::init::dirac_(parameter("dirac", {4, 4, 3}));
    // trunc_normal_ as PyTorch computes it.
    parameter("truncated", {33}).uniform_(-0.9, 0.9).erfinv_().mul_(0.02).add_(0.1).clamp_(-1, 1);
  }));
}

TEST(ConstructionTapeTest, DrawsFromEveryKindOfRandomOperator) {
  expect_parity(module_of([](ModuleOf& module) {
    const auto buffer = [&](const char* name, const at::Tensor& tensor) {
      module.register_buffer(name, tensor);
    };
    buffer("randn", torch::randn({5, 7}));
    buffer("rand", torch::rand({3}, torch::kDouble));
    buffer("randint", torch::randint(0, 100, {20}));
    buffer("randperm", torch::randperm(17));
    buffer("bernoulli_", torch::empty({31}).bernoulli_(0.3));
    buffer("bernoulli", torch::bernoulli(torch::full({9}, 0.5)));
    buffer("random_", torch::empty({4}, torch::kLong).random_());
    buffer("exponential_", torch::empty({4}).exponential_());
    buffer("normal of tensors", at::normal(torch::zeros({5}), torch::ones({5})));
    buffer("like", torch::rand_like(torch::empty({2, 2}, torch::kBFloat16)));
    buffer("dropout", torch::dropout(torch::ones({40}), 0.5, /*train=*/true));
    buffer("strided", torch::empty({6, 8}).t().normal_());
    buffer("single", torch::empty({1}).normal_());  // leaves a second sample in the generator
    buffer("behind it", torch::empty({1}).normal_());
  }));
}

TEST(ConstructionTapeTest, RunsOperatorsOnListsOutputsAndScalars) {
  expect_parity(module_of([](ModuleOf& module) {
    const auto a = torch::randn({3, 4}), b = torch::randn({3, 4});
    module.register_buffer("cat", torch::cat({a, b}, 1));
    module.register_buffer("scalar", torch::arange(3) * at::native::wrapped_scalar_tensor(2.5));
    module.register_buffer("stack", torch::stack({a, b}) / static_cast<double>(a.numel()));
    const auto both = std::vector<at::Tensor>{a.clone(), b.clone()};
    at::_foreach_mul_(both, 3.0);
    at::_foreach_add_(both, both);
    module.register_buffer("foreach", both[1]);
    auto out = torch::empty({0});
    at::mm_out(out, a, b.t());
    module.register_buffer("out", out);
    at::mul_out(out, out, out);
    auto drawn = torch::empty({0});
    at::randn_out(drawn, {4, 4});
    module.register_buffer("drawn", drawn);
    const auto [q, r] = at::linalg_qr(torch::randn({5, 5}));
    module.register_buffer("q", q);
    module.register_buffer("r", r);
    const auto [values, indices] = at::topk(a, 2);
    module.register_buffer("values", values);
    module.register_buffer("indices", indices);
    module.register_buffer("indexed", a.index({at::indexing::Slice(), indices[0]}));
    auto grown = torch::ones({2});
    grown.resize_({6});
    grown.narrow(0, 2, 4).zero_();
    module.register_buffer("grown", grown);
    module.register_buffer(
        "complex", torch::view_as_real(torch::view_as_complex(torch::randn({3, 2})).conj() * 2));
    const auto chunks = torch::randn({6}).chunk(2);
    module.register_buffer("chunk", chunks[1].clone());
  }));
}

TEST(ConstructionTapeTest, BuildsSinusoidalPositions) {
  expect_parity(module_of([](ModuleOf& module) {
    using at::indexing::None;
    using at::indexing::Slice;
    const auto position = torch::arange(0, 20).unsqueeze(1);
    const auto frequency = torch::exp(torch::arange(0, 16, 2) * (-std::log(10000.0) / 16));
    auto table = torch::zeros({20, 16});
    table.index_put_({Slice(), Slice(0, None, 2)}, torch::sin(position * frequency));
    table.index_put_({Slice(), Slice(1, None, 2)}, torch::cos(position * frequency));
    module.register_buffer("table", table.unsqueeze(0));
    module.register_buffer("mask", torch::triu(torch::full({5, 5}, -INFINITY), 1));
    module.register_buffer("like", torch::zeros(table.sizes(), table.options()));
    module.register_buffer("there", table.to(torch::kCPU).to(torch::kDouble).contiguous());
  }));
}

TEST(ConstructionTapeTest, FollowsAGeneratorThatTheConstructorSeeds) {
  expect_parity([] { return two_passes(3, 16, true); });
  expect_parity([] { return two_passes(3, 16, false); });
}

TEST(ConstructionTapeTest, FollowsAStateThatTheConstructorSavesAndRestores) {
  expect_parity(module_of([](ModuleOf& module) {
    auto generator = at::detail::getDefaultCPUGenerator();
    module.register_buffer("first", torch::randn({3}));
    const auto saved = generator.get_state();
    EXPECT_EQ(generator.current_seed(), 5);
    torch::manual_seed(5);
    module.register_buffer("other", torch::randn({3}));
    generator.set_state(saved);
    module.register_buffer("goes on", torch::randn({3}));
    auto copy = generator.clone();
    module.register_buffer("copy", torch::randn({3}, copy));
    module.register_buffer("again", torch::randn({3}));
  }));
}

TEST(ConstructionTapeTest, LeavesAnotherGeneratorAsThePlainConstructorDoes) {
  std::vector<at::Generator> generators;
  const auto construct = module_of([&](ModuleOf& module) {
    module.register_buffer("own", torch::randn({3}, generators.back()));
    module.register_buffer("default", torch::randn({3}));
    generators.back().set_current_seed(12);
    module.register_buffer("filled", torch::empty({5}).uniform_(0, 1, generators.back()));
  });
  for (int run = 0; run < 2; ++run) generators.push_back(at::detail::createCPUGenerator(9));
  torch::manual_seed(1);
  const auto expected = tensors_of(*construct());
  const auto state = generators.back().get_state(), defaults = default_state();
  generators.pop_back();
  torch::manual_seed(1);
  std::shared_ptr<torch::nn::Module> module;
  const ConstructionTape tape([&] { module = construct(); });
  const Named metas = tensors_of(*module);
  const Values values(tape, deferred_of(metas, tape));
  for (const auto& [name, meta] : metas) {
    EXPECT_TRUE(torch::equal(values.of(meta), expected.at(name))) << name;
  }
  EXPECT_TRUE(torch::equal(generators.back().get_state(), state));
  EXPECT_TRUE(torch::equal(default_state(), defaults));
}

TEST(ConstructionTapeTest, ReplaysTheSameBitsWhateverWasDrawnSince) {
  torch::manual_seed(3);
  const auto plain = two_passes(2, 8, false);
  torch::manual_seed(3);
  const auto before = default_state();
  std::shared_ptr<torch::nn::Module> module;
  const ConstructionTape tape([&] { module = two_passes(2, 8, false); });
  EXPECT_TRUE(torch::equal(default_state(), before)) << "recording draws nothing";

  torch::manual_seed(999);
  torch::randn({5});
  const auto touched = default_state();
  for (int run = 0; run < 2; ++run) {
    const Values values(tape, module->parameters());
    for (size_t index = 0; index < plain->parameters().size(); ++index) {
      EXPECT_TRUE(torch::equal(values.of(module->parameters()[index]), plain->parameters()[index]));
    }
    EXPECT_TRUE(torch::equal(default_state(), touched));
  }
}

TEST(ConstructionTapeTest, HandsATiedStorageOverOnce) {
  const auto construct = module_of([](ModuleOf& module) {
    const auto weight = module.register_parameter("weight", torch::randn({4, 6}));
    module.register_parameter("tied", weight);
    const auto flat = torch::randn({10});
    module.register_buffer("head", flat.narrow(0, 0, 4));
    module.register_buffer("tail", flat.narrow(0, 4, 6).view({2, 3}).t());
  });
  expect_parity(construct);
  std::shared_ptr<torch::nn::Module> module;
  const ConstructionTape tape([&] { module = construct(); });
  EXPECT_EQ(Values(tape, deferred_of(tensors_of(*module), tape)).size(), 2);
}

TEST(ConstructionTapeTest, KeepsWhatIsFilledPieceByPiece) {
  expect_parity(module_of([](ModuleOf& module) {
    const torch::NoGradGuard no_grad;
    const auto weight = module.register_parameter("weight", torch::empty({6, 4}));
    for (int64_t gate = 0; gate < 3; ++gate) weight.narrow(0, 2 * gate, 2).normal_();
    weight.select(1, 0).zero_();
    const auto copied = module.register_parameter("copied", torch::empty({6, 4}));
    copied.copy_(weight).mul_(copied);
    weight.uniform_();  // what was copied is the older weight
    auto turned = torch::randn({3, 5});
    turned.t_();
    module.register_buffer("turned", turned.mul_(2));
  }));
}

TEST(ConstructionTapeTest, FollowsAParameterThatGetsOtherData) {
  expect_parity(module_of([](ModuleOf& module) {
    torch::nn::Linear linear(4, 4);
    linear->to(torch::kDouble);
    module.register_module("linear", linear);
    torch::nn::Linear frozen(4, 4);
    for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
    module.register_module("frozen", frozen);
    torch::nn::Linear loaded(2, 2);
    loaded->weight.set_data(torch::tensor({1.0F, 2.0F, 3.0F, 4.0F}).view({2, 2}));
    module.register_module("loaded", loaded);
    module.register_module("copy", std::dynamic_pointer_cast<torch::nn::Module>(frozen->clone()));
  }));
}

TEST(ConstructionTapeTest, LeavesRealMemoryReal) {
  std::vector<float> weights = {1, 2, 3, 4};
  const auto construct = module_of([&](ModuleOf& module) {
    const auto blob = torch::from_blob(weights.data(), {4});
    module.register_buffer("blob", blob);
    module.register_buffer("cloned", blob * 2);
    module.register_buffer("literal", torch::tensor(std::vector<float>{5, 6}));
    module.register_buffer("table", torch::tensor({{1, 2}, {3, 4}}));
    module.register_buffer("counter", torch::tensor(7, torch::kLong));
    const auto parameter = module.register_parameter("parameter", torch::randn({4}));
    const torch::NoGradGuard no_grad;
    parameter.add_(blob).mul_(torch::tensor({2.0F, 2.0F, 2.0F, 2.0F}));
    module.register_buffer("copied", torch::empty({2, 4}).copy_(blob));
    module.register_buffer("noise", torch::rand_like(blob));
    EXPECT_EQ(blob[2].item<float>(), 3);
  });
  expect_parity(construct);
  std::shared_ptr<torch::nn::Module> module;
  const ConstructionTape tape([&] { module = construct(); });
  const Named tensors = tensors_of(*module);
  EXPECT_EQ(tensors.at("blob").data_ptr(), weights.data());
  EXPECT_FALSE(tape.holds(tensors.at("literal")));
  EXPECT_TRUE(tape.holds(tensors.at("copied")));
  const Values values(tape, deferred_of(tensors, tape));
}

TEST(ConstructionTapeTest, HandsACapturedTensorOverOnceAndAsACopy) {
  const auto weights = torch::randn({4, 2});
  at::Tensor whole, part;
  const ConstructionTape tape([&] {
    whole = torch::empty({4, 2});
    whole.set_(weights);
    part = whole[1];
  });
  const Values values(tape, {part, whole});
  EXPECT_EQ(values.size(), 1);
  EXPECT_TRUE(torch::equal(values.of(part), weights[1]));
  values.of(whole).zero_();
  EXPECT_TRUE(weights.all().item<bool>());
}

TEST(ConstructionTapeTest, HandsAGrownStorageOverWhole) {
  at::Tensor grown;
  const ConstructionTape tape([&] { grown = torch::ones({2}).resize_({6}); });
  EXPECT_TRUE(torch::equal(Values(tape, {grown}).of(grown).narrow(0, 0, 2), torch::ones({2})));
}

TEST(ConstructionTapeTest, TakesTheDefaultDtypeOfTheConstruction) {
  const auto construct = [] {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    auto model = module_of([](ModuleOf& module) {
      module.register_module("linear", torch::nn::Linear(4, 4));
      module.register_buffer("drawn", torch::randn({3}));
    })();
    torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
    return model;
  };
  expect_parity(construct);
}

TEST(ConstructionTapeTest, HoldsOneStorageAtATime) {
  constexpr int64_t kWidth = 256, kWeightBytes = kWidth * kWidth * 4;
  for (const bool seed : {true, false}) {
    std::shared_ptr<torch::nn::Module> module;
    const ConstructionTape tape([&] { module = two_passes(8, kWidth, seed); });
    const auto ledger = std::make_shared<memory::Ledger>("rank 0/1");
    const memory::LedgerScope scope(ledger);
    int64_t handed = 0, bytes = 0;
    tape.replay(module->parameters(), [&](const c10::StorageImpl&, at::Tensor values) {
      ++handed;
      bytes += static_cast<int64_t>(values.nbytes());
    });
    EXPECT_EQ(handed, 32);
    EXPECT_GT(bytes, 8 * kWeightBytes);
    EXPECT_PEAK_BYTES_LE(*ledger, kWeightBytes + 32_KiB);
    EXPECT_EQ(ledger->now().total(), 0);
  }
}

TEST(ConstructionTapeTest, FreesTemporariesAndDetachedWeightsAtOnce) {
  constexpr int64_t kWidth = 128, kWeightBytes = kWidth * kWidth * 4;
  std::shared_ptr<torch::nn::Module> module;
  const ConstructionTape tape([&] {
    torch::nn::Sequential model;
    for (int layer = 0; layer < 6; ++layer) {
      model->push_back(torch::nn::Linear(kWidth, kWidth));
      torch::nn::init::orthogonal_(model->parameters().rbegin()[1]);
    }
    for (auto& parameter : model->parameters()) parameter.detach_();
    module = model.ptr();
  });
  const auto ledger = std::make_shared<memory::Ledger>("rank 0/1");
  const memory::LedgerScope scope(ledger);
  tape.replay(module->parameters(), [](const c10::StorageImpl&, at::Tensor) {});
  // The weight, what it is made from, the factors and the workspace of one decomposition.
  EXPECT_PEAK_BYTES_LE(*ledger, 6 * kWeightBytes);
  EXPECT_EQ(ledger->now().total(), 0);
}

TEST(ConstructionTapeTest, HandsOverInTheOrderOfTheTape) {
  at::Tensor first, second, third;
  const ConstructionTape tape([&] {
    first = torch::zeros({1});
    second = torch::zeros({2});
    third = torch::zeros({3});
    first.add_(third.sum());
  });
  std::vector<int64_t> order;
  tape.replay({first, second, third}, [&](const c10::StorageImpl&, const at::Tensor& values) {
    order.push_back(values.numel());
  });
  EXPECT_EQ(order, (std::vector<int64_t>{2, 3, 1}));
}

TEST(ConstructionTapeTest, ComputesOnlyWhatATargetNeeds) {
  at::Tensor target;
  const ConstructionTape tape([&] {
    torch::empty({1 << 20}).fill_(1).mul_(2);
    target = torch::ones({4}) + torch::full({4}, 2.0);
  });
  const auto ledger = std::make_shared<memory::Ledger>("rank 0/1");
  const memory::LedgerScope scope(ledger);
  EXPECT_TRUE(torch::equal(Values(tape, {target}).of(target), torch::full({4}, 3.0)));
  EXPECT_PEAK_BYTES_LE(*ledger, 4_KiB);
}

TEST(ConstructionTapeTest, StaysValidWhenMoved) {
  at::Tensor target;
  ConstructionTape tape([&] { target = torch::ones({4}); });
  const ConstructionTape moved(std::move(tape));
  EXPECT_TRUE(torch::equal(Values(moved, {target}).of(target), torch::ones({4})));
}

TEST(ConstructionTapeTest, RecordsItsOwnThreadOnly) {
  at::Tensor target;
  const ConstructionTape tape([&] {
    target = torch::zeros({2});
    std::thread([] { EXPECT_TRUE(torch::ones({2}).is_cpu()); }).join();
  });
  EXPECT_TRUE(torch::ones({2}).is_cpu());
}

TEST(ConstructionTapeTest, LetsThreadsRecordAndReplayAtOnce) {
  const auto plain = two_passes(2, 32, true)->parameters();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        std::shared_ptr<torch::nn::Module> module;
        const ConstructionTape tape([&] { module = two_passes(2, 32, true); });
        const auto parameters = module->parameters();
        const Values values(tape, parameters);
        for (size_t index = 0; index < plain.size(); ++index) {
          EXPECT_TRUE(torch::equal(values.of(parameters[index]), plain[index]));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(ConstructionTapeTest, LetsExceptionsThroughAndForgetsTheRecording) {
  torch::manual_seed(4);
  const auto before = default_state();
  EXPECT_THROW(ConstructionTape([] {
                 torch::randn({3});
                 throw std::out_of_range("the user's");
               }),
               std::out_of_range);
  EXPECT_TRUE(torch::equal(default_state(), before));
  EXPECT_TRUE(torch::ones({2}).is_cpu());
  EXPECT_THROW(ConstructionTape([] { torch::ones({2, 3}).mm(torch::ones({2, 3})); }), c10::Error);
  at::Tensor target;
  const ConstructionTape tape([&] { target = torch::zeros({2}); });
  EXPECT_TRUE(tape.holds(target));
}

TEST(ConstructionTapeTest, RefusesARecordingInsideARecording) {
  const auto inner = [] { const ConstructionTape tape([] {}); };
  EXPECT_THAT(recording_error(inner), HasSubstr("records a construction already"));
}

TEST(ConstructionTapeTest, RefusesAConstructorThatReadsValues) {
  const auto refused = [](const std::string& name) {
    return AllOf(HasSubstr(name), HasSubstr("the constructor reads values"),
                 HasSubstr("construct the module plainly"));
  };
  EXPECT_THAT(recording_error([] { torch::ones({}).item<float>(); }), refused("aten::item"));
  EXPECT_THAT(recording_error([] { torch::ones({2}).equal(torch::ones({2})); }),
              refused("aten::equal"));
  EXPECT_THAT(recording_error([] { torch::ones({2}).nonzero(); }), refused("aten::nonzero"));
  EXPECT_THAT(recording_error([] { (void)torch::ones({1}).is_nonzero(); }),
              refused("aten::is_nonzero"));
  EXPECT_THAT(recording_error([] { torch::allclose(torch::ones({2}), torch::ones({2})); }),
              refused("aten::allclose"));
  EXPECT_THAT(recording_error([] {
                const auto a = torch::randn({3});
                a.index({a > 0});
              }),
              refused("aten::index.Tensor"));
  EXPECT_THAT(recording_error([] {
                torch::nn::init::sparse_(torch::empty({6, 5}), 0.5);
              }),
              refused("aten::item"));
  EXPECT_THAT(recording_error([] { *torch::ones({2}).data_ptr<float>() = 3; }),
              HasSubstr("reads or writes the memory of a tensor"));
}

TEST(ConstructionTapeTest, RefusesOtherDevices) {
  EXPECT_THAT(recording_error([] { torch::empty({2}, torch::kCUDA); }),
              AllOf(HasSubstr("aten::empty"), HasSubstr("expected a tensor on cpu, got cuda")));
  EXPECT_THAT(recording_error([] { torch::empty({2}).to(torch::kCUDA); }),
              HasSubstr("expected a tensor on cpu, got cuda"));
}

TEST(ConstructionTapeTest, NamesAnOperatorWithoutAMetaKernel) {
  EXPECT_THAT(recording_error([] { torch::poisson(torch::ones({3})); }),
              AllOf(HasSubstr("aten::poisson"), HasSubstr("expected an operator with a kernel")));
}

TEST(ConstructionTapeTest, RefusesDeferredValuesInRealMemory) {
  std::vector<float> data(4);
  const auto write = [&](const std::function<void(at::Tensor)>& fn) {
    return recording_error([&] { fn(torch::from_blob(data.data(), {4})); });
  };
  EXPECT_THAT(write([](at::Tensor blob) { blob.copy_(torch::randn({4})); }),
              HasSubstr("aten::copy_: writes values that do not exist yet"));
  EXPECT_THAT(write([](at::Tensor blob) { blob.normal_(); }), HasSubstr("aten::normal_"));
}

TEST(ConstructionTapeTest, RefusesAGraphThatReachesRealMemory) {
  const auto leaf = torch::ones({4}).requires_grad_();
  EXPECT_THAT(recording_error([&] { torch::randn({4}).mul(leaf); }),
              AllOf(HasSubstr("aten::mul"), HasSubstr("under torch::NoGradGuard")));
  EXPECT_THAT(replay_error(module_of([](ModuleOf& module) {
                const auto weight = module.register_parameter("weight", torch::randn({4}));
                module.register_buffer("product", weight * torch::randn({4}));
              })),
              HasSubstr("the autograd graph of its tensors"));
}

TEST(ConstructionTapeTest, RefusesMetaTensorsFromOutside) {
  const auto outside = torch::empty({2}, torch::kMeta);
  EXPECT_THAT(recording_error([&] { torch::ones({2}).add_(outside); }),
              HasSubstr("was made before it and has no values"));
}

TEST(ConstructionTapeTest, RefusesATargetThatIsNotOnTheTape) {
  const ConstructionTape tape([] {});
  const auto sink = [](const c10::StorageImpl&, at::Tensor) {};
  const auto refused = HasSubstr("expected a tensor that the recorded constructor made");
  EXPECT_THAT(error_of([&] { tape.replay({torch::ones({2})}, sink); }), refused);
  EXPECT_THAT(error_of([&] { tape.replay({torch::empty({2}, torch::kMeta)}, sink); }), refused);
  EXPECT_THAT(error_of([&] { tape.replay({at::Tensor()}, sink); }), refused);
}

TEST(ConstructionTapeTest, RefusesATensorThatTheModuleKeepsButDoesNotRegister) {
  EXPECT_THAT(
      replay_error(module_of([](ModuleOf& module) {
        module.register_buffer("known", torch::ones({2}));
        module.kept = torch::ones({3, 5});
      })),
      AllOf(HasSubstr("[3, 5]"), HasSubstr("aten::ones"), HasSubstr("register it as a buffer")));
}

TEST(ConstructionTapeTest, RefusesACapturedTensorThatWasChangedSince) {
  auto weights = torch::ones({4});
  at::Tensor target;
  const ConstructionTape tape([&] { target = torch::empty({4}).copy_(weights); });
  EXPECT_TRUE(torch::equal(Values(tape, {target}).of(target), torch::ones({4})));
  weights.add_(1);
  EXPECT_THAT(error_of([&] { Values(tape, {target}); }), HasSubstr("it was changed since"));
}

TEST(ConstructionTapeTest, RefusesDrawsWithoutAnOperator) {
  const auto draw = [] {
    torch::randn({2});
    at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>()->random();
    torch::randn({2});
  };
  EXPECT_THAT(recording_error(draw),
              HasSubstr("a number was drawn from its generator without one"));
}

TEST(ConstructionTapeTest, LetsTheSinksErrorThroughAndKeepsTheGenerator) {
  at::Tensor target;
  torch::manual_seed(8);
  const ConstructionTape tape([&] { target = torch::randn({4}); });
  const auto before = default_state();
  EXPECT_THROW(tape.replay({target}, [](const c10::StorageImpl&, at::Tensor) { throw 3; }), int);
  EXPECT_TRUE(torch::equal(default_state(), before));
  const Values values(tape, {target});
  torch::manual_seed(8);
  EXPECT_TRUE(torch::equal(values.of(target), torch::randn({4})));
}

}  // namespace
}  // namespace zeropage::operators::construction_tape_test
