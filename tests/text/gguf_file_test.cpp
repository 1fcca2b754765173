#include "zeropage/text/gguf_file.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fuzz/counted_allocations.h"
#include "tests/text/gguf_bytes.h"

namespace zeropage::text::gguf_file_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint32_t kF32 = 0;
constexpr uint32_t kQ4_0 = 2;
constexpr uint32_t kQ8_0 = 8;

// The bytes of a block whose numbers the reference implementation (PyPI gguf 0.17) gave.
std::string known_block(uint32_t bytes, const std::vector<std::pair<size_t, uint16_t>>& halves) {
  std::string block;
  for (uint32_t i = 0; i < bytes; ++i) block += static_cast<char>(i * 37 + 11);
  for (const auto& [at, half] : halves) block.replace(at, 2, bytes_of(half));
  return block;
}

std::string floats(size_t count, float first = 0) {
  std::string bytes;
  for (size_t i = 0; i < count; ++i) bytes += bytes_of(first + static_cast<float>(i));
  return bytes;
}

GgufBytes small_file() {
  GgufBytes file;
  file.words("general.architecture", "llama");
  file.pair("a.u8", 0, uint8_t{200}).pair("a.i8", 1, int8_t{-3}).pair("a.u16", 2, uint16_t{60000});
  file.pair("a.i16", 3, int16_t{-300}).pair("a.u32", 4, uint32_t{7}).pair("a.i32", 5, int32_t{-7});
  file.pair("a.f32", 6, 1.5F).pair("a.flag", 7, uint8_t{1}).pair("a.u64", 10, uint64_t{1} << 40);
  file.pair("a.i64", 11, int64_t{-1} << 40).pair("a.f64", 12, 2.25);
  file.list_of_words("a.words", {"x", "", "yy"}).list<int32_t>("a.numbers", 5, {1, -2, 3});
  file.list<float>("a.scores", 6, {0.5F, -1});
  file.tensor("norm.weight", {4}, kF32, floats(4));
  file.tensor("table", {3, 2}, kF32, floats(6, 10));
  file.tensor("packed", {64}, kQ8_0, known_block(34, {{0, 0x3800}}) + known_block(34, {{0, 0}}));
  return file;
}

class GgufFileTest : public ::testing::Test {
 protected:
  std::filesystem::path file_of(const std::string& bytes) const {
    return scratch_.put("model.gguf", bytes);
  }
  std::string error_of(const GgufBytes& file) const { return error_of_bytes(file.text()); }
  std::string error_of_bytes(const std::string& bytes) const {
    const auto path = file_of(bytes);
    return text_error_of([&] { const GgufFile file(path); });
  }

  const TextScratch scratch_;
};

TEST_F(GgufFileTest, ReadsValuesOfEveryType) {
  const GgufFile file(file_of(small_file().text()));
  EXPECT_EQ(file.version(), 3U);
  EXPECT_EQ(file.string("general.architecture"), "llama");
  EXPECT_EQ(file.integer("a.u8"), 200);
  EXPECT_EQ(file.integer("a.i8"), -3);
  EXPECT_EQ(file.integer("a.u16"), 60000);
  EXPECT_EQ(file.integer("a.i16"), -300);
  EXPECT_EQ(file.integer("a.u32"), 7);
  EXPECT_EQ(file.integer("a.i32"), -7);
  EXPECT_EQ(file.integer("a.u64"), int64_t{1} << 40);
  EXPECT_EQ(file.integer("a.i64"), -(int64_t{1} << 40));
  EXPECT_EQ(file.number("a.f32"), 1.5);
  EXPECT_EQ(file.number("a.f64"), 2.25);
  EXPECT_EQ(file.number("a.u32"), 7);
  EXPECT_TRUE(file.flag("a.flag"));
  EXPECT_THAT(file.strings("a.words"), ElementsAre("x", "", "yy"));
  EXPECT_THAT(file.integers("a.numbers"), ElementsAre(1, -2, 3));
  EXPECT_THAT(file.numbers("a.scores"), ElementsAre(0.5, -1));
}

TEST_F(GgufFileTest, ValuesOfAnotherKindAndMissingOnesAreNamed) {
  const GgufFile file(file_of(small_file().text()));
  EXPECT_THAT(text_error_of([&] { file.integer("a.f32"); }),
              AllOf(HasSubstr("model.gguf: metadata \"a.f32\": expected an integer"),
                    HasSubstr("got a number")));
  EXPECT_THAT(text_error_of([&] { file.strings("a.numbers"); }),
              HasSubstr("expected an array of strings, got an array of 3 values of type 5"));
  EXPECT_THAT(text_error_of([&] { file.integers("a.scores"); }), HasSubstr("array of integers"));
  EXPECT_THAT(text_error_of([&] { file.flag("a.u8"); }), HasSubstr("expected true or false"));
  EXPECT_THAT(text_error_of([&] { file.string("b"); }), HasSubstr("its metadata has no \"b\""));
  EXPECT_THAT(text_error_of([&] { file.tensor("b"); }), HasSubstr("no tensor \"b\" among its 3"));
}

TEST_F(GgufFileTest, ShapesAreRowMajor) {
  const GgufFile file(file_of(small_file().text()));
  ASSERT_EQ(file.tensors().size(), 3U);
  const GgufTensor& table = file.tensor("table");
  EXPECT_THAT(table.shape, ElementsAre(2, 3));
  EXPECT_EQ(table.numel, 6);
  EXPECT_EQ(table.bytes, 24U);
  float second_row[3];
  file.read(table, 3, 3, second_row);
  EXPECT_THAT(second_row, ElementsAre(13, 14, 15));
}

TEST_F(GgufFileTest, VersionTwoAndOtherAlignmentsAreRead) {
  GgufBytes file;
  file.version = 2;
  file.alignment = 64;
  file.pair("general.alignment", 4, uint32_t{64});
  file.tensor("a", {4}, kF32, floats(4)).tensor("b", {4}, kF32, floats(4, 4));
  const GgufFile read(file_of(file.text()));
  EXPECT_EQ(read.version(), 2U);
  float values[4];
  read.read(read.tensor("b"), 0, 4, values);
  EXPECT_THAT(values, ElementsAre(4, 5, 6, 7));
}

struct KnownBlock {
  GgufType type;
  uint32_t numel;
  uint32_t bytes;
  std::vector<std::pair<size_t, uint16_t>> halves;  // fp16 scales, and where they lie
  std::vector<double> some;                         // elements 0, 1, the middle one and the last
  double sum;
  double sum_by_place;  // each times its index
};
void PrintTo(const KnownBlock& block, std::ostream* out) {
  *out << name_of(block.type);
}

class GgufBlockTest : public ::testing::TestWithParam<KnownBlock> {};

TEST_P(GgufBlockTest, HasTheReferencesNumbers) {
  const KnownBlock& known = GetParam();
  const TextScratch scratch;
  GgufBytes bytes;
  // Two blocks, of which the first is zeros but for what zero bits mean.
  bytes.tensor("w", {known.numel, 2}, static_cast<uint32_t>(known.type),
               std::string(known.bytes, '\0') + known_block(known.bytes, known.halves));
  const GgufFile file(scratch.put("block.gguf", bytes.text()));
  std::vector<float> all(2 * known.numel, -1);
  const GgufTensor& tensor = file.tensor("w");
  file.read(tensor, 0, tensor.numel, all.data());
  const auto* const second = all.data() + known.numel;
  EXPECT_THAT(
      (std::vector<double>{second[0], second[1], second[known.numel / 2], second[known.numel - 1]}),
      ::testing::ElementsAreArray(known.some));
  double sum = 0;
  double sum_by_place = 0;
  for (uint32_t i = 0; i < known.numel; ++i) {
    EXPECT_EQ(all[i], 0.0F);
    sum += second[i];
    sum_by_place += second[i] * i;
  }
  EXPECT_EQ(sum, known.sum);
  EXPECT_EQ(sum_by_place, known.sum_by_place);
  // Any range has the elements of the whole.
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const auto first = static_cast<int64_t>(random() % all.size());
    const auto count = static_cast<int64_t>(random() % (all.size() - first + 1));
    std::vector<float> part(count + 1, 123);
    file.read(tensor, first, count, part.data());
    EXPECT_TRUE(std::equal(part.begin(), part.end() - 1, all.begin() + first));
    EXPECT_EQ(part.back(), 123) << "written past the end";
  }
}

constexpr uint16_t kHalf = 0x3800;               // 0.5
constexpr uint16_t kMinusFiveQuarters = 0xbd00;  // -1.25
INSTANTIATE_TEST_SUITE_P(
    Types, GgufBlockTest,
    ::testing::Values(
        KnownBlock{GgufType::kQ4_0, 32, 18, {{0, kHalf}}, {-1.5, 1, -1.5, 0}, -10.5, -248.5},
        KnownBlock{GgufType::kQ4_1,
                   32,
                   20,
                   {{0, kHalf}, {2, kMinusFiveQuarters}},
                   {6.25, 0.75, 3.25, 4.75},
                   82.5,
                   1249},
        KnownBlock{GgufType::kQ5_0, 32, 22, {{0, kHalf}}, {4.5, -1, 7, 0.5}, 7.5, 48.5},
        KnownBlock{GgufType::kQ5_1,
                   32,
                   24,
                   {{0, kHalf}, {2, kMinusFiveQuarters}},
                   {8.25, 10.75, 8.25, 1.25},
                   212.5,
                   3078},
        KnownBlock{GgufType::kQ8_0, 32, 34, {{0, kHalf}}, {42.5, 61, -45.5, -24}, -88, -3952},
        KnownBlock{GgufType::kQ4_K,
                   256,
                   144,
                   {{0, kHalf}, {2, kMinusFiveQuarters}},
                   {234.25, 63.75, 229.5, 76.75},
                   39892,
                   5173664},
        KnownBlock{GgufType::kQ5_K,
                   256,
                   176,
                   {{0, kHalf}, {2, kMinusFiveQuarters}},
                   {482.25, 63.75, 541.5, 106.75},
                   70780,
                   9370080},
        KnownBlock{
            GgufType::kQ6_K, 256, 210, {{208, kHalf}}, {-715.5, 848, -175.5, -30}, 2306, 389904}),
    [](const auto& info) { return name_of(info.param.type); });

TEST_F(GgufFileTest, HalfPrecisionHasZerosSubnormalsAndInfinities) {
  GgufBytes bytes;
  std::string halves;
  for (const int half :
       {0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x3c00, 0xc000, 0x7bff, 0x7c00, 0xfc00, 0x7e00}) {
    halves += bytes_of(static_cast<uint16_t>(half));
  }
  bytes.tensor("half", {11}, 1, halves);
  bytes.tensor("brain", {2}, 30, bytes_of(uint16_t{0x3f80}) + bytes_of(uint16_t{0xc020}));
  const GgufFile file(file_of(bytes.text()));
  std::vector<float> values(11);
  file.read(file.tensor("half"), 0, 11, values.data());
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::signbit(values[1]));
  EXPECT_TRUE(std::isnan(values[10]));
  values.pop_back();
  EXPECT_THAT(values, ElementsAre(0, -0.0F, 0x1p-24F, -1023 * 0x1p-24F, 0x1p-14F, 1, -2, 65504,
                                  kInfinite, -kInfinite));
  file.read(file.tensor("brain"), 0, 2, values.data());
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[1], -2.5);
}

TEST_F(GgufFileTest, RangesPastTheEndAndTypesThatAreNotReadAreRefused) {
  GgufBytes bytes = small_file();
  bytes.tensor("two bits", {256}, 10, std::string(84, '\0'));
  const GgufFile file(file_of(bytes.text()));
  float value = 0;
  EXPECT_THAT(text_error_of([&] { file.read(file.tensor("table"), 6, 1, &value); }),
              HasSubstr("\"table\": expected elements from 0 to 6, got 1 from 6 on"));
  EXPECT_THAT(text_error_of([&] { file.read(file.tensor("table"), -1, 1, &value); }),
              HasSubstr("got 1 from -1 on"));
  EXPECT_EQ(text_error_of([&] { file.read(file.tensor("table"), 6, 0, &value); }), "");
  EXPECT_FALSE(can_read(file.tensor("two bits").type));
  EXPECT_THAT(text_error_of([&] { file.read(file.tensor("two bits"), 0, 1, &value); }),
              AllOf(HasSubstr("got Q2_K"), HasSubstr("take another quantisation")));
}

TEST_F(GgufFileTest, OtherFilesAndVersionsAreNamed) {
  EXPECT_THAT(text_error_of([&] { const GgufFile file(scratch_ / "none.gguf"); }),
              HasSubstr("none.gguf: cannot be opened: No such file"));
  EXPECT_THAT(text_error_of([&] { const GgufFile file(scratch_.path()); }),
              HasSubstr("expected a file"));
  EXPECT_THAT(error_of_bytes(""), HasSubstr("expected 4 bytes of the format's name"));
  EXPECT_THAT(error_of_bytes("PK\3\4 and so on"), HasSubstr("begins with \"GGUF\", got \"PK??\""));
  GgufBytes old = small_file();
  old.version = 1;
  EXPECT_THAT(error_of(old), HasSubstr("expected version 2 or 3 of GGUF, got 1"));
  old.version = 3U << 24;
  EXPECT_THAT(error_of(old), HasSubstr("big-endian"));
}

TEST_F(GgufFileTest, CountsThatLieAreNotBelieved) {
  constexpr auto kHuge = uint64_t{1} << 62;
  const std::string head = "GGUF" + bytes_of(uint32_t{3});
  EXPECT_THAT(error_of_bytes(head + bytes_of(kHuge) + bytes_of(uint64_t{0})),
              HasSubstr("expected as many tensors as"));
  EXPECT_THAT(error_of_bytes(head + bytes_of(uint64_t{0}) + bytes_of(kHuge)),
              HasSubstr("expected as many metadata as"));
  GgufBytes file;
  file.raw_pair("list", 9, bytes_of(uint32_t{8}) + bytes_of(kHuge));
  EXPECT_THAT(error_of(file), HasSubstr("elements of an array"));
  GgufBytes text;
  text.raw_pair("text", 8, bytes_of(kHuge));
  EXPECT_THAT(error_of(text), HasSubstr("bytes of a string, got"));
  std::string nested;
  for (int i = 0; i < 6; ++i) nested += bytes_of(uint32_t{9}) + bytes_of(uint64_t{1});
  GgufBytes deep;
  deep.raw_pair("deep", 9, nested + bytes_of(uint32_t{0}) + bytes_of(uint64_t{0}));
  EXPECT_THAT(error_of(deep), HasSubstr("arrays in arrays to a depth of 4"));
}

TEST_F(GgufFileTest, TensorsThatCannotBeAreNamed) {
  EXPECT_THAT(error_of(GgufBytes().tensor("w", {1, 1, 1, 1, 1}, kF32, floats(1))),
              HasSubstr("tensor \"w\" with 4 sizes or fewer, got 5"));
  EXPECT_THAT(error_of(GgufBytes().tensor("w", {0}, kF32, "")), HasSubstr("sizes of 1 or more"));
  EXPECT_THAT(error_of(GgufBytes().tensor("w", {uint64_t{1} << 40, uint64_t{1} << 40}, kF32, "")),
              HasSubstr("whose product is less than 2^63"));
  EXPECT_THAT(error_of(GgufBytes().tensor("w", {uint64_t{1} << 62}, kF32, "")),
              HasSubstr("fewer than 2^64 bytes"));
  EXPECT_THAT(error_of(GgufBytes().tensor("w", {4}, 99, floats(4))),
              HasSubstr("a type of the format, got type 99"));
  EXPECT_THAT(error_of(GgufBytes().tensor("w", {33}, kQ4_0, std::string(36, '\0'))),
              HasSubstr("rows of whole blocks of 32 elements of Q4_0, got rows of 33"));
  EXPECT_THAT(error_of(GgufBytes().tensor("w", {1024}, kF32, floats(4))),
              AllOf(HasSubstr("expected its 4096 bytes at byte 0"), HasSubstr("cut off")));
  EXPECT_THAT(error_of(GgufBytes().tensor_at("w", {4}, kF32, ~uint64_t{31}, floats(4))),
              HasSubstr("expected its 16 bytes at byte"));
  EXPECT_THAT(error_of(GgufBytes().tensor_at("w", {4}, kF32, 8, floats(8))),
              HasSubstr("an offset that is a multiple of 32, got 8"));
  EXPECT_THAT(
      error_of(GgufBytes().tensor("w", {4}, kF32, floats(4)).tensor("w", {4}, kF32, floats(4))),
      HasSubstr("each tensor once, got \"w\" twice"));
  EXPECT_THAT(
      error_of(GgufBytes().tensor("a", {4}, kF32, floats(4)).tensor_at("b", {4}, kF32, 0, "")),
      HasSubstr("bytes in common"));
  EXPECT_THAT(error_of(small_file().pair("a.u8", 0, uint8_t{1})), HasSubstr("\"a.u8\" twice"));
  EXPECT_THAT(error_of(GgufBytes().pair("general.alignment", 4, uint32_t{0})),
              HasSubstr("expected a power of two"));
  EXPECT_THAT(error_of(GgufBytes().raw_pair("a", 13, "")), HasSubstr("type from 0 to 12, got 13"));
}

// Opens the file and reads all there is, if it may be opened. Its metadata may have changed in what damage cannot be told from.
void read_everything(const GgufFile& file) {
  for (const GgufTensor& tensor : file.tensors()) {
    std::vector<float> values(static_cast<size_t>(tensor.numel));
    if (can_read(tensor.type)) file.read(tensor, 0, tensor.numel, values.data());
  }
  for (const auto& pair : file.metadata()) {
    text_error_of([&] { file.integer(pair.first); });
    text_error_of([&] { file.numbers(pair.first); });
    text_error_of([&] { file.strings(pair.first); });
  }
}

TEST_F(GgufFileTest, EveryTruncationIsRefused) {
  const std::string whole = small_file().text();
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THAT(error_of_bytes(whole.substr(0, size)), HasSubstr("model.gguf: ")) << size;
  }
}

TEST_F(GgufFileTest, FlippedBitsAreRefusedOrReadWithinTheFile) {
  const std::string whole = small_file().text();
  int refused = 0;
  for (size_t bit = 0; bit < 8 * whole.size(); bit += 7) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    const auto path = file_of(damaged);
    const int64_t before = live_allocated_bytes();
    reset_most_allocated_bytes();
    const std::string error = text_error_of([&] { read_everything(GgufFile(path)); });
    refused += !error.empty();
    ASSERT_LE(most_allocated_bytes() - before, static_cast<int64_t>(16 * whole.size() + (64 << 10)))
        << "bit " << bit;
  }
  EXPECT_GT(refused, 100);
}

TEST_F(GgufFileTest, RandomBytesBehindTheBeginningAreRefusedOrReadWithinTheFile) {
  std::mt19937 random(7);
  const std::string whole = small_file().text();
  for (int i = 0; i < 1000; ++i) {
    std::string damaged = whole;
    const size_t count = 1 + random() % 32;
    for (size_t k = 0; k < count; ++k) {
      damaged[8 + random() % (whole.size() - 8)] =
          static_cast<char>(random() % 3 ? random() : 0xff);
    }
    const auto path = file_of(damaged);
    text_error_of([&] { read_everything(GgufFile(path)); });
  }
}

}  // namespace
}  // namespace zeropage::text::gguf_file_test
