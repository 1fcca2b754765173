#include "state/block_checksums.h"

#include <algorithm>
#include <random>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeropage::state::block_checksums_test {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string random_bytes(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::string text(bytes, '\0');
  for (char& character : text) character = static_cast<char>(random());
  return text;
}

uint32_t crc_of(const std::string& text) {
  return crc32c(text.data(), text.size());
}

// The definition, a bit at a time.
uint32_t plain_crc32c(const std::string& text) {
  uint32_t crc = ~uint32_t{0};
  for (const char character : text) {
    crc ^= static_cast<uint8_t>(character);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82f63b78 : 0);
  }
  return ~crc;
}

TEST(BlockChecksumsTest, KnownVectorsComeOut) {
  EXPECT_EQ(crc_of("123456789"), 0xe3069283);
  EXPECT_EQ(crc_of(""), 0U);
  // RFC 3720, B.4.
  EXPECT_EQ(crc_of(std::string(32, '\0')), 0x8a9136aa);
  EXPECT_EQ(crc_of(std::string(32, '\xff')), 0x62a8ab43);
}

TEST(BlockChecksumsTest, EveryLengthAndAlignmentFollowsTheDefinition) {
  const std::string bytes = random_bytes(96, 1);
  for (size_t begin = 0; begin < 9; ++begin) {
    for (size_t end = begin; end <= bytes.size(); ++end) {
      const std::string part = bytes.substr(begin, end - begin);
      ASSERT_EQ(crc32c(bytes.data() + begin, end - begin), plain_crc32c(part))
          << begin << " " << end;
    }
  }
}

TEST(BlockChecksumsTest, WhatFollowsMayBeAddedOrJoined) {
  const std::string whole = random_bytes(5000, 2);
  for (size_t cut = 0; cut <= whole.size(); cut += 97) {
    const std::string first = whole.substr(0, cut);
    const std::string second = whole.substr(cut);
    EXPECT_EQ(crc32c(second.data(), second.size(), crc_of(first)), crc_of(whole));
    EXPECT_EQ(joined_crc32c(crc_of(first), crc_of(second), second.size()), crc_of(whole));
  }
}

TEST(BlockChecksumsTest, AFlippedBitChangesTheChecksum) {
  std::string bytes = random_bytes(257, 3);
  const uint32_t before = crc_of(bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
    ASSERT_NE(crc_of(bytes), before) << bit;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ 1 << bit % 8);
  }
}

std::vector<uint32_t> blocks_of(const std::string& file) {
  std::vector<uint32_t> blocks;
  for (size_t begin = 0; begin < file.size(); begin += kBlockBytes) {
    blocks.push_back(crc_of(file.substr(begin, kBlockBytes)));
  }
  return blocks;
}

TEST(BlockChecksumsTest, PiecesOfAnySizeInAnyOrderGiveTheBlocksChecksums) {
  std::mt19937 random(4);
  const std::string file = random_bytes(3 * kBlockBytes + 12345, 4);
  for (int trial = 0; trial < 8; ++trial) {
    std::vector<uint64_t> cuts = {0, file.size()};
    for (int i = 0; i < 12; ++i) cuts.push_back(random() % file.size());
    if (trial == 0) cuts.push_back(kBlockBytes);  // a cut where a block begins
    std::sort(cuts.begin(), cuts.end());
    // Three ranks write stretches in turn.
    std::vector<PieceChecksums> ranks(3);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      ranks[random() % 3].add(cuts[i], file.data() + cuts[i], cuts[i + 1] - cuts[i]);
    }
    std::vector<ChecksumPiece> pieces;
    for (const PieceChecksums& rank : ranks) {
      pieces.insert(pieces.end(), rank.pieces().begin(), rank.pieces().end());
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    EXPECT_EQ(join_pieces("f", file.size(), pieces), blocks_of(file)) << trial;
  }
}

TEST(BlockChecksumsTest, StretchesThatFollowEachOtherAreOnePieceABlock) {
  const std::string file = random_bytes(2 * kBlockBytes + 10, 5);
  PieceChecksums checksums;
  for (uint64_t begin = 0; begin < file.size(); begin += 1000) {
    checksums.add(begin, file.data() + begin, std::min<uint64_t>(1000, file.size() - begin));
  }
  EXPECT_THAT(checksums.pieces(), SizeIs(3));
  EXPECT_EQ(join_pieces("f", file.size(), checksums.pieces()), blocks_of(file));
}

TEST(BlockChecksumsTest, AnEmptyFileHasNoBlocks) {
  EXPECT_EQ(blocks_of_file(0), 0U);
  EXPECT_EQ(blocks_of_file(1), 1U);
  EXPECT_EQ(blocks_of_file(kBlockBytes), 1U);
  EXPECT_EQ(blocks_of_file(kBlockBytes + 1), 2U);
  EXPECT_THAT(join_pieces("f", 0, {}), SizeIs(0));
}

std::string error_of(uint64_t file_bytes, std::vector<ChecksumPiece> pieces) {
  try {
    join_pieces("weights.safetensors", file_bytes, std::move(pieces));
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return "";
}

TEST(BlockChecksumsTest, HolesAndOverlapsAreRefusedByName) {
  EXPECT_EQ(error_of(10, {{0, 10, 1}}), "");
  EXPECT_EQ(error_of(10, {{0, 4, 1}, {5, 5, 1}}),
            "weights.safetensors: byte 4 was written by no rank");
  EXPECT_EQ(error_of(10, {{0, 6, 1}, {5, 5, 1}}), "weights.safetensors: byte 5 was written twice");
  EXPECT_EQ(error_of(10, {{5, 5, 1}}), "weights.safetensors: byte 0 was written by no rank");
  EXPECT_EQ(error_of(10, {{0, 9, 1}}), "weights.safetensors: byte 9 was written by no rank");
  EXPECT_EQ(error_of(10, {}), "weights.safetensors: byte 0 was written by no rank");
}

TEST(BlockChecksumsTest, PiecesBehindTheEndOfTheFileAreRefused) {
  EXPECT_NE(error_of(10, {{0, 11, 1}}), "");
  EXPECT_NE(error_of(kBlockBytes, {{0, kBlockBytes, 1}, {kBlockBytes, 5, 1}}), "");
}

}  // namespace
}  // namespace zeropage::state::block_checksums_test
