// The kernels of CUDA, run on the host, against the loops of the CPU: the same bits.
#include <cmath>
#include <cstdint>
#include <cuda_runtime.h>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "optim/cpu/fused_step.h"
#include "optim/cpu/packed_step.h"
#include "optim/cpu/stochastic_rounding.h"
#include "optim/cuda/bit_hashes.h"
#include "optim/cuda/block_hashes.h"
#include "optim/cuda/fused_step.h"
#include "optim/cuda/packed_step.h"
#include "optim/cuda/stochastic_rounding.h"
#include "tests/optim/host_stretches.h"

namespace zeropage::optim::kernels_on_host_test {
namespace {

using namespace zeropage::testing;
using lockstep::Order;
using optim::cpu::Instructions;

constexpr StateFormat kFormats[] = {StateFormat::kFp32, StateFormat::kBf16, StateFormat::k8Bit};
constexpr Precision kPrecisions[] = {Precision::kFloat, Precision::kBFloat16, Precision::kHalf};
constexpr int64_t kAfter4GiBlocks = (int64_t{8} << 32) - 16;

class KernelsOnHost : public ::testing::Test {
 protected:
  void TearDown() override { cuda_on_host::device = {}; }
};

class CudaFusedStepOnHostTest : public KernelsOnHost {
 protected:
  static void expect_the_cpus_bits(const StretchCase& of) {
    for (const NamedRule& named : all_rules()) {
      SCOPED_TRACE(::testing::Message() << named.name << ", " << of);
      HostStretch expected(of);
      HostStretch actual(of);
      optim::cpu::fused_step(named.rule, expected.flat(), 0, of.numel, Instructions::kAnyProcessor);
      optim::cuda::fused_step(named.rule, actual.flat(), nullptr);
      EXPECT_TRUE(expected.is_same(actual));
    }
  }
};

TEST_F(CudaFusedStepOnHostTest, HasTheCpusBitsInEveryPrecision) {
  for (const Precision gradient : kPrecisions) {
    expect_the_cpus_bits({.numel = 2100, .gradient = gradient});
    for (const Precision copy : {Precision::kBFloat16, Precision::kHalf}) {
      expect_the_cpus_bits({.numel = 2100, .gradient = gradient, .copy = copy});
    }
  }
}

TEST_F(CudaFusedStepOnHostTest, AdoptsWhatWasWrittenToTheCopy) {
  for (const Precision copy : {Precision::kBFloat16, Precision::kHalf}) {
    for (const Precision gradient : kPrecisions) {
      expect_the_cpus_bits(
          {.numel = 2100, .gradient = gradient, .copy = copy, .adopts_copy = true});
    }
    expect_the_cpus_bits({.numel = 77, .copy = copy, .adopts_copy = true, .copy_shift = 3});
  }
}

TEST_F(CudaFusedStepOnHostTest, HasThemAtAnyNumelAndAlignment) {
  for (const int64_t numel : {0, 1, 3, 7, 8, 9, 15, 16, 17, 257, 4099}) {
    expect_the_cpus_bits({.numel = numel, .gradient = Precision::kBFloat16});
    expect_the_cpus_bits({.numel = numel});
  }
  for (int64_t shift = 1; shift <= 8; ++shift) {
    expect_the_cpus_bits({.numel = 77, .shift = shift});
    expect_the_cpus_bits(
        {.numel = 77, .gradient = Precision::kHalf, .copy = Precision::kBFloat16, .shift = shift});
    expect_the_cpus_bits({.numel = 77, .gradient = Precision::kBFloat16, .gradient_shift = shift});
  }
}

TEST_F(CudaFusedStepOnHostTest, HasThemWhereOneBufferLiesUnlikeTheOthers) {
  for (const Precision gradient : {Precision::kFloat, Precision::kHalf}) {
    const auto expect = [&](StretchCase of) {
      of.gradient = gradient;
      of.numel = 77;
      expect_the_cpus_bits(of);
    };
    expect({.gradient_shift = 1});
    expect({.values_shift = 2});
    expect({.second_state_shift = 3});
    expect({.copy = Precision::kBFloat16, .copy_shift = 4});
  }
}

TEST_F(CudaFusedStepOnHostTest, HasThemWhereAThreadGoesRoundMoreThanOnce) {
  for (const Order order : {Order::kForward, Order::kBackward}) {
    cuda_on_host::device.order = order;
    expect_the_cpus_bits({.numel = 140003, .gradient = Precision::kBFloat16, .shift = 3});
    expect_the_cpus_bits({.numel = 140003, .gradient_shift = 1});
  }
}

TEST_F(CudaFusedStepOnHostTest, ZeroesTheGradientAndMakesNoStepAfterAnInfinity) {
  for (const Precision gradient : kPrecisions) {
    for (const float found_inf : {0.0F, 1.0F}) {
      expect_the_cpus_bits(
          {.gradient = gradient, .shift = 3, .zeroes_gradient = true, .found_inf = found_inf});
      expect_the_cpus_bits({.gradient = gradient, .found_inf = found_inf});
    }
  }
}

// Stretches with memory of their own, as a list.
class CudaFusedPiecesOnHostTest : public KernelsOnHost {
 protected:
  // With a table that was prepared, or with pieces that go along with launches.
  static void update_on_device(const UpdateRule& rule, std::vector<HostStretch>& stretches,
                               bool is_prepared) {
    std::vector<ListedPiece> pieces;
    std::vector<int32_t> piece_of_tile;
    const FlatStretch first = stretches.front().flat();
    for (HostStretch& stretch : stretches) {
      ListedPiece piece = piece_behind(first, stretch.flat());
      piece.first_tile = static_cast<int64_t>(piece_of_tile.size());
      piece_of_tile.insert(piece_of_tile.end(), static_cast<size_t>(tiles_of(piece.numel)),
                           static_cast<int32_t>(pieces.size()));
      pieces.push_back(piece);
    }
    if (!is_prepared) return optim::cuda::fused_step_of_pieces(rule, first, pieces, nullptr);
    const PieceList list{.pieces = pieces.data(),
                         .piece_of_tile = piece_of_tile.data(),
                         .tiles = static_cast<int64_t>(piece_of_tile.size())};
    optim::cuda::fused_step_of_pieces(rule, first, list, nullptr);
  }

  // The cases differ in their numel and in where they lie.
  static void expect_the_cpus_bits(const std::vector<StretchCase>& cases) {
    for (const NamedRule& named : all_rules()) {
      std::vector<HostStretch> expected(cases.begin(), cases.end());
      for (HostStretch& stretch : expected) {
        const FlatStretch flat = stretch.flat();
        optim::cpu::fused_step(named.rule, flat, 0, flat.numel, Instructions::kAnyProcessor);
      }
      for (const bool is_prepared : {false, true}) {
        std::vector<HostStretch> actual(cases.begin(), cases.end());
        update_on_device(named.rule, actual, is_prepared);
        for (size_t i = 0; i < cases.size(); ++i) {
          EXPECT_TRUE(expected[i].is_same(actual[i]))
              << named.name << ", " << i << ", " << is_prepared << ": " << cases[i];
        }
      }
    }
  }

  // Cases whose numels end within a group, a warp and a tile, or are none.
  static std::vector<StretchCase> of_many_numels(const StretchCase& alike) {
    std::vector<StretchCase> cases;
    for (const int64_t numel : {0, 1, 3, 7, 8, 9, 257, 1000, 2040, 2041, 2048, 2049, 5003}) {
      cases.push_back(alike);
      cases.back().numel = numel;
    }
    return cases;
  }
};

TEST_F(CudaFusedPiecesOnHostTest, HaveTheCpusBitsAtAnyNumelInEveryPrecision) {
  for (const Precision gradient : kPrecisions) {
    expect_the_cpus_bits(of_many_numels({.gradient = gradient}));
    for (const Precision copy : {Precision::kBFloat16, Precision::kHalf}) {
      expect_the_cpus_bits(of_many_numels({.gradient = gradient, .copy = copy}));
    }
  }
}

TEST_F(CudaFusedPiecesOnHostTest, HaveThemAtAnyAlignment) {
  for (const Precision gradient : {Precision::kFloat, Precision::kBFloat16}) {
    std::vector<StretchCase> cases;
    for (int64_t shift = 0; shift <= 8; ++shift) {
      for (const int64_t numel : {5, 77, 2047}) {
        cases.push_back({.numel = numel, .gradient = gradient, .shift = shift});
      }
    }
    expect_the_cpus_bits(cases);
    for (StretchCase& of : cases) of.copy = Precision::kHalf;
    expect_the_cpus_bits(cases);
  }
}

TEST_F(CudaFusedPiecesOnHostTest, HaveThemWhereOneBufferLiesUnlikeTheOthers) {
  for (const Precision gradient : {Precision::kFloat, Precision::kHalf}) {
    std::vector<StretchCase> cases;
    for (const int64_t numel : {5, 77, 3000}) {
      const StretchCase of{.numel = numel, .gradient = gradient, .copy = Precision::kBFloat16};
      cases.insert(cases.end(), 5, of);
      const size_t first = cases.size() - 5;
      cases[first].gradient_shift = 1;
      cases[first + 1].values_shift = 2;
      cases[first + 2].second_state_shift = 3;
      cases[first + 3].copy_shift = 4;
    }
    expect_the_cpus_bits(cases);
  }
}

TEST_F(CudaFusedPiecesOnHostTest, AdoptWhatWasWrittenToTheCopies) {
  for (const Precision copy : {Precision::kBFloat16, Precision::kHalf}) {
    expect_the_cpus_bits(of_many_numels({.copy = copy, .adopts_copy = true, .shift = 3}));
  }
}

TEST_F(CudaFusedPiecesOnHostTest, ZeroTheGradientsAndMakeNoStepAfterAnInfinity) {
  for (const Precision gradient : {Precision::kFloat, Precision::kBFloat16}) {
    for (const float found_inf : {0.0F, 1.0F}) {
      for (const int64_t shift : {0, 3}) {
        expect_the_cpus_bits(of_many_numels({.gradient = gradient,
                                             .gradient_shift = shift,
                                             .zeroes_gradient = true,
                                             .found_inf = found_inf}));
      }
      expect_the_cpus_bits(of_many_numels({.gradient = gradient, .found_inf = found_inf}));
    }
  }
}

TEST_F(CudaFusedPiecesOnHostTest, AreUpdatedInOneLaunchOrOneForEvery56) {
  constexpr size_t kPieces = 300;
  const auto launches = [&](bool is_prepared) {
    const std::vector<StretchCase> cases(kPieces, {.numel = 4});
    std::vector<HostStretch> stretches(cases.begin(), cases.end());
    const int before = cuda_on_host::device.launches;
    update_on_device(all_rules().front().rule, stretches, is_prepared);
    return cuda_on_host::device.launches - before;
  };
  EXPECT_EQ(launches(/*is_prepared=*/true), 1);
  EXPECT_EQ(launches(/*is_prepared=*/false), 6);
}

TEST_F(CudaFusedPiecesOnHostTest, HaveThemWhereThereAreMoreThanBlocks) {
  for (const Order order : {Order::kForward, Order::kBackward}) {
    cuda_on_host::device.order = order;
    expect_the_cpus_bits(
        std::vector<StretchCase>(150, {.numel = 4, .gradient = Precision::kBFloat16}));
  }
}

class CudaBitHashesOnHostTest : public KernelsOnHost {
 protected:
  using Bytes = std::vector<unsigned char>;

  // Each tensor's bytes begin `offset` behind an aligned address.
  static std::vector<uint64_t> hashes_of(const std::vector<Bytes>& tensors, size_t offset = 0) {
    std::vector<std::vector<uint64_t>> memory;  // aligned
    std::vector<HashedPiece> pieces;
    int64_t tiles = 0;
    for (const Bytes& bytes : tensors) {
      auto& of = memory.emplace_back((bytes.size() + offset) / sizeof(uint64_t) + 1, ~uint64_t{0});
      auto* const begin = reinterpret_cast<unsigned char*>(of.data()) + offset;
      std::copy(bytes.begin(), bytes.end(), begin);
      const auto count = static_cast<int64_t>(bytes.size());
      pieces.push_back({begin, count, tiles});
      tiles += hashed_tiles(count);
    }
    std::vector<uint64_t> hashes(tensors.size());
    optim::cuda::bit_hashes(pieces.data(), static_cast<int64_t>(pieces.size()), tiles,
                            hashes.data(), nullptr);
    return hashes;
  }
  static std::vector<Bytes> tensors_of(const std::vector<size_t>& sizes) {
    std::mt19937 random(1);
    std::vector<Bytes> tensors;
    for (const size_t size : sizes) {
      Bytes& bytes = tensors.emplace_back(size);
      for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    }
    return tensors;
  }
};

TEST_F(CudaBitHashesOnHostTest, DifferWhereABitOfATensorDoesAndNowhereElse) {
  constexpr size_t kTile = kHashedTileBytes;
  std::vector<Bytes> tensors = tensors_of({2, 0, 4098, 1, 3 * kTile + 6, 64, kTile, 0});
  const auto before = hashes_of(tensors);
  for (size_t changed = 0; changed < tensors.size(); ++changed) {
    Bytes& bytes = tensors[changed];
    const size_t apart = std::max<size_t>(1, bytes.size() / 5);
    for (size_t at = 0; at < bytes.size(); at += apart) {
      bytes[at] ^= 1U << at % 8;
      const auto after = hashes_of(tensors);
      for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
        ASSERT_EQ(before[tensor] != after[tensor], tensor == changed) << at << " of " << changed;
      }
      bytes[at] ^= 1U << at % 8;
    }
  }
  std::swap(tensors[4][4], tensors[4][kTile + 9]);
  EXPECT_NE(before[4], hashes_of(tensors)[4]) << "the order counts";
}

TEST_F(CudaBitHashesOnHostTest, AreOfTheBytesAlone) {
  const std::vector<Bytes> tensors = tensors_of({5, 40000, 2, 100000});
  const auto expected = hashes_of(tensors);
  for (const size_t offset : {1, 2, 4}) EXPECT_EQ(hashes_of(tensors, offset), expected) << offset;
  cuda_on_host::device.order = Order::kBackward;
  cuda_on_host::device.processors = 1;
  EXPECT_EQ(hashes_of(tensors), expected);
}

class CudaBlockHashesOnHostTest : public KernelsOnHost {
 protected:
  static std::vector<uint64_t> hashes_of(const std::vector<uint32_t>& words, int64_t block_words) {
    std::vector<uint64_t> hashes(words.size() / static_cast<size_t>(block_words));
    optim::cuda::block_hashes(words.data(), block_words, static_cast<int64_t>(hashes.size()),
                              hashes.data(), nullptr);
    return hashes;
  }
};

TEST_F(CudaBlockHashesOnHostTest, DifferWhereABitOfABlockDoesAndNowhereElse) {
  for (const int64_t block_words : {128, 256}) {
    std::vector<uint32_t> words(static_cast<size_t>(5 * block_words));
    std::mt19937 random(1);
    for (uint32_t& word : words) word = random();
    const auto before = hashes_of(words, block_words);
    for (size_t changed = 0; changed < words.size(); ++changed) {
      words[changed] ^= 1U << changed % 32;
      const auto after = hashes_of(words, block_words);
      for (size_t block = 0; block < before.size(); ++block) {
        const bool is_in_it = changed / static_cast<size_t>(block_words) == block;
        ASSERT_EQ(before[block] != after[block], is_in_it) << changed << " of " << block_words;
      }
      words[changed] ^= 1U << changed % 32;
    }
    std::swap(words[3], words[9]);
    EXPECT_NE(before[0], hashes_of(words, block_words)[0]) << "the order counts";
  }
}

class CudaPackedStepOnHostTest : public KernelsOnHost {
 protected:
  using Change = std::function<void(HostStretch&)>;

  static void expect_the_cpus_bits(const StretchCase& of, const Change& change = {}) {
    for (const NamedRule& named : all_rules()) {
      SCOPED_TRACE(::testing::Message() << named.name << ", " << of);
      HostStretch expected(of);
      if (change) change(expected);
      HostStretch actual = expected;
      optim::cpu::packed_step(named.rule, expected.packed(), 0, of.numel,
                              Instructions::kAnyProcessor);
      optim::cuda::packed_step(named.rule, actual.packed(), nullptr);
      EXPECT_TRUE(expected.is_same(actual));
    }
  }

  // Runs each format, with whole values and split ones.
  static void expect_them_in_every_format(StretchCase of) {
    for (const StateFormat format : kFormats) {
      for (const bool is_split : {false, true}) {
        of.format = format;
        of.is_split = is_split;
        expect_the_cpus_bits(of);
      }
    }
  }
};

TEST_F(CudaPackedStepOnHostTest, HasTheCpusBitsInEveryFormatAndPrecision) {
  for (const Precision gradient : kPrecisions) {
    expect_them_in_every_format({.gradient = gradient});
    expect_them_in_every_format({.gradient = gradient, .first_in_block = 77});
  }
}

TEST_F(CudaPackedStepOnHostTest, AdoptsWhatWasWrittenToTheCopy) {
  for (const StateFormat format : kFormats) {
    for (const Precision copy : {Precision::kBFloat16, Precision::kHalf}) {
      expect_the_cpus_bits({.numel = 2100, .format = format, .copy = copy, .adopts_copy = true});
      expect_the_cpus_bits({.format = format,
                            .copy = copy,
                            .adopts_copy = true,
                            .first_in_block = 77,
                            .copy_shift = 3});
    }
  }
}

TEST_F(CudaPackedStepOnHostTest, CopiesValuesOutInLowerPrecisions) {
  for (const StateFormat format : kFormats) {
    for (const Precision copy : {Precision::kBFloat16, Precision::kHalf}) {
      expect_the_cpus_bits({.format = format, .copy = copy});
      expect_the_cpus_bits({.format = format, .copy = copy, .shift = 1});
    }
  }
}

TEST_F(CudaPackedStepOnHostTest, HasThemAtAnyNumelAndPlaceInABlock) {
  for (const int64_t numel : {0, 1, 7, 8, 9, 255, 256, 257, 513}) {
    expect_them_in_every_format({.numel = numel});
  }
  for (const int64_t first : {1, 7, 8, 248, 250, 255}) {
    expect_them_in_every_format({.numel = 300, .first_in_block = first});
    expect_them_in_every_format({.numel = 3, .first_in_block = first});
  }
}

TEST_F(CudaPackedStepOnHostTest, HasThemAtAnyAlignment) {
  for (int64_t shift = 1; shift <= 8; ++shift) {
    expect_them_in_every_format({.numel = 300, .shift = shift});
    expect_them_in_every_format({.numel = 300, .first_in_block = shift, .shift = shift});
  }
}

TEST_F(CudaPackedStepOnHostTest, HasThemWhereOneBufferLiesUnlikeTheOthers) {
  expect_them_in_every_format({.numel = 300, .gradient_shift = 1});
  expect_them_in_every_format(
      {.numel = 300, .gradient = Precision::kBFloat16, .gradient_shift = 4});
  expect_them_in_every_format({.numel = 300, .values_shift = 1});
  expect_them_in_every_format({.numel = 300, .second_state_shift = 1});
  for (const StateFormat format : kFormats) {
    expect_the_cpus_bits(
        {.numel = 300, .format = format, .copy = Precision::kHalf, .copy_shift = 4});
  }
}

TEST_F(CudaPackedStepOnHostTest, RoundsByTheBitsOfEachElementsPlace) {
  for (int64_t first = 0; first <= 8; ++first) {
    for (const int64_t shift : {0, 3}) {
      expect_the_cpus_bits({.numel = 300,
                            .format = StateFormat::kBf16,
                            .first_element = kAfter4GiBlocks + first,
                            .shift = shift});
      expect_the_cpus_bits({.numel = 20,
                            .format = StateFormat::kBf16,
                            .is_split = true,
                            .first_element = first,
                            .shift = shift});
    }
  }
}

TEST_F(CudaPackedStepOnHostTest, HasThemWhereAWarpGoesRoundMoreThanOnce) {
  for (const Order order : {Order::kForward, Order::kBackward}) {
    cuda_on_host::device.order = order;
    for (const StateFormat format : {StateFormat::kBf16, StateFormat::k8Bit}) {
      expect_the_cpus_bits({.numel = 140003, .format = format, .first_in_block = 8});
    }
  }
}

TEST_F(CudaPackedStepOnHostTest, ZeroesTheGradientAndMakesNoStepAfterAnInfinity) {
  for (const Precision gradient : kPrecisions) {
    for (const float found_inf : {0.0F, 1.0F}) {
      for (const int64_t first : {0, 5}) {
        expect_them_in_every_format({.gradient = gradient,
                                     .first_in_block = first,
                                     .zeroes_gradient = true,
                                     .found_inf = found_inf});
      }
      expect_them_in_every_format({.gradient = gradient, .found_inf = found_inf});
    }
  }
}

TEST_F(CudaPackedStepOnHostTest, KeepsWhatIsNotANumberWithinItsBlock) {
  for (const float bad : {INFINITY, -INFINITY, NAN, std::numeric_limits<float>::max()}) {
    for (const bool is_split : {false, true}) {
      const StretchCase of{.format = StateFormat::k8Bit, .is_split = is_split, .first_in_block = 9};
      expect_the_cpus_bits(of, [&](HostStretch& stretch) {
        stretch.set_gradient(300, bad);
        stretch.set_scale(1, 3, NAN);
      });
    }
  }
}

TEST_F(CudaPackedStepOnHostTest, MakesCodesOfNothingWhereABlockIsTooSmall) {
  expect_the_cpus_bits({.format = StateFormat::k8Bit}, [](HostStretch& stretch) {
    for (int64_t i = 256; i < 512; ++i) stretch.set_gradient(i, 0);
    for (int state = 0; state < kMostStates; ++state) stretch.set_scale(state, 1, 1e-41F);
  });
}

class CudaStochasticRoundingOnHostTest : public KernelsOnHost {
 protected:
  static void expect_the_cpus_bits(int64_t numel, const RoundingPlace& place,
                                   int64_t from_shift = 0, int64_t to_shift = 0) {
    HostStretch numbers({.numel = numel, .shift = from_shift});
    const float* const from = numbers.flat().values;
    GuardedBuffer expected(numel, to_shift, sizeof(BFloat16Bits));
    GuardedBuffer actual(numel, to_shift, sizeof(BFloat16Bits));
    optim::cpu::round_stochastically(from, expected.as<BFloat16Bits>(), numel, place,
                                     Instructions::kAnyProcessor);
    optim::cuda::round_stochastically(from, actual.as<BFloat16Bits>(), numel, place, nullptr);
    EXPECT_TRUE(expected.is_same(actual, false))
        << numel << " from " << place.first_element << ", " << from_shift << ", " << to_shift;
  }
};

TEST_F(CudaStochasticRoundingOnHostTest, HasTheCpusBitsAtAnyNumelPlaceAndAlignment) {
  for (const int64_t numel : {0, 1, 7, 8, 9, 1000, 140003}) {
    for (const int64_t first : {int64_t{0}, int64_t{3}, int64_t{8}, kAfter4GiBlocks + 4}) {
      expect_the_cpus_bits(numel, {.seed = ~0ULL,
                                   .step = kMostRoundingSteps - 1,
                                   .tensor = kMostRoundingTensors - 1,
                                   .first_element = first});
    }
  }
  for (int64_t shift = 0; shift < 8; ++shift) {
    expect_the_cpus_bits(99, {.seed = 1, .first_element = shift}, shift, shift);
    expect_the_cpus_bits(99, {.seed = 1, .first_element = 3}, shift, 0);
    expect_the_cpus_bits(99, {.seed = 1, .first_element = 3}, 1, shift);
  }
}

}  // namespace
}  // namespace zeropage::optim::kernels_on_host_test
