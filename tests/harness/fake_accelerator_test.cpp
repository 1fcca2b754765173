#include "tests/harness/fake_accelerator/fake_accelerator.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "examples/byte_gpt/gpt.h"
#include "tests/harness/errors.h"
#include "tests/harness/fake_environment.h"
#include "tests/harness/reference.h"
#include "tests/harness/tiny_models.h"

namespace zeropage::testing::fake_accelerator_test {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;
using ::testing::HasSubstr;

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  return guard;
}

c10::Stream default_stream(c10::DeviceIndex device = 0) {
  return guard().getDefaultStream(fake_device(device));
}

c10::Stream new_stream(c10::DeviceIndex device = 0) {
  return guard().getStreamFromGlobalPool(fake_device(device));
}

// [4] on fake:0, filled on the current stream
Tensor filled(double value) {
  return torch::full({4}, value, torch::TensorOptions(fake_device()).dtype(torch::kFloat));
}

bool is_nan(const Tensor& tensor) {
  return tensor.isnan().all().item<bool>();
}

void await(c10::Stream later, c10::Stream earlier) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(earlier);
  event.block(later);
}

// A model and its loss on a device; step: which batch.
template <typename Module>
struct Training {
  std::function<Module()> make;
  std::function<Tensor(Module&, int step, torch::Device)> loss;
};

MakeOptimizer sgd() {
  return [](Tensors parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.1));
  };
}

MakeOptimizer adamw() {
  return [](Tensors parameters) {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(0.01));
  };
}

constexpr int kSteps = 3;

// The losses and then the parameters, on the host.
template <typename Module>
Tensors train(const Training<Module>& training, const MakeOptimizer& make_optimizer,
              torch::Device device) {
  Module module = training.make();
  module->to(device);
  const auto optimizer = make_optimizer(distinct_parameters(module));
  Tensors results;
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    const Tensor loss = training.loss(module, step, device);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(module->parameters(), 0.5);
    optimizer->step();
    results.push_back(loss.detach());
  }
  for (const Tensor& parameter : module->parameters()) results.push_back(parameter.detach());
  for (Tensor& result : results) result = result.to(torch::kCPU);
  return results;
}

class FakeAcceleratorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    register_fake_accelerator();
    at::set_num_threads(1);
    reset_fake_counters();
  }
  void TearDown() override {
    set_fake_delays(0, std::chrono::microseconds(0));
    for (c10::DeviceIndex device = 0; device < kFakeDevices; ++device)
      guard().synchronizeDevice(device);
  }

  template <typename Module>
  static void expect_bits_of_cpu(const Training<Module>& training,
                                 const MakeOptimizer& make_optimizer, int64_t other_syncs = 0) {
    const Tensors expected = train(training, make_optimizer, torch::kCPU);
    reset_fake_counters();
    EXPECT_TRUE(same_bits(expected, train(training, make_optimizer, fake_device())));
    EXPECT_EQ(fake_counters().not_async, 0);
    // One stream needs no event; the host waits to read the results, and the gradients' norm.
    EXPECT_EQ(fake_counters().record_stream, 0);
    const auto read_back = std::count_if(expected.begin(), expected.end(),
                                         [](const Tensor& one) { return one.numel() > 0; });
    EXPECT_EQ(fake_counters().host_syncs, read_back + kSteps + other_syncs);
    for (const uint64_t seed : {1, 2}) {
      set_fake_delays(seed, std::chrono::microseconds(100));
      EXPECT_TRUE(same_bits(expected, train(training, make_optimizer, fake_device(3))));
    }
  }
};

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(7, 33));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({33})));
    down = register_module("down", torch::nn::Linear(33, 7));
  }
  Tensor forward(const Tensor& x) { return down(torch::gelu(norm(up(x)))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Mlp);

template <typename Module>
Training<Module> regression() {
  return {[] {
            torch::manual_seed(1);
            return Module();
          },
          [](Module& module, int step, torch::Device device) {
            const Samples samples = samples_of(0, step);
            return torch::mse_loss(module->forward(samples.inputs.to(device)),
                                   samples.targets.to(device));
          }};
}

Training<train_gpt::Gpt> language() {
  const train_gpt::GptConfig config{.d_model = 32, .layers = 2, .heads = 2, .sequence = 17};
  return {[config] { return train_gpt::Gpt(config, /*seed=*/1); },
          [](train_gpt::Gpt& gpt, int step, torch::Device device) {
            auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step + 1));
            const Tensor tokens =
                torch::randint(0, train_gpt::kVocabulary, {3, 17}, generator, torch::kInt64);
            const Tensor logits = gpt->forward(tokens.to(device));
            return torch::nn::functional::cross_entropy(logits.flatten(0, 1),
                                                        tokens.roll(1, 1).flatten().to(device));
          }};
}

TEST_F(FakeAcceleratorTest, TrainsAnMlpToTheBitsOfTheCpu) {
  expect_bits_of_cpu(regression<Mlp>(), sgd());
}

TEST_F(FakeAcceleratorTest, TrainsOddParametersToTheBitsOfTheCpu) {
  expect_bits_of_cpu(regression<Oddball>(), adamw());
}

TEST_F(FakeAcceleratorTest, TrainsMultiheadAttentionToTheBitsOfTheCpu) {
  // Each of three layers compares query, key and value by torch::equal().
  expect_bits_of_cpu(regression<Transformer>(), adamw(), /*other_syncs=*/kSteps * 3 * 2);
}

TEST_F(FakeAcceleratorTest, TrainsAConvolutionNetToTheBitsOfTheCpu) {
  expect_bits_of_cpu(regression<ConvNet>(), sgd());
}

TEST_F(FakeAcceleratorTest, TrainsAnLstmAsTheCpuDoes) {
  const Tensors expected = train(regression<Recurrent>(), sgd(), torch::kCPU);
  set_fake_delays(9, std::chrono::microseconds(20));
  const Tensors found = train(regression<Recurrent>(), sgd(), fake_device());
  ASSERT_EQ(found.size(), expected.size());
  for (size_t index = 0; index < found.size(); ++index)
    EXPECT_TRUE(torch::allclose(found[index], expected[index], 1e-4, 1e-6)) << index;
}

TEST_F(FakeAcceleratorTest, TrainsAGptToTheBitsOfTheCpu) {
  expect_bits_of_cpu(language(), sgd());
}

TEST_F(FakeAcceleratorTest, TrainsAGptWithAdamWToTheBitsOfTheCpu) {
  expect_bits_of_cpu(language(), adamw());
}

// Operators of several kinds: out=, in place, of lists, of indices, with and without meta kernels.
Tensors mixture(torch::Device device) {
  torch::manual_seed(3);
  const Tensor x = torch::randn({4, 6}).to(device);
  const Tensor rows = torch::tensor({2, 0}).to(device);
  Tensor y = x.t().contiguous();
  y.select(0, 1).mul_(2).add_(x.select(1, 0));
  y.index_put_({rows}, torch::ones({2, 4}, device));
  y.masked_fill_(y > 1, 0.5);
  Tensor out = torch::empty({0}, device);
  torch::matmul_out(out, x, y);
  const auto [values, indices] = out.topk(2);
  Tensor positive = torch::empty({0}, device);
  at::masked_select_out(positive, x, x > 0);
  Tensor logits = torch::empty({0}, device);
  at::hardswish_out(logits, x);
  Tensors list = {x.clone(), y.clone()};
  at::_foreach_add_(list, 1.5);
  at::_foreach_mul_(list, at::_foreach_sqrt(at::_foreach_abs(list)));
  return {y,
          out,
          values,
          indices,
          positive,
          logits,
          list[0],
          list[1],
          torch::cat({x, x.flip(0)}),
          torch::stack({x, x.roll(1, 0)}, 1),
          torch::where(x > 0, x, torch::zeros({1}, device)),
          x.var(1),
          x.std(),
          x.max(),
          std::get<1>(x.sort(1, /*descending=*/true)),
          x.masked_select(x > 0),
          x.index({rows, torch::indexing::Slice(1, 4)}),
          x.index({x > 0}),
          torch::einsum("ij,kj->ik", {x, x}),
          x.cumsum(0).to(torch::kDouble),
          torch::addr(torch::zeros({6, 6}, device), x[0], x[1]),
          torch::one_hot(rows, 4),
          x.floor_divide(0.3),
          torch::linspace(0, 1, 5, device),
          torch::arange(7, device),
          torch::eye(3, device).tril()};
}

TEST_F(FakeAcceleratorTest, RunsOperatorsOfEveryKind) {
  set_fake_delays(8, std::chrono::microseconds(50));
  Tensors found = mixture(fake_device());
  for (Tensor& tensor : found) tensor = tensor.cpu();
  EXPECT_TRUE(same_bits(mixture(torch::kCPU), found));
}

TEST_F(FakeAcceleratorTest, DropsOut) {
  const Tensor dropped = torch::dropout(torch::ones({1000}, fake_device()), 0.5, /*train=*/true);
  EXPECT_TRUE(dropped.eq(0).logical_or(dropped.eq(2)).all().item<bool>());
  EXPECT_GT(dropped.sum().item<float>(), 0);
}

TEST_F(FakeAcceleratorTest, MultipliesInBfloat16) {
  torch::manual_seed(1);
  const Tensor a = torch::randn({31, 65}).to(torch::kBFloat16);
  const Tensor b = torch::randn({65, 17}).to(torch::kBFloat16);
  const Tensor product = torch::matmul(a.to(fake_device()), b.to(fake_device()));
  EXPECT_EQ(product.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(torch::equal(product.cpu(), torch::matmul(a, b)));
}

TEST_F(FakeAcceleratorTest, NamesItsDevices) {
  EXPECT_EQ(filled(1).device().str(), "fake:0");
  EXPECT_EQ(torch::empty({1}, torch::Device("fake:3")).device(), fake_device(3));
}

TEST_F(FakeAcceleratorTest, EnqueuesWithoutWaiting) {
  Tensor y;
  {
    const HeldStream held(default_stream());
    const Tensor x = filled(2);
    y = torch::addmm(x.view({2, 2}), x.view({2, 2}), x.view({2, 2}).t()).softmax(-1).sum();
    EXPECT_FALSE(default_stream().query());
  }
  EXPECT_EQ(fake_counters().host_syncs, 0);
  EXPECT_EQ(y.item<float>(), 2);
}

TEST_F(FakeAcceleratorTest, ShowsNaNToAStreamThatForgotAnEvent) {
  const c10::Stream side = new_stream();
  for (const bool waits : {false, true}) {
    const Tensor x = filled(1);
    x.fill_(std::numeric_limits<float>::quiet_NaN());  // what a fresh block holds
    default_stream().synchronize();
    Tensor y;
    {
      const HeldStream held(default_stream());
      x.fill_(1);
      if (waits) await(side, default_stream());
      const c10::StreamGuard on_side(side);
      y = x * 3;
      if (!waits) side.synchronize();
    }
    const c10::StreamGuard on_side(side);
    EXPECT_EQ(is_nan(y), !waits);
    EXPECT_EQ(y.eq(3).all().item<bool>(), waits);
  }
}

TEST_F(FakeAcceleratorTest, FillsFreshMemoryWithNaN) {
  EXPECT_TRUE(is_nan(torch::empty({54321}, fake_device())));
}

TEST_F(FakeAcceleratorTest, ReusesFreedMemoryOnItsStreamInOrder) {
  Tensor doubled;
  Tensor next;
  {
    const HeldStream held(default_stream());
    Tensor x = filled(1);
    const void* memory = x.const_data_ptr();
    doubled = x * 2;
    x = Tensor();
    next = filled(5);
    EXPECT_EQ(next.const_data_ptr(), memory);
  }
  EXPECT_TRUE(doubled.eq(2).all().item<bool>());
  EXPECT_TRUE(next.eq(5).all().item<bool>());
}

TEST_F(FakeAcceleratorTest, DoesNotGiveMemoryToOtherStreams) {
  Tensor x = filled(1);
  const void* memory = x.const_data_ptr();
  x = Tensor();
  const c10::StreamGuard on_side(new_stream());
  EXPECT_NE(filled(1).const_data_ptr(), memory);
}

TEST_F(FakeAcceleratorTest, ShowsMemoryThatWasFreedUnderAnotherStream) {
  for (const bool recorded : {false, true}) {
    const c10::Stream side = new_stream();
    Tensor x = filled(1);
    await(side, default_stream());
    Tensor y;
    {
      const HeldStream held(side);
      {
        const c10::StreamGuard on_side(side);
        y = x * 3;
      }
      if (recorded) x.record_stream(side);
      x = Tensor();
      default_stream().synchronize();
    }
    const c10::StreamGuard on_side(side);
    EXPECT_EQ(is_nan(y), !recorded);
    EXPECT_EQ(fake_counters().record_stream, recorded ? 1 : 0);
  }
}

TEST_F(FakeAcceleratorTest, ReusesRecordedMemoryOnlyAfterTheOtherStream) {
  const c10::Stream side = new_stream();
  Tensor x = torch::empty({777}, fake_device());
  const void* memory = x.const_data_ptr();
  {
    const HeldStream held(side);
    x.record_stream(side);
    x = Tensor();
    EXPECT_NE(torch::empty({777}, fake_device()).const_data_ptr(), memory);
  }
  side.synchronize();
  const Tensor other = torch::empty({777}, fake_device());
  EXPECT_TRUE(other.const_data_ptr() == memory ||
              torch::empty({777}, fake_device()).const_data_ptr() == memory);
}

TEST_F(FakeAcceleratorTest, RunsBackwardOnTheStreamOfForward) {
  set_fake_delays(3, std::chrono::microseconds(200));
  const c10::Stream side = new_stream();
  const Tensor x = filled(2).requires_grad_();
  await(side, default_stream());
  Tensor loss;
  {
    const c10::StreamGuard on_side(side);
    loss = (x * x * 3).sum();
    loss.backward();
  }
  await(default_stream(), side);
  EXPECT_TRUE(x.grad().eq(12).all().item<bool>());
}

TEST_F(FakeAcceleratorTest, LetsBackwardJoinTheCallersStream) {
  set_fake_delays(4, std::chrono::microseconds(200));
  const c10::Stream side = new_stream();
  const Tensor x = filled(2).requires_grad_();
  const Tensor square = x * x;  // autograd alone would free it while the side stream reads it
  Tensor loss;
  await(side, default_stream());
  {
    const c10::StreamGuard on_side(side);
    loss = square * square;
  }
  await(default_stream(), side);
  loss.sum().backward();
  EXPECT_TRUE(x.grad().eq(32).all().item<bool>());
}

TEST_F(FakeAcceleratorTest, ServesTwoDevicesFromTwoThreads) {
  set_fake_delays(5, std::chrono::microseconds(50));
  const Tensors expected = train(regression<Mlp>(), sgd(), torch::kCPU);
  std::vector<Tensors> found(2);
  std::vector<std::thread> threads;
  std::mutex making;  // modules draw from one generator
  auto training = regression<Mlp>();
  training.make = [&, make = training.make] {
    const std::lock_guard lock(making);
    return make();
  };
  for (c10::DeviceIndex device = 0; device < 2; ++device) {
    threads.emplace_back([&, device] {
      found[static_cast<size_t>(device)] = train(training, sgd(), fake_device(device));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Tensors& one : found) EXPECT_TRUE(same_bits(expected, one));
}

TEST_F(FakeAcceleratorTest, CopiesBetweenDevicesInOrder) {
  set_fake_delays(6, std::chrono::microseconds(200));
  const Tensor there = filled(1).add_(1).to(fake_device(1)).add_(1);
  EXPECT_TRUE(there.eq(3).all().item<bool>());
  EXPECT_EQ(there.device(), fake_device(1));
}

TEST_F(FakeAcceleratorTest, RefusesTensorsOfSeveralDevices) {
  const Tensor here = filled(1);
  EXPECT_THAT(error_of([&] { here + here.to(fake_device(1)); }), HasSubstr("fake:1"));
  EXPECT_THAT(error_of([&] { here + torch::ones({4}); }), HasSubstr("cpu"));
  EXPECT_TRUE((here + torch::tensor(1.0)).eq(2).all().item<bool>());
}

TEST_F(FakeAcceleratorTest, ReadsWhatTheHostHoldsWhenACopyIsCalled) {
  Tensor host = torch::ones({4});
  Tensor copied;
  {
    const HeldStream held(default_stream());
    copied = host.to(fake_device());
    host.fill_(9);
  }
  EXPECT_TRUE(copied.eq(1).all().item<bool>());
}

TEST_F(FakeAcceleratorTest, ReadsPinnedMemoryWhenTheStreamComesToIt) {
  Tensor host = torch::ones({4}, torch::TensorOptions().pinned_memory(true));
  EXPECT_TRUE(host.is_pinned());
  Tensor copied;
  {
    const HeldStream held(default_stream());
    copied = host.to(fake_device(), /*non_blocking=*/true);
    host.fill_(9);
  }
  EXPECT_TRUE(copied.eq(9).all().item<bool>());
}

// The copy of a pinned tensor that ends while the device's stream is held. share(memory): what is copied of it.
Tensor copy_of_freed_pinned(const std::function<Tensor(Tensor)>& share) {
  Tensor copied = torch::empty({8}, fake_device());
  Tensor next;
  {
    const HeldStream held(default_stream());
    {
      Tensor memory = torch::empty({1024}, torch::TensorOptions().pinned_memory(true));
      memory.fill_(1);
      copied.copy_(share(std::move(memory)), /*non_blocking=*/true);
    }
    next = torch::empty({1024}, torch::TensorOptions().pinned_memory(true));
  }
  return copied.cpu();
}

TEST_F(FakeAcceleratorTest, KeepsPinnedMemoryOfACopyThatItsCacheIsToldOf) {
  const Tensor ones = torch::ones({8});
  EXPECT_TRUE(torch::equal(copy_of_freed_pinned([](Tensor m) { return m.narrow(0, 0, 8); }), ones));
  EXPECT_TRUE(torch::equal(copy_of_freed_pinned([](Tensor m) { return m.narrow(0, 9, 8); }), ones));
  EXPECT_TRUE(torch::equal(copy_of_freed_pinned([](const Tensor& memory) {
                             return torch::from_blob(
                                 memory.data_ptr(), {8}, [memory](void*) {}, torch::kFloat);
                           }),
                           ones));
}

// It is told the context of the storage, and the address, which is not the block's.
TEST_F(FakeAcceleratorTest, GivesPinnedMemoryOutAgainUnderACopyThatItsCacheIsNotToldOf) {
  EXPECT_TRUE(is_nan(copy_of_freed_pinned([](const Tensor& memory) {
    return torch::from_blob(
        memory.data_ptr<float>() + 9, {8}, [memory](void*) {}, torch::kFloat);
  })));
}

TEST_F(FakeAcceleratorTest, CopiesToTheHostWithoutWaitingWhereAsked) {
  const Tensor x = filled(1);
  default_stream().synchronize();
  reset_fake_counters();
  Tensor host = torch::zeros({4}, torch::TensorOptions().pinned_memory(true));
  {
    const HeldStream held(default_stream());
    host.copy_(x, /*non_blocking=*/true);
    EXPECT_TRUE(host.eq(0).all().item<bool>());
  }
  EXPECT_EQ(fake_counters().host_syncs, 0);
  default_stream().synchronize();
  EXPECT_TRUE(host.eq(1).all().item<bool>());
}

TEST_F(FakeAcceleratorTest, CountsWhereTheHostWaits) {
  const Tensor x = filled(1);
  const auto syncs_of = [](const std::function<void()>& run) {
    reset_fake_counters();
    run();
    return fake_counters().host_syncs;
  };
  EXPECT_EQ(syncs_of([&] { (x * 2).add_(1).sum(); }), 0);
  EXPECT_EQ(syncs_of([&] { x[0].item<float>(); }), 1);
  EXPECT_EQ(syncs_of([&] { x.cpu(); }), 1);
  EXPECT_EQ(syncs_of([&] { torch::equal(x, x); }), 1);
  EXPECT_EQ(syncs_of([&] { x.nonzero(); }), 1);
  EXPECT_EQ(syncs_of([&] { default_stream().synchronize(); }), 1);
  EXPECT_EQ(syncs_of([&] {
              c10::Event event(c10::DeviceType::PrivateUse1);
              event.record(default_stream());
              event.synchronize();
            }),
            1);
  EXPECT_EQ(syncs_of([&] { guard().synchronizeDevice(0); }), 0);
  EXPECT_EQ(fake_counters().device_syncs, 1);
}

TEST_F(FakeAcceleratorTest, CountsLaunchesAndBytesThatGoToTheHost) {
  const Tensor x = filled(1);
  reset_fake_counters();
  x.add_(1).add_(1).narrow(0, 0, 2).mul_(2);
  EXPECT_EQ(fake_counters().launches, 3);
  EXPECT_EQ(fake_launches()["aten::add.out"], 2);
  EXPECT_EQ(fake_counters().bytes_to_host, 0);
  x.cpu();
  EXPECT_EQ(fake_launches()["aten::copy_"], 1);
  EXPECT_EQ(fake_counters().bytes_to_host, 16);
  x[0].item<float>();
  EXPECT_EQ(fake_counters().bytes_to_host, 20);
  x.copy_(torch::ones({4}));
  EXPECT_EQ(fake_launches()["aten::copy_"], 2);
  EXPECT_EQ(fake_counters().bytes_to_host, 20);
  reset_fake_counters();
  EXPECT_TRUE(fake_launches().empty());
}

TEST_F(FakeAcceleratorTest, ThrowsATasksErrorWhereTheHostWaits) {
  const Tensor weights = filled(1).view({2, 2});
  const Tensor rows = torch::embedding(weights, torch::tensor({7}).to(fake_device()));
  EXPECT_THAT(error_of([] { default_stream().synchronize(); }),
              AllOf(HasSubstr("fake:0: aten::index_select"), HasSubstr("index out of range")));
  EXPECT_EQ(error_of([] { default_stream().synchronize(); }), "");
}

TEST_F(FakeAcceleratorTest, RefusesWrongSizesWhenCalled) {
  const Tensor x = filled(1);
  EXPECT_THAT(error_of([&] {
                torch::mm(x.view({2, 2}), x.view({4, 1}));
              }),
              HasSubstr("cannot be multiplied"));
}

TEST_F(FakeAcceleratorTest, CountsBytesAndKeepsToALimit) {
  const int64_t before = fake_memory(2).current_bytes;
  int64_t observed = 0;
  set_fake_memory_observer([&](bool allocated, void*, size_t bytes, int device) {
    EXPECT_EQ(device, 2);
    observed += allocated ? static_cast<int64_t>(bytes) : -static_cast<int64_t>(bytes);
  });
  reset_fake_peak(2);
  {
    const Tensor x = torch::empty({1000}, fake_device(2));
    EXPECT_EQ(fake_memory(2).current_bytes - before, 4096);
    EXPECT_EQ(observed, 4096);
    set_fake_memory_limit(2, before + 8192);
    EXPECT_THROW(torch::empty({1025}, fake_device(2)), c10::OutOfMemoryError);
    EXPECT_THAT(error_of([] { torch::empty({1025}, fake_device(2)); }),
                HasSubstr("fake:2 is out of memory: 4.5 KiB were asked for, 4.0 KiB of 8.0 KiB"));
    const Tensor fits = torch::empty({1024}, fake_device(2));
  }
  set_fake_memory_limit(2, 0);
  EXPECT_EQ(fake_memory(2).current_bytes, before);
  EXPECT_EQ(fake_memory(2).peak_bytes - before, 8192);
  EXPECT_EQ(observed, 0);
  set_fake_memory_observer(nullptr);
}

TEST_F(FakeAcceleratorTest, ResizesAndViews) {
  Tensor x = filled(3);
  {
    const HeldStream held(default_stream());
    x.fill_(3).resize_({8});
  }
  EXPECT_TRUE(x.slice(0, 0, 4).eq(3).all().item<bool>());
  EXPECT_EQ(x.view({2, 4}).t().unfold(0, 2, 2).sizes(), at::IntArrayRef({2, 2, 2}));
  Tensor y = torch::empty({0}, fake_device());
  y.set_(x.storage(), 1, {2}, {1});
  EXPECT_TRUE(y.eq(3).all().item<bool>());
  y.set_();
  EXPECT_EQ(y.numel(), 0);
  EXPECT_EQ(y.device(), fake_device());
}

TEST_F(FakeAcceleratorTest, DrawsTheNumbersOfTheCpu) {
  torch::manual_seed(7);
  const Tensor expected = torch::randn({9}) + torch::rand({9});
  torch::manual_seed(7);
  const Tensor drawn = torch::randn({9}, fake_device()) + torch::rand({9}, fake_device());
  EXPECT_TRUE(torch::equal(drawn.cpu(), expected));
}

TEST_F(FakeAcceleratorTest, TimesEvents) {
  c10::Event begin(c10::DeviceType::PrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(c10::DeviceType::PrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  begin.record(default_stream());
  end.record(default_stream());
  end.synchronize();
  EXPECT_TRUE(end.query());
  EXPECT_GE(begin.elapsedTime(end), 0.0);
}

}  // namespace
}  // namespace zeropage::testing::fake_accelerator_test
