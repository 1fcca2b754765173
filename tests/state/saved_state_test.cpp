#include "zeropage/saved_state.h"

#include <random>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/small_states.h"

namespace zeropage::state::saved_state_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

constexpr std::array<const char*, 3> kFiles = {kWeightsFile, kOptimizerFile, kManifestFile};

// Whoever loads it opens it and verifies it; "" if both find nothing.
std::string error_of(const fs::path& state) {
  return state_error_of([&] { SavedState(state).verify(); });
}

class SavedStateTest : public ::testing::Test {
 protected:
  void SetUp() override { save(trained_state(20), state_); }

  const StateScratch scratch_;
  const fs::path state_ = scratch_ / "step-20";
};

TEST_F(SavedStateTest, HasWhatWasSaved) {
  const SavedState saved(state_);
  const SmallState expected = trained_state(20);
  EXPECT_EQ(saved.manifest().step, 20);
  EXPECT_EQ(saved.manifest().content, expected.content);
  EXPECT_EQ(saved.weights().header().metadata, expected.metadata);
  for (const auto& [file, tensors] : {std::pair(&saved.weights(), expected.weights),
                                      std::pair(saved.optimizer(), expected.optimizer)}) {
    ASSERT_EQ(file->header().tensors.size(), tensors.size());
    BlockReader reader(*file);
    for (const SmallTensor& tensor : tensors) {
      const TensorEntry* const entry = file->find(tensor.name);
      ASSERT_NE(entry, nullptr) << tensor.name;
      EXPECT_EQ(entry->dtype, tensor.dtype);
      EXPECT_EQ(entry->shape, tensor.shape);
      std::string bytes(tensor.bytes.size(), '\0');
      reader.read(entry->begin, entry->end, bytes.data());
      EXPECT_EQ(bytes, tensor.bytes);
    }
  }
  EXPECT_EQ(saved.weights().find("none"), nullptr);
}

TEST_F(SavedStateTest, OfWeightsAloneHasNoOptimizer) {
  SmallState alone = trained_state(20);
  alone.optimizer.clear();
  save(alone, scratch_ / "alone");
  const SavedState saved(scratch_ / "alone");
  EXPECT_EQ(saved.optimizer(), nullptr);
  EXPECT_EQ(saved.files().size(), 1U);
  EXPECT_EQ(saved.verify(), fs::file_size(scratch_ / "alone" / kWeightsFile));
}

TEST_F(SavedStateTest, RanksShareTheBlocksOfAVerification) {
  const std::vector<float> values((5 << 20) / sizeof(float), 1.5F);
  save({.weights = {{"w", {values.size()}, bytes_of_values(values)}}}, scratch_ / "large");
  const SavedState saved(scratch_ / "large");
  std::vector<uint64_t> calls;
  uint64_t bytes = 0;
  for (uint64_t part = 0; part < 4; ++part) {
    bytes += saved.verify(part, 4, [&](uint64_t so_far) { calls.push_back(so_far); });
  }
  EXPECT_EQ(bytes, fs::file_size(scratch_ / "large" / kWeightsFile));
  // 6 blocks, the last of 4 KiB.
  EXPECT_THAT(calls, ElementsAre(1 << 20, 2 << 20, 1 << 20, (1 << 20) + 4096, 1 << 20, 1 << 20));
}

TEST_F(SavedStateTest, StretchesThatCrossBlocksComeWhole) {
  std::vector<uint32_t> values((3 << 20) / sizeof(uint32_t));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint32_t>(i * 2654435761U);
  const std::string bytes = bytes_of_values(values);
  save({.weights = {{"w", {values.size()}, bytes, Dtype::kU32}}}, scratch_ / "large");
  const SavedState saved(scratch_ / "large");
  BlockReader reader(saved.weights());
  std::mt19937 random(1);
  for (int trial = 0; trial < 100; ++trial) {
    const uint64_t begin = random() % bytes.size();
    const uint64_t end = begin + random() % (bytes.size() - begin + 1);
    std::string read(end - begin, '\0');
    reader.read(begin, end, read.data());
    ASSERT_TRUE(read == bytes.substr(begin, end - begin)) << begin << " " << end;
  }
}

TEST_F(SavedStateTest, EveryTruncationOfEveryFileIsNoticed) {
  for (const char* name : kFiles) {
    const std::string whole = bytes_in(state_ / name);
    for (uint64_t bytes = whole.size(); bytes-- > 0;) {
      fs::resize_file(state_ / name, bytes);
      ASSERT_THAT(error_of(state_), HasSubstr(name)) << bytes;
    }
    put_bytes(state_ / name, whole);
    ASSERT_EQ(error_of(state_), "");
  }
}

TEST_F(SavedStateTest, EveryFlippedBitIsNoticed) {
  std::array<std::string, kFiles.size()> whole;
  uint64_t bytes = 0;
  for (size_t i = 0; i < kFiles.size(); ++i) {
    whole[i] = bytes_in(state_ / kFiles[i]);
    bytes += whole[i].size();
  }
  std::mt19937_64 random(1);
  uint64_t noticed = 0;
  constexpr uint64_t kFlips = 100'000;
  for (uint64_t trial = 0; trial < kFlips; ++trial) {
    uint64_t bit = random() % (bytes * 8);
    size_t file = 0;
    for (; bit >= whole[file].size() * 8; ++file) bit -= whole[file].size() * 8;
    File damaged(state_ / kFiles[file], File::Access::kWrite);
    const char before = whole[file][bit / 8];
    const char flipped = static_cast<char>(before ^ 1 << bit % 8);
    damaged.write(bit / 8, &flipped, 1);
    noticed += error_of(state_).empty() ? 0 : 1;
    damaged.write(bit / 8, &before, 1);
  }
  EXPECT_EQ(noticed, kFlips);
  EXPECT_EQ(error_of(state_), "");
}

TEST_F(SavedStateTest, FilesOfAnotherStateAreNoticed) {
  save(trained_state(40, 1.0F), scratch_ / "step-40");
  for (const char* name : kFiles) {
    const std::string ours = bytes_in(state_ / name);
    put_bytes(state_ / name, bytes_in(scratch_ / "step-40" / name));
    EXPECT_THAT(error_of(state_), HasSubstr("of another state")) << name;
    put_bytes(state_ / name, ours);
  }
  // Two files of one state in each other's place.
  fs::rename(state_ / kWeightsFile, scratch_ / "aside");
  fs::rename(state_ / kOptimizerFile, state_ / kWeightsFile);
  fs::rename(scratch_ / "aside", state_ / kOptimizerFile);
  EXPECT_NE(error_of(state_), "");
}

TEST_F(SavedStateTest, MissingFilesAreNamed) {
  for (const char* name : {kWeightsFile, kOptimizerFile}) {
    const std::string whole = bytes_in(state_ / name);
    fs::remove(state_ / name);
    EXPECT_THAT(error_of(state_), AllOf(HasSubstr(name), HasSubstr("No such file"))) << name;
    put_bytes(state_ / name, whole);
  }
  fs::remove(state_ / kManifestFile);
  EXPECT_THAT(error_of(state_), HasSubstr("expected manifest.json in it, got none"));
  EXPECT_THAT(error_of(scratch_ / "none"), HasSubstr("expected manifest.json in it, got none"));
}

TEST_F(SavedStateTest, BytesBehindTheEndAreNoticed) {
  for (const char* name : kFiles) {
    const std::string whole = bytes_in(state_ / name);
    for (const std::string& more : {std::string("\0", 1), std::string(5000, 'x')}) {
      put_bytes(state_ / name, whole + more);
      EXPECT_THAT(error_of(state_), HasSubstr(name));
    }
    put_bytes(state_ / name, whole);
  }
}

TEST_F(SavedStateTest, AFolderInAFilesPlaceIsNoFile) {
  for (const char* name : kFiles) {
    const std::string whole = bytes_in(state_ / name);
    fs::remove(state_ / name);
    fs::create_directory(state_ / name);
    EXPECT_THAT(error_of(state_), HasSubstr(name));
    fs::remove(state_ / name);
    put_bytes(state_ / name, whole);
  }
  EXPECT_EQ(error_of(state_), "");
}

// Root reads whatever it likes; as root this opens them as nobody.
TEST_F(SavedStateTest, FilesThatThisUserMayNotReadAreNamed) {
  constexpr uid_t kNobody = 65534;
  for (const char* name : kFiles) {
    fs::permissions(state_ / name, fs::perms::none);
    const bool is_root = ::geteuid() == 0;
    ASSERT_EQ(is_root ? ::seteuid(kNobody) : 0, 0);
    const std::string error = error_of(state_);
    ASSERT_EQ(is_root ? ::seteuid(0) : 0, 0);
    EXPECT_THAT(error, AllOf(HasSubstr(name), HasSubstr("Permission denied; this user may not")));
    fs::permissions(state_ / name, static_cast<fs::perms>(0644));
  }
}

// A manifest that is whole, but of files that are no safetensors.
TEST_F(SavedStateTest, ChecksumsThatFitDoNotMakeAHeader) {
  for (const std::string& bytes :
       {std::string(), std::string("abc"), std::string(9000, '\xff'), std::string(16, '\0')}) {
    NewState made(scratch_ / "lies");
    const FileEntry entry = add_file(made, kWeightsFile, bytes);
    made.commit({.step = 1, .files = {entry}}, false);
    EXPECT_THAT(error_of(scratch_ / "lies"), HasSubstr(kWeightsFile)) << bytes.size();
    fs::remove_all(scratch_ / "lies");
  }
}

TEST_F(SavedStateTest, AManifestWithoutWeightsIsOfNoState) {
  NewState made(scratch_ / "none");
  made.commit({.step = 1, .files = {}}, false);
  EXPECT_THAT(error_of(scratch_ / "none"), HasSubstr("expected weights.safetensors, got none"));
}

}  // namespace
}  // namespace zeropage::state::saved_state_test
