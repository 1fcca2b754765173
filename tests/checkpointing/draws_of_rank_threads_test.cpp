// Ranks that are threads draw from one generator. What backward computes again has the forward's numbers, whatever other threads drew
// meanwhile.
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "zeropage/checkpoint.h"
#include "zeropage/recompute.h"

namespace zeropage::draws_of_rank_threads_test {
namespace {

using checkpointing::ActivationScope;
using checkpointing::checkpoint;
using checkpointing::Recompute;
using checkpointing::RecomputeOptions;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_ranks;
using torch::Tensor;

// A draw from the process's generator by a thread that is not this rank's, at this very moment.
void another_thread_draws() {
  std::jthread([] { torch::rand({5}); });
}

// ---- an operator that draws ----

struct Drawing {
  std::string name;
  std::function<Tensor(const Tensor&)> of;  // multiplies by random numbers
};

std::vector<Drawing> drawings() {
  const auto generator = [] { return at::detail::getDefaultCPUGenerator(); };
  return {
      {"dropout", [](const Tensor& x) { return torch::dropout(x, 0.5, true); }},
      {"dropout_",
       [](const Tensor& x) {
         Tensor y = x * 1;
         return torch::dropout_(y, 0.5, true);
       }},
      {"feature_dropout", [](const Tensor& x) { return torch::feature_dropout(x, 0.5, true); }},
      {"native_dropout",
       [](const Tensor& x) { return std::get<0>(at::native_dropout(x, 0.5, true)); }},
      {"bernoulli", [](const Tensor& x) { return x * torch::bernoulli(torch::full_like(x, 0.5)); }},
      {"rand", [](const Tensor& x) { return x * torch::rand(x.sizes()); }},
      {"rand_like", [](const Tensor& x) { return x * torch::rand_like(x); }},
      {"randn", [](const Tensor& x) { return x * torch::randn(x.sizes()); }},
      {"randint_like", [](const Tensor& x) { return x * torch::randint_like(x, 1, 100); }},
      {"randperm", [](const Tensor& x) { return x * (1 + torch::randperm(x.size(-1))); }},
      {"normal_", [](const Tensor& x) { return x * torch::empty_like(x).normal_(); }},
      {"rrelu", [](const Tensor& x) { return torch::rrelu(-x, 0.1, 0.9, true); }},
      {"multinomial",
       [](const Tensor& x) {
         return x * (1 + torch::multinomial(torch::ones({x.size(-1)}), x.size(-1), true));
       }},
      {"the default generator, given",
       [generator](const Tensor& x) { return x * torch::rand(x.sizes(), generator()); }},
  };
}

// What it multiplied x by, and the gradient of the sum, which is the same where backward repeated its numbers.
std::pair<Tensor, Tensor> factors_and_gradient(
    const std::function<Tensor(const Tensor&)>& forward) {
  const Tensor x = torch::ones({8, 32}).requires_grad_();
  const Tensor y = forward(x);
  another_thread_draws();
  y.sum().backward();
  return {y.detach(), x.grad()};
}

Tensor several_times(const Drawing& drawing, Tensor x) {
  for (int time = 0; time < 3; ++time) {
    x = drawing.of(x.square());
    another_thread_draws();
  }
  return x;
}

class DrawsOfRankThreadsTest : public ::testing::TestWithParam<int> {
 protected:
  // On all ranks at once.
  static void on_ranks(const std::function<void(comm::World&)>& run) { run_ranks(GetParam(), run); }
};

TEST_P(DrawsOfRankThreadsTest, ARegionRepeatsTheNumbersOfEachOperator) {
  on_ranks([](comm::World&) {
    for (const Drawing& drawing : drawings()) {
      for (int time = 0; time < 5; ++time) {
        const auto [factors, gradient] =
            factors_and_gradient([&](const Tensor& x) { return checkpoint(drawing.of, x); });
        EXPECT_TRUE(torch::equal(factors, gradient)) << drawing.name;
        EXPECT_FALSE(torch::equal(factors.max(), factors.min())) << drawing.name;
      }
    }
  });
}

TEST_P(DrawsOfRankThreadsTest, ARegionOfSeveralDrawsHasTheValuesOfItsFirstRun) {
  on_ranks([](comm::World&) {
    for (const Drawing& drawing : drawings()) {
      factors_and_gradient([&](const Tensor& x) {
        return checkpoint(
            {.check = checkpointing::RecomputeCheck::kValues},
            [&](const Tensor& t) { return several_times(drawing, t); }, x);
      });
    }
  });
}

TEST_P(DrawsOfRankThreadsTest, RegionsInRegionsHaveTheValuesOfTheirFirstRun) {
  on_ranks([](comm::World&) {
    const checkpointing::CheckpointOptions checked{.check = checkpointing::RecomputeCheck::kValues};
    for (const Drawing& drawing : drawings()) {
      const auto inner = [&](const Tensor& t) {
        const Tensor before = drawing.of(t);
        return drawing.of(checkpoint(
            checked, [&](const Tensor& u) { return several_times(drawing, u); }, before));
      };
      for (int time = 0; time < 2; ++time) {
        factors_and_gradient([&](const Tensor& x) { return checkpoint(checked, inner, x); });
      }
    }
  });
}

TEST_P(DrawsOfRankThreadsTest, ALayerWithDropoutInsideHasTheValuesOfItsFirstRun) {
  on_ranks([](comm::World&) {
    const checkpointing::CheckpointOptions checked{.check = checkpointing::RecomputeCheck::kValues};
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(6, 8).num_layers(3).dropout(0.4));
    torch::nn::TransformerEncoderLayer encoder(
        torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.4));
    const Tensor x = torch::linspace(-1, 1, 5 * 3 * 6).view({5, 3, 6}).requires_grad_();
    const Tensor y = checkpoint(
        checked,
        [&](const Tensor& t) {
          another_thread_draws();
          const Tensor hidden = encoder(std::get<0>(lstm(t)));
          another_thread_draws();
          return at::scaled_dot_product_attention(hidden, hidden, hidden, {}, 0.3);
        },
        x);
    y.square().sum().backward();
    EXPECT_TRUE(x.grad().defined());
  });
}

TEST_P(DrawsOfRankThreadsTest, ARecomputedOperatorRepeatsItsNumbers) {
  on_ranks([](comm::World&) {
    for (const Drawing& drawing : drawings()) {
      Recompute recompute({.least_bytes = 0});
      for (int time = 0; time < 5; ++time) {
        const auto [factors, gradient] = factors_and_gradient([&](const Tensor& x) {
          const ActivationScope scope(recompute);
          return drawing.of(x);
        });
        EXPECT_TRUE(torch::equal(factors, gradient)) << drawing.name;
      }
    }
  });
}

// The gradient of x, for which the numbers that `drawing` drew were noted, against one that has them as constants.
void expect_the_gradient_of_what_was_drawn(Recompute& recompute, const Drawing& drawing) {
  const Tensor x = torch::linspace(-1, 1, 64 * 64).view({64, 64}).requires_grad_();
  std::vector<Tensor> drawn;
  const auto forward = [&](Tensor y, const auto& factors_of) {
    for (int layer = 0; layer < 4; ++layer) {
      y = torch::tanh(y);
      y = y * factors_of(y);
      another_thread_draws();
    }
    return y.square().sum();
  };
  Tensor loss;
  {
    const ActivationScope scope(recompute);
    loss = forward(x, [&](const Tensor& y) {
      const Tensor factors = drawing.of(torch::ones_like(y));
      drawn.push_back(factors.clone());
      return factors;
    });
  }
  another_thread_draws();
  loss.backward();
  const Tensor plain_x = x.detach().clone().requires_grad_();
  size_t layer = 0;
  forward(plain_x, [&](const Tensor&) { return drawn[layer++]; }).backward();
  EXPECT_TRUE(torch::equal(x.grad(), plain_x.grad())) << drawing.name;
}

TEST_P(DrawsOfRankThreadsTest, ABudgetOfRecomputeChangesNoGradient) {
  on_ranks([](comm::World&) {
    for (const Drawing& drawing : drawings()) {
      for (const int64_t kib : {120, 160, 1000}) {
        auto options = RecomputeOptions::budget(kib * 1024);
        options.least_bytes = 0;
        Recompute recompute(options);
        const std::string refusal = error_of([&] {
          for (int step = 0; step < 3; ++step) {
            expect_the_gradient_of_what_was_drawn(recompute, drawing);
          }
        });
        if (!refusal.empty()) {
          EXPECT_THAT(refusal, HasSubstr("raise the budget"));
        }
      }
    }
  });
}

TEST_P(DrawsOfRankThreadsTest, RecomputeInARegionHasTheNumbersOfTheRegion) {
  on_ranks([](comm::World&) {
    for (const Drawing& drawing : drawings()) {
      Recompute recompute({.least_bytes = 0});
      const auto [factors, gradient] = factors_and_gradient([&](const Tensor& x) {
        return checkpoint(
            [&](const Tensor& t) {
              const ActivationScope scope(recompute);
              return drawing.of(t);
            },
            x);
      });
      EXPECT_TRUE(torch::equal(factors, gradient)) << drawing.name;
    }
  });
}

TEST_P(DrawsOfRankThreadsTest, RetainedGraphsRepeatTheNumbersEachTime) {
  on_ranks([](comm::World&) {
    Recompute recompute({.least_bytes = 0});
    const auto dropout = [](const Tensor& x) { return torch::dropout(x, 0.5, true); };
    const Tensor x = torch::ones({8, 32}).requires_grad_();
    Tensor y = checkpoint(dropout, x);
    {
      const ActivationScope scope(recompute);
      y = dropout(y.square());
    }
    const Tensor first = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true)[0];
    another_thread_draws();
    EXPECT_TRUE(torch::equal(torch::autograd::grad({y.sum()}, {x})[0], first));
    EXPECT_TRUE(torch::equal((first != 0), (y.detach() != 0)));
  });
}

TEST_P(DrawsOfRankThreadsTest, AGeneratorOfTheRanksOwnDrawsAsWithoutARegion) {
  on_ranks([](comm::World& world) {
    const auto numbers = [&](const auto& run) {
      at::Generator own = at::detail::createCPUGenerator(static_cast<uint64_t>(world.rank()));
      const auto [factors, gradient] = factors_and_gradient([&](const Tensor& x) {
        return run([&](const Tensor& t) { return t * torch::rand(t.sizes(), own); }, x);
      });
      EXPECT_TRUE(torch::equal(factors, gradient));
      return torch::cat({factors.flatten(), torch::rand({3}, own)});
    };
    Recompute recompute({.least_bytes = 0});
    const Tensor plain = numbers([](const auto& draw, const Tensor& x) { return draw(x); });
    const Tensor in_region =
        numbers([](const auto& draw, const Tensor& x) { return checkpoint(draw, x); });
    const Tensor recomputed = numbers([&](const auto& draw, const Tensor& x) {
      const ActivationScope scope(recompute);
      return draw(x);
    });
    EXPECT_TRUE(torch::equal(in_region, plain));
    EXPECT_TRUE(torch::equal(recomputed, plain));
  });
}

TEST_P(DrawsOfRankThreadsTest, ARepetitionThatDrawsOtherwiseIsRefused) {
  on_ranks([](comm::World&) {
    bool again = false;
    const auto forward = [&](const Tensor& x) {
      return x.square() *
             (std::exchange(again, true) ? torch::randn(x.sizes()) : torch::rand(x.sizes()));
    };
    const Tensor x = torch::ones({4}).requires_grad_();
    const Tensor y = checkpoint({.name = "noisy"}, forward, x);
    EXPECT_THAT(
        error_of([&] { y.sum().backward(); }),
        HasSubstr(
            "region \"noisy\": the repetition draws random numbers by aten::randn, but the first "
            "run by aten::rand; a repetition must run the same operators"));
  });
}

// ---- operators of other libraries ----

Tensor noisy(const Tensor& x) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return x + static_cast<double>(generator.get<at::CPUGeneratorImpl>()->random() % 100);
}

TORCH_LIBRARY(zeropage_draws_test, library) {
  library.def("noisy(Tensor x) -> Tensor", {at::Tag::nondeterministic_seeded});
  library.impl("noisy", c10::DispatchKey::CPU, noisy);
}

Tensor call_noisy(const Tensor& x) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("zeropage_draws_test::noisy", "")
                                 .typed<Tensor(const Tensor&)>();
  return handle.call(x);
}

TEST_P(DrawsOfRankThreadsTest, AnOperatorOfAnotherLibraryThatDrawsByItselfIsRefused) {
  on_ranks([](comm::World&) {
    const Tensor x = torch::ones({4}).requires_grad_();
    const auto forward = [](const Tensor& t) { return t * call_noisy(t.detach()); };
    Recompute recompute({.least_bytes = 0});
    const auto message = HasSubstr(
        "zeropage_draws_test::noisy: it draws from the default generator, which ranks that are "
        "threads of one "
        "process share");
    EXPECT_THAT(error_of([&] { checkpoint(forward, x); }), message);
    EXPECT_THAT(error_of([&] {
                  const ActivationScope scope(recompute);
                  forward(x);
                }),
                message);
    EXPECT_EQ(error_of([&] { forward(x).sum().backward(); }), "") << "not to be repeated";
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DrawsOfRankThreadsTest, ::testing::Values(2, 4));

// ---- alone ----

TEST(DrawsOfOneRankTest, ARegionDrawsThePlainNumbersTwice) {
  run_ranks(1, [](comm::World&) {
    for (const Drawing& drawing : drawings()) {
      torch::manual_seed(3);
      const Tensor plain = drawing.of(torch::ones({8, 32}));
      torch::manual_seed(3);
      const Tensor x = torch::ones({8, 32}).requires_grad_();
      const Tensor y = checkpoint(drawing.of, x);
      EXPECT_TRUE(torch::equal(y.detach(), plain)) << drawing.name;
      y.sum().backward();
      EXPECT_TRUE(torch::equal(x.grad(), plain)) << drawing.name;
    }
  });
}

}  // namespace
}  // namespace zeropage::draws_of_rank_threads_test
