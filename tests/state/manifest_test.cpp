#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "state/block_checksums.h"
#include "tests/harness/byte_text.h"
#include "tests/harness/sealed_manifest.h"
#include "zeropage/saved_state.h"

namespace zeropage::state::manifest_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

Manifest some_manifest() {
  return {.step = 20,
          .files = {{kOptimizerFile, 3, {0xdeadbeef}},
                    {kWeightsFile, 2 * kBlockBytes + 1, {1, 0, 0xffffffff}}},
          .content = {{"name", "\u00e9\n\"\\"}, {"values", {1, 2.5, nullptr, true}}}};
}

std::string error_of(const std::string& text) {
  try {
    read_manifest(ByteText(text, "manifest.json"));
  } catch (const StateError& error) {
    return error.what();
  }
  return "";
}

// some_manifest with its own checksum, in which `from` was replaced.
std::string edited(const std::string& from, const std::string& to) {
  std::string text = to_text(some_manifest());
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return sealed(text.replace(at, from.size(), to));
}

TEST(ManifestTest, ComesBackAsItWasWritten) {
  const Manifest before = some_manifest();
  const Manifest after = read_manifest(ByteText(to_text(before)));
  EXPECT_EQ(after.step, before.step);
  EXPECT_EQ(after.files, before.files);
  EXPECT_EQ(after.content, before.content);
}

TEST(ManifestTest, TheSameManifestGivesTheSameBytesInWhateverOrderItWasMade) {
  Manifest other{.step = 20, .files = {}, .content = nlohmann::json::object()};
  other.content["values"] = {1, 2.5, nullptr, true};
  other.content["name"] = "\u00e9\n\"\\";
  other.files = {some_manifest().files[1], some_manifest().files[0]};
  EXPECT_EQ(to_text(other), to_text(some_manifest()));
  EXPECT_EQ(to_text(read_manifest(ByteText(to_text(other)))), to_text(other));
}

TEST(ManifestTest, IsJsonThatAnyoneCanRead) {
  const auto whole = nlohmann::json::parse(to_text(some_manifest()));
  EXPECT_EQ(whole["format"], "zeropage-state");
  EXPECT_EQ(whole["version"], kFormatVersion);
  EXPECT_EQ(whole["files"][kWeightsFile]["crc32c"], "0000000100000000ffffffff");
}

TEST(ManifestTest, EveryTruncationIsNoticed) {
  const std::string whole = to_text(some_manifest());
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    ASSERT_THAT(error_of(whole.substr(0, bytes)), HasSubstr("manifest.json: byte ")) << bytes;
  }
  EXPECT_NE(error_of(whole + "\n"), "");
  EXPECT_NE(error_of(whole + whole), "");
}

TEST(ManifestTest, EveryFlippedBitIsNoticed) {
  std::string text = to_text(some_manifest());
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ 1 << bit % 8);
    ASSERT_NE(error_of(text), "") << bit;
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ 1 << bit % 8);
  }
  EXPECT_EQ(error_of(text), "");
}

TEST(ManifestTest, AnotherVersionSaysWhatToDo) {
  EXPECT_THAT(error_of(edited("\"version\": 1", "\"version\": 2")),
              AllOf(HasSubstr("expected version 1, got 2"),
                    HasSubstr("read it with the version of Zeropage that wrote it")));
  EXPECT_THAT(error_of(edited("\"version\": 1", "\"revision\": 1")), HasSubstr("got none"));
  EXPECT_THAT(error_of(edited("zeropage-state", "another-state")), HasSubstr("another format"));
}

TEST(ManifestTest, NoFileNameLeadsOutOfTheFolder) {
  for (const char* name : {"../weights.safetensors", "/etc/passwd", "a/b", "..", ".", "",
                           "weights.safetensors/../x", "manifest.json", "Weights.safetensors"}) {
    EXPECT_THAT(error_of(edited("weights.safetensors", name)),
                HasSubstr("expected weights.safetensors or optimizer.safetensors, got a file"))
        << name;
  }
}

TEST(ManifestTest, NumbersThatAreNoneAreRefused) {
  for (const char* step : {"-1", "1.0", "1e3", "18446744073709551615", "99999999999999999999999",
                           "null", "\"20\"", "true", "[]", "1e999"}) {
    EXPECT_NE(error_of(edited("\"step\": 20", std::string("\"step\": ") + step)), "") << step;
  }
  // The blocks of such a file would take petabytes.
  for (const char* bytes : {"9223372036854775807", "18446744073709551615", "-3", "3.0", "\"3\""}) {
    EXPECT_NE(error_of(edited("\"bytes\": 3", std::string("\"bytes\": ") + bytes)), "") << bytes;
  }
}

TEST(ManifestTest, ChecksumsThatDoNotFitTheFileAreRefused) {
  for (const char* digits : {"", "dead", "deadbeef00000000", "deadbeeg", "+eadbeef", "0xdeadbe"}) {
    EXPECT_THAT(error_of(edited("deadbeef", digits)), HasSubstr("checksums of ")) << digits;
  }
  EXPECT_THAT(error_of(edited("\"block_bytes\": 1048576", "\"block_bytes\": 4096")),
              HasSubstr("expected block_bytes 1048576, got 4096"));
}

TEST(ManifestTest, MembersThatAreMissingOrOfAnotherKindAreRefused) {
  for (const char* text : {"[1, 2, 3]", "{}", "\"text\"", "{\"format\": {}}"}) {
    EXPECT_NE(error_of(sealed(std::string(text) + "x")), "") << text;
  }
  for (const char* member :
       {"\"step\"", "\"files\"", "\"content\"", "\"bytes\"", "\"crc32c\"", "\"block_bytes\""}) {
    EXPECT_NE(error_of(edited(member, "\"other\"")), "") << member;
  }
  EXPECT_THAT(error_of(edited("\"files\": {", "\"files\": 1, \"more\": {")), HasSubstr("files"));
  EXPECT_THAT(error_of(edited("\"content\": {", "\"content\": 1, \"more\": {")),
              HasSubstr("content"));
}

TEST(ManifestTest, NestingWithoutAnEndIsRefused) {
  for (const char* bracket : {"[", "{\"a\":"}) {
    std::string bomb;
    for (int i = 0; i < 100'000; ++i) bomb += bracket;
    EXPECT_THAT(error_of(edited("\"step\": 20", "\"step\": " + bomb)),
                HasSubstr("expected no more than 32 levels, got more"));
  }
  Manifest deep = some_manifest();
  nlohmann::json* inner = &deep.content;
  for (int i = 0; i < 20; ++i) inner = &(*inner)["a"];
  *inner = 1;
  EXPECT_EQ(read_manifest(ByteText(to_text(deep))).content, deep.content);
}

TEST(ManifestTest, DamageBehindARightChecksumIsRefusedOrStillAManifest) {
  std::mt19937 random(1);
  const std::string whole = to_text(some_manifest());
  for (int trial = 0; trial < 20'000; ++trial) {
    std::string damaged = whole;
    for (uint32_t edits = random() % 3 + 1; edits > 0; --edits) {
      damaged[random() % (damaged.size() - 45)] = static_cast<char>(random());
    }
    error_of(sealed(damaged));
  }
}

}  // namespace
}  // namespace zeropage::state::manifest_test
