#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zeropage/saved_state.h"

namespace zeropage::state::safetensors_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

class Text final : public ByteSource {
 public:
  explicit Text(std::string bytes) : bytes_(std::move(bytes)) {}
  const std::string& name() const override { return name_; }
  uint64_t size() const override { return bytes_.size(); }
  void read(uint64_t offset, char* to, uint64_t bytes) const override {
    ASSERT_LE(offset + bytes, bytes_.size());
    bytes_.copy(to, bytes, offset);
  }

 private:
  const std::string name_ = "weights.safetensors";
  const std::string bytes_;
};

std::string length_of(uint64_t bytes) {
  std::string length;
  for (int i = 0; i < 8; ++i) length += static_cast<char>(bytes >> 8 * i & 0xff);
  return length;
}

// A file of that header, and so many bytes of data.
std::string file_of(const std::string& header, size_t data_bytes) {
  return length_of(header.size()) + header + std::string(data_bytes, '\1');
}

SafetensorsHeader read(const std::string& bytes) {
  return read_safetensors_header(Text(bytes));
}

std::string error_of(const std::string& bytes) {
  try {
    read(bytes);
  } catch (const StateError& error) {
    return error.what();
  }
  return "";
}

std::vector<TensorEntry> some_tensors() {
  std::vector<TensorEntry> tensors = {
      {.name = "wte.weight", .shape = {3, 2}},
      {.name = "scalar", .dtype = Dtype::kI64},
      {.name = "empty", .dtype = Dtype::kBF16, .shape = {0, 7}},
      {.name = "b \"\\\n\u00e9", .dtype = Dtype::kU8, .shape = {5}}};
  place_in_order(tensors);
  return tensors;
}

TEST(SafetensorsTest, AHeaderComesBackAsItWasWritten) {
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"a", ""}};
  const auto tensors = some_tensors();
  const std::string prefix = safetensors_prefix(tensors, metadata);
  EXPECT_EQ(prefix.size(), 4096);
  const SafetensorsHeader header = read(prefix + std::string(tensors.back().end, 'x'));
  EXPECT_EQ(header.data_begin, 4096);
  EXPECT_EQ(header.metadata, metadata);
  EXPECT_EQ(header.tensors, tensors);
}

TEST(SafetensorsTest, AHeaderOfNothingIsOne) {
  EXPECT_TRUE(read(safetensors_prefix({}, {})).tensors.empty());
  EXPECT_TRUE(read(file_of("{}", 0)).tensors.empty());
}

TEST(SafetensorsTest, TensorsMayStandInAnyOrderInTheHeader) {
  const auto header = read(file_of(R"({"b":{"dtype":"F16","shape":[1],"data_offsets":[4,6]},)"
                                   R"( "a":{"data_offsets":[0,4],"shape":[2,2],"dtype":"I8"}}  )",
                                   6));
  ASSERT_EQ(header.tensors.size(), 2);
  EXPECT_EQ(header.tensors[0].name, "a");
  EXPECT_EQ(header.tensors[1].name, "b");
}

TEST(SafetensorsTest, NamesThatCannotBeWrittenAreRefused) {
  for (const std::string& name :
       {std::string(), std::string("__metadata__"), std::string("\xff")}) {
    EXPECT_THROW(safetensors_prefix({{.name = name}}, {}), std::invalid_argument);
  }
  EXPECT_THROW(safetensors_prefix({{.name = "a"}, {.name = "a"}}, {}), std::invalid_argument);
}

struct Lie {
  const char* header;
  size_t data_bytes;
  const char* words;
};

TEST(SafetensorsTest, AHeaderThatLiesIsRefusedInWords) {
  const std::string deep(100000, '[');
  const std::string long_name(5000, 'n');
  const std::string many_dimensions = [] {
    std::string list = "1";
    for (int i = 0; i < 64; ++i) list += ",1";
    return R"({"a":{"dtype":"U8","shape":[)" + list + R"(],"data_offsets":[0,1]}})";
  }();
  const std::string nested = R"({"a":)" + deep;
  const std::string named = "{\"" + long_name + "\":1}";
  const std::string digits = R"({"a":{"dtype":"U8","shape":[)" + std::string(40, '1') + "]}}";
  const std::vector<Lie> lies = {
      {"[]", 0, "begins with {"},
      {" {}", 0, "begins with {"},
      {R"({"a":1})", 0, R"(an object for "a", got 1)"},
      {R"({"a":null})", 0, "got null"},
      {R"({"a":true})", 0, "got a boolean"},
      {R"({"a":{}})", 0, "not all of them"},
      {R"({"a":{"dtype":"F32","shape":[]}})", 0, "not all of them"},
      {R"({"a":{"dtype":"F99","shape":[],"data_offsets":[0,4]}})", 4, R"(got "F99")"},
      {R"({"a":{"dtype":4,"shape":[],"data_offsets":[0,4]}})", 4, "a string for dtype"},
      {R"({"a":{"dtype":["F32"],"shape":[],"data_offsets":[0,4]}})", 4, "a string for dtype"},
      {R"({"a":{"dtype":"F32","shape":4,"data_offsets":[0,4]}})", 4, "an array for shape"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "a negative number"},
      {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "got 1.0"},
      {R"({"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,4]}})", 4,
       "got 99999999999999999999"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})", 0,
       "below 2^64 bytes"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "8 bytes for \"a\""},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "within 4 bytes"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "within 4 bytes"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "fewer"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", 4, "two data_offsets"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, "a second"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":0}})", 4, R"(got "x")"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "each name once"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "two tensors' bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, "none: the next begins"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 3, "got 2 more bytes"},
      {R"({"__metadata__":{"k":1}})", 0, R"(a string for "k")"},
      {R"({"__metadata__":{"k":{}}})", 0, R"(a string for "k")"},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, "each key of the metadata once"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "one __metadata__"},
      {"{} {}", 0, "JSON"},
      {R"({"a")", 0, "JSON"},
      {"{\"\xff\":1}", 0, "JSON"},
      {nested.c_str(), 0, "got an array"},
      {R"({"a":{"shape":[[1]]}})", 0, "an array"},
      {named.c_str(), 0, "a string of 4096 bytes or fewer"},
      {digits.c_str(), 0, "32 digits or fewer"},
      {many_dimensions.c_str(), 1, "64 dimensions or fewer"},
  };
  for (const Lie& lie : lies) {
    EXPECT_THAT(error_of(file_of(lie.header, lie.data_bytes)),
                AllOf(HasSubstr("weights.safetensors: byte "), HasSubstr(lie.words)))
        << std::string(lie.header).substr(0, 200);
  }
}

TEST(SafetensorsTest, ALengthThatLiesIsRefused) {
  for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{100'000'001},
                                uint64_t{1} << 63, ~uint64_t{0}}) {
    EXPECT_THAT(error_of(length_of(length) + "{}"), HasSubstr("a header of 2 to 2 bytes"));
  }
}

TEST(SafetensorsTest, EveryTruncationIsNoticed) {
  const auto tensors = some_tensors();
  const std::string whole =
      safetensors_prefix(tensors, {{"format", "pt"}}) + std::string(tensors.back().end, 'x');
  ASSERT_EQ(error_of(whole), "");
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    ASSERT_NE(error_of(whole.substr(0, bytes)), "") << bytes;
  }
}

// Any bytes are a header or a StateError: this finds crashes and other exceptions.
TEST(SafetensorsTest, DamagedHeadersAreRefusedOrAreStillHeaders) {
  std::mt19937 random(1);
  std::string header = safetensors_prefix(some_tensors(), {{"format", "pt"}}).substr(8);
  header.resize(header.find_last_of('}') + 1);
  const std::string whole = file_of(header, some_tensors().back().end);
  for (int trial = 0; trial < 20000; ++trial) {
    std::string damaged = whole;
    for (uint32_t edits = random() % 3 + 1; edits > 0; --edits) {
      damaged[8 + random() % header.size()] = static_cast<char>(random());
    }
    error_of(damaged);
  }
}

}  // namespace
}  // namespace zeropage::state::safetensors_test
