// Kernels that the host's compiler builds and runs: what they find there, and what is found in them.
#include <cstdint>
#include <cuda_runtime.h>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/cuda/launch.cuh"

namespace zeropage::testing::cuda_on_host_test {
namespace {

using lockstep::Order;
using optim::cuda::launch;
using optim::cuda::Launch;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr unsigned kAllLanes = 0xffffffffU;
constexpr Launch kOneWarp = {.what = "a kernel of a test", .blocks = 1, .threads = 32};

class CudaOnHostTest : public ::testing::Test {
 protected:
  void TearDown() override { cuda_on_host::device = {}; }

  static std::string error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const std::logic_error& error) {
      return error.what();
    }
    return "no error";
  }

  // A word of each lane, of a kernel that is given a lane's number.
  template <typename Kernel>
  static std::vector<unsigned> of_lanes(Kernel kernel) {
    std::vector<unsigned> words(32);
    launch(kOneWarp, kernel, words.data());
    return words;
  }
};

__global__ void __launch_bounds__(256) count_threads(unsigned* __restrict__ counts, int64_t numel) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < numel) counts[i] += gridDim.x;
}

TEST_F(CudaOnHostTest, RunsEachThreadOfEachBlockOnceInBothOrders) {
  for (const Order order : {Order::kForward, Order::kBackward}) {
    cuda_on_host::device.order = order;
    std::vector<unsigned> counts(1000);
    launch({.what = "counting", .blocks = 4}, count_threads, counts.data(), 1000);
    EXPECT_THAT(counts, Each(4U));
  }
}

__global__ void sum_of_lanes(unsigned* sums) {
  unsigned sum = threadIdx.x + 1;
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  sums[threadIdx.x] = sum;
}

__global__ void lane_below(unsigned* words) {
  words[threadIdx.x] = __shfl_up_sync(kAllLanes, threadIdx.x, 1);
}

__global__ void lane_above(unsigned* words) {
  words[threadIdx.x] = __shfl_down_sync(kAllLanes, threadIdx.x, 1);
}

__global__ void lane_seven(unsigned* words) {
  const double half = threadIdx.x + 0.5;
  words[threadIdx.x] = static_cast<unsigned>(2 * __shfl_sync(kAllLanes, half, 7));
}

TEST_F(CudaOnHostTest, ShufflesGiveWhatTheOtherLaneHas) {
  EXPECT_THAT(of_lanes(sum_of_lanes), Each(32U * 33 / 2));
  EXPECT_THAT(of_lanes(lane_seven), Each(15U));
  const auto below = of_lanes(lane_below);
  const auto above = of_lanes(lane_above);
  EXPECT_EQ(below[0], 0U);
  EXPECT_EQ(above[31], 31U);
  for (unsigned lane = 0; lane < 31; ++lane) {
    EXPECT_EQ(below[lane + 1], lane);
    EXPECT_EQ(above[lane], lane + 1);
  }
}

// Lanes 0 to 15 vote among themselves twice, the others once.
__global__ void votes_of_halves(unsigned* words) {
  const bool is_low = threadIdx.x < 16;
  const unsigned mask = is_low ? 0xffffU : 0xffff0000U;
  words[threadIdx.x] = __ballot_sync(mask, threadIdx.x % 2);
  if (is_low) words[threadIdx.x] += __reduce_max_sync(mask, threadIdx.x);
}

__global__ void votes(unsigned* words) {
  words[threadIdx.x] =
      __any_sync(kAllLanes, threadIdx.x == 31) + 2 * __any_sync(kAllLanes, threadIdx.x > 31) +
      4 * __all_sync(kAllLanes, threadIdx.x < 32) + 8 * __all_sync(kAllLanes, threadIdx.x != 3) +
      16 * __reduce_add_sync(kAllLanes, 1) +
      1024 * __reduce_or_sync(kAllLanes, 1U << threadIdx.x % 4);
}

TEST_F(CudaOnHostTest, VotesAreThoseOfTheMasksLanes) {
  const auto words = of_lanes(votes_of_halves);
  for (unsigned lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(words[lane], lane < 16 ? 0xaaaaU + 15 : 0xaaaa0000U);
  }
  EXPECT_THAT(of_lanes(votes), Each(1U + 4 + 16 * 32 + 1024 * 15));
}

template <bool kWaits>
__global__ void reverse(unsigned* words) {
  __shared__ unsigned of_block[64];
  of_block[threadIdx.x] = words[threadIdx.x];
  if (kWaits) __syncthreads();
  words[threadIdx.x] = of_block[63 - threadIdx.x];
}

template <bool kWaits>
std::vector<unsigned> reversed(Order order) {
  cuda_on_host::device.order = order;
  std::vector<unsigned> words(64);
  for (unsigned i = 0; i < 64; ++i) words[i] = i;
  launch({.what = "reversing", .blocks = 1, .threads = 64}, reverse<kWaits>, words.data());
  return words;
}

TEST_F(CudaOnHostTest, BarriersOrderWhatThreadsShareAndTheOrdersShowAForgottenOne) {
  const auto right = reversed<true>(Order::kForward);
  for (unsigned i = 0; i < 64; ++i) EXPECT_EQ(right[i], 63 - i);
  EXPECT_EQ(right, reversed<true>(Order::kBackward));
  EXPECT_NE(reversed<false>(Order::kForward), reversed<false>(Order::kBackward));
}

__global__ void add_all(unsigned long long* sum, unsigned* bits, unsigned* largest) {
  atomicAdd(sum, 1ULL << 33);
  atomicOr(bits, 1U << threadIdx.x % 8);
  atomicMax(largest, threadIdx.x);
}

TEST_F(CudaOnHostTest, AtomicsCountEveryThread) {
  unsigned long long sum = 1;
  unsigned bits = 0;
  unsigned largest = 0;
  launch({.what = "adding", .blocks = 3, .threads = 100}, add_all, &sum, &bits, &largest);
  EXPECT_EQ(sum, (300ULL << 33) + 1);
  EXPECT_EQ(bits, 0xffU);
  EXPECT_EQ(largest, 99U);
}

__global__ void twice(const uint4* from, uint4* to) {
  const uint4 words = from[threadIdx.x];
  __stwb(to + threadIdx.x, make_uint4(2 * words.x, 2 * words.y, 2 * words.z, 2 * words.w));
}

TEST_F(CudaOnHostTest, VectorsAreThoseOfCuda) {
  alignas(16) uint32_t from[] = {1, 2, 3, 4, 5, 6, 7, 8};
  alignas(16) uint32_t to[8] = {};
  launch({.what = "doubling", .blocks = 1, .threads = 2}, twice, reinterpret_cast<uint4*>(from),
         reinterpret_cast<uint4*>(to));
  EXPECT_THAT(to, ElementsAre(2, 4, 6, 8, 10, 12, 14, 16));
  EXPECT_EQ(alignof(uint4), 16U);
  EXPECT_EQ(alignof(float4), 16U);
  EXPECT_EQ(alignof(ushort4), 8U);
}

enum class Missing : uint8_t { kNothing, kBarrier, kShuffle, kVote, kOwnLane, kSource };

__global__ void miss(Missing missing, unsigned* words) {
  const bool is_last = threadIdx.x == blockDim.x - 1;
  if (!(is_last && missing == Missing::kShuffle)) {
    words[threadIdx.x] = __shfl_down_sync(kAllLanes, threadIdx.x, 1);
  }
  if (is_last && missing == Missing::kVote) return;
  __ballot_sync(kAllLanes, 1);
  if (missing == Missing::kOwnLane) __syncwarp(~(1U << threadIdx.x % 32));
  if (missing == Missing::kSource) __shfl_xor_sync(1U << threadIdx.x % 32, 1, 1);
  if (!(is_last && missing == Missing::kBarrier)) __syncthreads();
}

TEST_F(CudaOnHostTest, NamesTheThreadThatMissesWhatOthersWaitIn) {
  std::vector<unsigned> words(64);
  const auto error_with = [&](Missing missing, unsigned threads) {
    const Launch two = {.what = "missing", .blocks = 2, .threads = threads};
    return error_of([&] { launch(two, miss, missing, words.data()); });
  };
  EXPECT_EQ(error_with(Missing::kNothing, 64), "no error");
  EXPECT_EQ(error_with(Missing::kBarrier, 64),
            "block 0: thread 0 waits in __syncthreads for thread 63, which has ended");
  EXPECT_EQ(error_with(Missing::kVote, 64),
            "block 0: thread 32 waits in __ballot_sync of mask 4294967295 for thread 63, which has "
            "ended");
  EXPECT_EQ(error_with(Missing::kShuffle, 32),
            "block 0: thread 0 waits in __shfl_down_sync of mask 4294967295 for thread 31, which "
            "waits in __ballot_sync of mask 4294967295");
  EXPECT_THAT(error_with(Missing::kNothing, 40), HasSubstr("thread 40, which the block does not"));
  EXPECT_THAT(error_with(Missing::kOwnLane, 32), HasSubstr("does not have its own lane"));
  EXPECT_THAT(error_with(Missing::kSource, 32),
              HasSubstr("thread 0 in __shfl_xor_sync: it reads "
                        "lane 1, which its mask 1 does not have"));
  cuda_on_host::device.order = Order::kBackward;
  EXPECT_THAT(error_with(Missing::kBarrier, 64), HasSubstr("block 1: thread 0"));
  // What threw does not stay.
  EXPECT_EQ(error_with(Missing::kNothing, 64), "no error");
}

TEST_F(CudaOnHostTest, LaunchesThatFailSayWhatAndWhy) {
  std::string words;
  try {
    launch({.what = "a kernel of a test", .blocks = 0}, count_threads, nullptr, 0);
  } catch (const std::runtime_error& error) {
    words = error.what();
  }
  EXPECT_THAT(words, AllOf(HasSubstr("a kernel of a test failed with"),
                           HasSubstr("cudaErrorInvalidConfiguration, invalid configuration")));
}

TEST_F(CudaOnHostTest, GridsAreAsLargeAsTheProcessorsSay) {
  EXPECT_EQ(optim::cuda::blocks_for(1000000, 256), 64U);
  cuda_on_host::device.processors = 2;
  EXPECT_EQ(optim::cuda::blocks_for(1000000, 256), 128U);
  EXPECT_EQ(optim::cuda::blocks_for(257, 256), 2U);
}

}  // namespace
}  // namespace zeropage::testing::cuda_on_host_test
