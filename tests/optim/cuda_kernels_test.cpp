// The kernels of CUDA against the loops of the CPU: the same bits.
#include <cmath>

#include <gtest/gtest.h>

#include "optim/flat_norm.h"
#include "optim/fused_step.h"
#include "optim/norm_table.h"
#include "optim/stochastic_rounding.h"
#include "tests/harness/needs_cuda.h"
#include "tests/optim/step_cases.h"

namespace zeropage::optim::cuda_kernels_test {
namespace {

using namespace zeropage::testing;

Stretch on_cuda(const Stretch& stretch) {
  return map(stretch, [](const torch::Tensor& tensor) { return tensor.to(at::kCUDA); });
}

// The same elements at an address that no vector load can take: each buffer begins `shift`
// elements into another.
torch::Tensor shifted(const torch::Tensor& tensor, int64_t shift) {
  const auto all = torch::zeros({tensor.numel() + shift}, tensor.options());
  const auto part = all.narrow(0, shift, tensor.numel());
  part.copy_(tensor);
  return part;
}

class CudaFusedStepTest : public NeedsCuda<EveryStepCaseTest> {
 protected:
  // Three steps on the CPU and on CUDA from the same beginning.
  void expect_the_same_bits(const Stretch& before, const Stretch& at_device,
                            const GradientFactors& factors = {}) {
    const auto expected = copy_of(before);
    for (int64_t number = 1; number <= 3; ++number) {
      step(options(), number, expected, factors);
      step(options(), number, at_device, factors);
    }
    EXPECT_TRUE(same_bits_of(expected, at_device));
  }
};

TEST_F(CudaFusedStepTest, HasTheCpusBitsInEveryDtype) {
  for_each_case([&] {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const auto copy : {at::ScalarType::Undefined, at::kBFloat16, at::kHalf}) {
        SCOPED_TRACE(c10::str(dtype, " ", copy));
        const auto before = random_stretch(options(), 1 << 16, dtype, copy);
        expect_the_same_bits(before, on_cuda(before), {.scale = 0.7});
      }
    }
  });
}

TEST_F(CudaFusedStepTest, HasThemAtAnyNumel) {
  for_each_case([&] {
    for (const int64_t numel : {0, 1, 3, 4, 5, 1023, 2048, 2049, 100003}) {
      SCOPED_TRACE(numel);
      const auto before = random_stretch(options(), numel, at::kBFloat16, at::kBFloat16);
      expect_the_same_bits(before, on_cuda(before));
    }
  });
}

TEST_F(CudaFusedStepTest, HasThemAtAnyAlignment) {
  for_each_case([&] {
    const auto before = random_stretch(options(), 5003, at::kHalf, at::kBFloat16);
    for (int64_t shift = 1; shift < 8; ++shift) {
      SCOPED_TRACE(shift);
      const auto device = on_cuda(before);
      expect_the_same_bits(
          before, map(device, [&](const torch::Tensor& tensor) { return shifted(tensor, shift); }));
      auto uneven = on_cuda(before);
      uneven.gradient = shifted(uneven.gradient, shift);
      expect_the_same_bits(before, uneven);
    }
  });
}

TEST_F(CudaFusedStepTest, HasThemOnASliceAndLeavesItsNeighbours) {
  for_each_case([&] {
    const auto before = random_stretch(options(), 3000);
    const auto device = on_cuda(before);
    const auto expected = copy_of(before);
    step(options(), 2, narrow(expected, 1, 2001));
    const auto part = [](const torch::Tensor& tensor) { return tensor.narrow(0, 1, 2001); };
    step(options(), 2, map(device, part));
    EXPECT_TRUE(same_bits_of(expected, device));
  });
}

TEST_F(CudaFusedStepTest, ChangesNothingWhenAnInfinityWasFound) {
  for_each_case([&] {
    const auto before = random_stretch(options(), 5000, at::kHalf, at::kBFloat16);
    const auto device = on_cuda(before);
    step(options(), 2, device, {.found_inf = torch::ones({1}, at::kCUDA)});
    EXPECT_TRUE(same_bits_of(before, device));
    step(options(), 2, device, {.found_inf = torch::zeros({1}, at::kCUDA)});
    EXPECT_FALSE(same_bits_of(before, device));
  });
}

TEST_F(CudaFusedStepTest, ZeroesTheGradientAlsoWhenAnInfinityWasFound) {
  for_each_case([&] {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int64_t shift : {0, 3}) {
        const auto before = random_stretch(options(), 5003, dtype, at::kBFloat16);
        const auto at_device = map(
            on_cuda(before), [&](const torch::Tensor& tensor) { return shifted(tensor, shift); });
        const auto found_inf = torch::ones({1}, at::kCUDA);
        step(options(), 2, at_device, {.found_inf = found_inf, .after = GradientAfter::kZeroed});
        EXPECT_TRUE(same_bits_of(before, at_device));
        EXPECT_FALSE(at_device.gradient.any().item<bool>());
        at_device.gradient.copy_(before.gradient);
        const auto expected = copy_of(before);
        step(options(), 2, expected);
        step(options(), 2, at_device, {.after = GradientAfter::kZeroed});
        EXPECT_TRUE(same_bits_of(expected, at_device));
        EXPECT_FALSE(at_device.gradient.any().item<bool>());
      }
    }
  });
}

class CudaFlatNormTest : public NeedsCuda<::testing::TestWithParam<at::ScalarType>> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, CudaFlatNormTest,
                         ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(CudaFlatNormTest, FindsAnInfinityOrNanWhereverItIs) {
  const auto flat = random_numbers(67, 1).to(GetParam()).to(at::kCUDA);
  EXPECT_EQ(found_inf(flat).item<float>(), 0);
  for (int64_t i = 0; i < flat.numel(); ++i) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      auto spoiled = flat.clone();
      spoiled[i] = bad;
      EXPECT_EQ(found_inf(spoiled).item<float>(), 1) << bad << " at " << i;
      EXPECT_EQ(found_inf(shifted(spoiled, 1)).item<float>(), 1) << bad << " at " << i;
      EXPECT_EQ(found_inf(spoiled.narrow(0, 0, i)).item<float>(), 0);
    }
  }
}

TEST_P(CudaFlatNormTest, HasTheCpusExactSumsAndFlagsOfManyParts) {
  constexpr int64_t kNumel = 3000001;
  auto flat = random_numbers(kNumel, 1).to(GetParam());
  std::vector<NormPart> parts;
  for (int64_t begin = 0, flag = 0; begin < kNumel; ++flag) {
    const int64_t numel = std::min(kNumel - begin, 1 + flag * flag * 37 % 50000);
    parts.push_back({.begin = begin, .numel = numel, .sum = flag % 3, .flag = flag});
    begin += numel + flag % 5;
  }
  const NormSizes sizes{.sums = 3, .flags = static_cast<int64_t>(parts.size())};
  const NormTable here(parts, sizes, at::kCPU);
  const NormTable there(parts, sizes, c10::Device(at::kCUDA, 0));
  for (const double bad : {0.0, double{INFINITY}, -double{INFINITY}, double{NAN}}) {
    if (bad != 0) flat[kNumel / 2] = bad;
    const auto expected = sizes.make_words(at::kCPU);
    here.add_squares(flat, expected);
    const auto words = sizes.make_words(c10::Device(at::kCUDA, 0));
    there.add_squares(shifted(flat.to(at::kCUDA), 1), words);
    const auto on_host = words.cpu();
    const auto* const first = on_host.const_data_ptr<int64_t>();
    const auto* const expected_first = expected.const_data_ptr<int64_t>();
    for (int64_t sum = 0; sum < sizes.sums; ++sum) {
      EXPECT_EQ(sizes.sum(first, sum).words(), sizes.sum(expected_first, sum).words()) << bad;
    }
    for (int64_t flag = 0; flag < sizes.flags; ++flag) {
      EXPECT_EQ(sizes.flag(first, flag), sizes.flag(expected_first, flag)) << flag;
    }
  }
}

class CudaStochasticRoundingTest : public NeedsCuda<::testing::Test> {
 protected:
  // `shift` elements into buffers of their own.
  static void expect_the_cpus_bits(const torch::Tensor& from, const RoundingPlace& place,
                                   int64_t from_shift = 0, int64_t to_shift = 0) {
    const auto expected = torch::empty_like(from, at::kBFloat16);
    round_stochastically(from, expected, place);
    const auto to = shifted(torch::empty_like(expected, at::kCUDA), to_shift);
    round_stochastically(shifted(from.to(at::kCUDA), from_shift), to, place);
    EXPECT_TRUE(same_bits_of(expected, to)) << place.first_element;
  }
};

TEST_F(CudaStochasticRoundingTest, HasTheCpusBitsAtAnyNumelAndPlace) {
  for (const int64_t numel : {0, 1, 7, 8, 9, 2048, 100003}) {
    for (const int64_t first : {0L, 3L, 8L, (8L << 32) - 12, (1L << 51) - 100003}) {
      expect_the_cpus_bits(
          random_numbers(numel, 1),
          {.seed = ~0ULL, .step = (1ULL << 48) - 1, .tensor = 0xffffffff, .first_element = first});
    }
  }
}

TEST_F(CudaStochasticRoundingTest, HasThemAtAnyAlignment) {
  const auto from = random_numbers(5003, 1);
  for (int64_t shift = 0; shift < 8; ++shift) {
    expect_the_cpus_bits(from, {.seed = 1, .first_element = shift}, shift, shift);
    expect_the_cpus_bits(from, {.seed = 1, .first_element = 3}, shift, 0);
    expect_the_cpus_bits(from, {.seed = 1, .first_element = 3}, 1, shift);
  }
}

TEST_F(CudaStochasticRoundingTest, HasThemForEveryUpperHalf) {
  const auto high = torch::arange(-32768, 32768, at::kInt).mul(65536);
  for (const int64_t low : {0x0000, 0x0001, 0x8000, 0xffff}) {
    expect_the_cpus_bits(high.add(low).view(at::kFloat), {.seed = 2});
  }
}

class CudaCopyOutTest : public NeedsCuda<::testing::Test> {};

TEST_F(CudaCopyOutTest, RoundsEveryBitPatternAsTheCpuDoes) {
  // Every upper half of fp32, with a lower half that is a tie, is next to one, or is neither.
  const auto high = torch::arange(-32768, 32768, at::kInt).mul(65536);
  for (const int64_t low : {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001}) {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      Stretch stretch{.values = high.add(low).view(at::kFloat)};
      stretch.gradient = torch::zeros_like(stretch.values);
      stretch.copy_out = torch::empty_like(stretch.values, dtype);
      const auto device = on_cuda(stretch);
      fused_step(torch::optim::SGDOptions(0.0), 1, stretch);
      fused_step(torch::optim::SGDOptions(0.0), 1, device);
      EXPECT_TRUE(same_bits_but_of_nans(stretch.copy_out, device.copy_out)) << low;
    }
  }
}

}  // namespace
}  // namespace zeropage::optim::cuda_kernels_test
