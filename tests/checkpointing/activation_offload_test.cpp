#include "zeropage/activation_offload.h"

#include <functional>
#include <limits>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/tiny_models.h"
#include "zeropage/bytes.h"
#include "zeropage/ledger.h"

namespace zeropage::checkpointing::activation_offload_test {
namespace {

using memory::Kind;
using memory::operator""_KiB;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using zeropage::testing::error_of;

using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

// Everything leaves, if not told otherwise.
const ActivationOffloadOptions kAll{.least_bytes = 0};

torch::Tensor forward_with(ActivationOffload& offload, const Forward& forward,
                           const torch::Tensor& x) {
  const ActivationScope scope(offload);
  return forward(x);
}

// Gradients of the loss for the input and the parameters.
std::vector<torch::Tensor> gradients(const torch::nn::Module& module, const torch::Tensor& x,
                                     const torch::Tensor& loss) {
  std::vector<torch::Tensor> inputs = {x};
  for (const auto& parameter : module.parameters()) {
    if (parameter.requires_grad()) inputs.push_back(parameter);
  }
  return torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/false, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

bool same_bits(const std::vector<torch::Tensor>& left, const std::vector<torch::Tensor>& right) {
  bool same = left.size() == right.size();
  for (size_t i = 0; same && i < left.size(); ++i) {
    same = left[i].defined() ? torch::equal(left[i], right[i]) : !right[i].defined();
  }
  return same;
}

// A test's own ledger, on which nothing is offloaded before or after.
class ActivationOffloadTest : public ::testing::Test {
 protected:
  ActivationOffloadTest() {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  ~ActivationOffloadTest() override { EXPECT_EQ(held(Kind::kActivationOffloaded), 0); }

  int64_t held(Kind kind) const { return ledger_->now()[kind]; }

  template <typename Module>
  void expect_the_plain_bits(Module module) {
    const auto x = torch::randn({6, 7}).requires_grad_();
    const Forward forward = [&](const torch::Tensor& in) {
      return module->forward(in).pow(2).sum();
    };
    const auto plain = gradients(*module, x, forward(x));
    ActivationOffload offload(kAll);
    for (int step = 0; step < 2; ++step) {
      const auto loss = forward_with(offload, forward, x);
      EXPECT_GT(held(Kind::kActivationOffloaded), 0);
      EXPECT_TRUE(same_bits(plain, gradients(*module, x, loss)));
    }
    EXPECT_GT(offload.statistics().fetched_bytes, 0);
    EXPECT_EQ(offload.statistics().host_bytes, 0);
  }

  const std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  const memory::LedgerScope scope_{ledger_};
};

TEST_F(ActivationOffloadTest, GradientsHaveThePlainBits) {
  expect_the_plain_bits(zeropage::testing::Oddball());
  expect_the_plain_bits(zeropage::testing::ConvNet());
  expect_the_plain_bits(zeropage::testing::Recurrent());
  expect_the_plain_bits(zeropage::testing::Transformer());
}

// LibTorch's recurrent layers write to parts of one buffer that count their versions apart.
template <typename Layer>
void expect_the_plain_bits_of(Layer layer) {
  const auto x = torch::randn({2, 3, 8}).requires_grad_();
  const Forward forward = [&](const torch::Tensor& in) {
    return std::get<0>(layer->forward(in)).square().sum();
  };
  const auto plain = gradients(*layer, x, forward(x));
  ActivationOffload offload(kAll);
  const auto loss = forward_with(offload, forward, x);
  EXPECT_TRUE(same_bits(plain, gradients(*layer, x, loss))) << *layer;
}

TEST_F(ActivationOffloadTest, GradientsOfRecurrentLayersHaveThePlainBits) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    torch::set_default_dtype(torch::scalarTypeToTypeMeta(dtype));
    expect_the_plain_bits_of(torch::nn::GRU(8, 8));
    expect_the_plain_bits_of(torch::nn::LSTM(8, 8));
    expect_the_plain_bits_of(torch::nn::RNN(8, 8));
  }
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat));
}

struct Bytes {
  int64_t peak = 0;  // of activations that are here
  int64_t offloaded = 0;
};

// One step of a stack of Linear and GELU, with activations of 64 KiB and 128 KiB.
Bytes bytes_of_stack(int layers, bool offloaded) {
  const auto ledger = std::make_shared<memory::Ledger>();
  const memory::LedgerScope scope(ledger);
  torch::nn::Sequential module;
  for (int layer = 0; layer < layers; ++layer) {
    module->push_back(torch::nn::Linear(32, 32));
    module->push_back(torch::nn::GELU());
  }
  for (auto& parameter : module->parameters()) {
    const memory::KindScope kind(Kind::kGradient);
    parameter.mutable_grad() = torch::zeros_like(parameter);
  }
  for (auto& parameter : module->parameters()) memory::assign(parameter, Kind::kParameter);
  ActivationOffload offload;
  ledger->reset_peak();
  torch::Tensor loss;
  {
    const SavedTensorScope hooks(offloaded ? offload.hooks() : nullptr);
    loss = module->forward(torch::ones({512, 32})).sum();
  }
  const int64_t on_host = ledger->now()[Kind::kActivationOffloaded];
  EXPECT_EQ(on_host, offload.statistics().host_bytes);
  loss.backward();
  EXPECT_EQ(ledger->now()[Kind::kActivationOffloaded], 0);
  return {ledger->activation_peak(), on_host};
}

TEST_F(ActivationOffloadTest, ActivationsThatAreHereDoNotGrowWithDepth) {
  const Bytes shallow = bytes_of_stack(8, true), deep = bytes_of_stack(64, true);
  EXPECT_LE(deep.peak, shallow.peak * 21 / 20);
  // A layer saves the inputs of its Linear and of its GELU.
  EXPECT_EQ(shallow.offloaded, 8 * 2 * 64_KiB);
  EXPECT_EQ(deep.offloaded, 64 * 2 * 64_KiB);
  EXPECT_GT(bytes_of_stack(64, false).peak, 64 * 2 * 64_KiB) << "what it is measured against";
  ::testing::Test::RecordProperty("peak of 8 layers", std::to_string(shallow.peak));
  ::testing::Test::RecordProperty("peak of 64 layers", std::to_string(deep.peak));
}

TEST_F(ActivationOffloadTest, CopiesGoWithAGraphThatNeverRunsBackward) {
  const auto x = torch::randn({64, 64}).requires_grad_();
  {
    ActivationOffload offload;
    const auto loss = forward_with(
        offload, [](const auto& in) { return in.sin().cos().exp().sum(); }, x);
    EXPECT_GT(held(Kind::kActivationOffloaded), 0);
  }
  EXPECT_EQ(held(Kind::kActivationOffloaded), 0);
}

TEST_F(ActivationOffloadTest, PartsOfOneBufferLeaveOnce) {
  const auto x = torch::randn({2, 8, 16, 3 * 64}).requires_grad_();
  ActivationOffload offload;
  const auto forward = [](const torch::Tensor& in) {
    const auto parts = (in * 1).chunk(3, -1);  // q, k and v in each other's holes
    return torch::scaled_dot_product_attention(parts[0], parts[1], parts[2]).pow(2).sum();
  };
  const auto plain = torch::autograd::grad({forward(x)}, {x});
  const auto loss = forward_with(offload, forward, x);
  const int64_t buffer = x.numel() * 4, out = buffer / 3;
  EXPECT_GE(offload.statistics().saved_tensors, 4);
  // The buffer, and what attention gave, which it and pow() save.
  EXPECT_THAT(offload.statistics().host_bytes,
              AllOf(::testing::Ge(buffer + out), ::testing::Lt(2 * buffer)));
  EXPECT_TRUE(same_bits(plain, torch::autograd::grad({loss}, {x})));
  EXPECT_THAT(offload.statistics().fetched_bytes, ::testing::Lt(2 * buffer)) << "comes back once";
}

TEST_F(ActivationOffloadTest, AViewAndItsBaseLeaveOnce) {
  const auto x = torch::randn({64, 64}).requires_grad_();
  ActivationOffload offload(kAll);
  const auto forward = [](const torch::Tensor& in) {
    const auto y = in * 2;
    return (y.exp().detach() * y).sum() + (y.t().narrow(0, 3, 40).pow(2)).sum() + y.pow(3).sum();
  };
  const auto plain = torch::autograd::grad({forward(x)}, {x});
  const auto loss = forward_with(offload, forward, x);
  const int64_t copies = offload.statistics().copies;
  EXPECT_TRUE(same_bits(plain, torch::autograd::grad({loss}, {x})));
  EXPECT_LT(copies, offload.statistics().saved_tensors);
}

TEST_F(ActivationOffloadTest, AStorageThatWasChangedSinceLeavesAgain) {
  const auto x = torch::randn({64, 64});
  const auto weight = torch::randn({64, 64}).requires_grad_();
  ActivationOffload offload(kAll);
  torch::Tensor first, second, changing;
  {
    const ActivationScope scope(offload);
    changing = x.clone();
    first = (weight * changing).sum();
    changing.add_(1);
    second = (weight * changing).sum();
  }
  EXPECT_EQ(offload.statistics().copies, 2);
  const auto expected = changing.clone();
  changing.reset();
  EXPECT_TRUE(torch::equal(torch::autograd::grad({second}, {weight})[0], expected));
  EXPECT_THAT(error_of([&] { first.backward(); }),
              HasSubstr("was changed in place since the forward"));
}

TEST_F(ActivationOffloadTest, ParametersAndWhatItWasToldStay) {
  torch::nn::Linear trained(64, 64), frozen(64, 64);
  for (auto& parameter : frozen->parameters()) parameter.requires_grad_(false);
  const auto x = torch::randn({4, 64}).requires_grad_();
  ActivationOffload offload;
  offload.stay_here(frozen->parameters());
  auto loss = forward_with(
      offload, [&](const auto& in) { return frozen(trained(in)).sum(); }, x);
  EXPECT_EQ(offload.statistics().copies, 0);
  loss.backward();
  EXPECT_TRUE(trained->weight.grad().defined());
}

TEST_F(ActivationOffloadTest, ARetainedGraphRunsBackwardAgain) {
  const auto x = torch::randn({64, 64}).requires_grad_();
  const auto forward = [](const torch::Tensor& in) { return (in * 2).sin().cos().pow(2).sum(); };
  const auto plain = torch::autograd::grad({forward(x)}, {x});
  ActivationOffload offload;
  const auto loss = forward_with(offload, forward, x);
  const int64_t left = held(Kind::kActivationOffloaded);
  EXPECT_TRUE(same_bits(plain, torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)));
  EXPECT_EQ(held(Kind::kActivation), 0) << "what came back has gone";
  EXPECT_EQ(held(Kind::kActivationOffloaded), left);
  EXPECT_TRUE(same_bits(plain, torch::autograd::grad({loss}, {x})));
}

TEST_F(ActivationOffloadTest, OneThreadPacksWhileAnotherIsInBackward) {
  ActivationOffload offload(kAll);
  const auto shared = torch::randn({64, 64});
  const auto work = [&](double factor) {
    const memory::LedgerScope ledger(ledger_);
    const auto x = torch::full({64, 64}, factor).requires_grad_();
    for (int step = 0; step < 20; ++step) {
      const auto forward = [&](const torch::Tensor& in) {
        return (in * shared).sin().pow(2).sum();
      };
      const auto plain = torch::autograd::grad({forward(x)}, {x});
      const auto loss = forward_with(offload, forward, x);
      EXPECT_TRUE(same_bits(plain, torch::autograd::grad({loss}, {x})));
    }
  };
  std::thread other(work, 0.5);
  work(0.25);
  other.join();
}

// What comes back of a tensor, by the gradient of a product with it.
torch::Tensor through(Compression compression, const torch::Tensor& values) {
  ActivationOffload offload({.least_bytes = 0, .compression = compression});
  const auto x = torch::ones_like(values).requires_grad_();
  torch::Tensor loss;
  {
    const ActivationScope scope(offload);
    loss = (x * values.clone()).sum();
  }
  return torch::autograd::grad({loss}, {x})[0];
}

TEST_F(ActivationOffloadTest, CompressionIsWithinItsBound) {
  const auto values = torch::randn({5, 1000}) * torch::logspace(-3, 3, 1000);
  EXPECT_TRUE(torch::equal(through(Compression::kNone, values), values));
  const auto bf16_error = (through(Compression::kBf16, values) - values).abs();
  EXPECT_TRUE((bf16_error <= values.abs() / 256).all().item<bool>());
  EXPECT_GT(bf16_error.max().item<float>(), 0);
  const auto flat = values.flatten(), error = through(Compression::k8Bit, flat).sub(flat).abs();
  for (int64_t first = 0; first < flat.numel(); first += 256) {
    const int64_t count = std::min<int64_t>(256, flat.numel() - first);
    const auto most = flat.narrow(0, first, count).abs().max().item<float>();
    EXPECT_LE(error.narrow(0, first, count).max().item<float>(), most / 254 * 1.0001);
  }
  EXPECT_TRUE(torch::equal(through(Compression::k8Bit, torch::zeros({300})), torch::zeros({300})));
}

TEST_F(ActivationOffloadTest, CompressionDoesNotHideAnOverflow) {
  for (const double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    auto values = torch::ones({600});
    values[5] = bad;
    for (const Compression compression : {Compression::kBf16, Compression::k8Bit}) {
      const auto back = through(compression, values);
      EXPECT_FALSE(std::isfinite(back[5].item<float>()));
      EXPECT_EQ(back[599].item<float>(), 1);
    }
  }
}

TEST_F(ActivationOffloadTest, CompressedCopiesAreSmallerAndSaidToBeLossy) {
  const auto x = torch::randn({64, 64}).requires_grad_();
  const auto forward = [](const torch::Tensor& in) { return in.sin().pow(2).sum(); };
  const auto statistics = [&](Compression compression) {
    ActivationOffload offload({.compression = compression});
    forward_with(offload, forward, x).backward();
    return offload.statistics();
  };
  const auto none = statistics({}), bf16 = statistics(Compression::kBf16),
             bits = statistics(Compression::k8Bit);
  EXPECT_EQ(none.host_total_bytes, bf16.host_total_bytes * 2);
  EXPECT_EQ(bits.host_total_bytes, none.copies * (4096 + 4096 / 256 * 4));
  EXPECT_THAT(to_string(none), Not(HasSubstr("lossy")));
  EXPECT_THAT(to_string(bits), HasSubstr("(lossy: 8-bit)"));
}

TEST_F(ActivationOffloadTest, IntegersAreNeverCompressed) {
  const auto indices = torch::randint(0, 1000, {64, 64}, torch::kLong);
  const auto table = torch::randn({1000, 8}).requires_grad_();
  ActivationOffload offload({.least_bytes = 0, .compression = Compression::k8Bit});
  const auto loss = forward_with(
      offload, [&](const auto& in) { return torch::embedding(table, in.clone()).sum(); }, indices);
  const auto plain = torch::autograd::grad({torch::embedding(table, indices).sum()}, {table});
  EXPECT_TRUE(same_bits(plain, torch::autograd::grad({loss}, {table})));
}

TEST_F(ActivationOffloadTest, RefusesBytesBelowZero) {
  EXPECT_THAT(error_of([] { ActivationOffload({.least_bytes = -1}); }),
              HasSubstr("expected bytes of 0 or more, got least_bytes -1"));
}

}  // namespace
}  // namespace zeropage::checkpointing::activation_offload_test
