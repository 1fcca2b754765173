#include "zeropage/state_folder.h"

#include <array>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "state/folder_probe.h"
#include "tests/harness/small_states.h"
#include "zeropage/saved_state.h"

namespace zeropage::state::state_folder_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

namespace fs = std::filesystem;

class StateFolderTest : public ::testing::Test {
 protected:
  fs::path step(int64_t number) const { return run_ / name_of_step(number); }
  void save_step(int64_t number, float offset = 0) const {
    save(trained_state(number, offset), step(number), /*update_latest=*/true);
  }
  // Opens, but is not whole.
  void damage(int64_t number) const {
    std::string bytes = bytes_in(step(number) / kManifestFile);
    bytes[10] = static_cast<char>(bytes[10] ^ 1);
    put_bytes(step(number) / kManifestFile, bytes);
  }
  static std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }
  static int64_t step_of(const fs::path& state) { return SavedState(state).manifest().step; }

  const StateScratch scratch_;
  const fs::path run_ = scratch_ / "run";
};

TEST_F(StateFolderTest, AStateGetsItsNameWhenItIsWhole) {
  {
    NewState made(step(20));
    const FileEntry entry = add_file(made, kWeightsFile, safetensors_bytes({}));
    EXPECT_THAT(names_in(run_), ElementsAre(".step-20.writing"));
    EXPECT_THAT(state_error_of([&] { find_state(run_); }), HasSubstr("got neither"));
    made.commit({.step = 20, .files = {entry}}, /*update_latest=*/true);
    EXPECT_THAT(made.notes(), IsEmpty());
  }
  EXPECT_THAT(names_in(run_), UnorderedElementsAre("step-20", "latest"));
  EXPECT_EQ(fs::read_symlink(run_ / kLatest), "step-20");
  EXPECT_EQ(step_of(find_state(run_)), 20);
}

TEST_F(StateFolderTest, WithoutCommitNothingStays) {
  {
    NewState made(step(20));
    add_file(made, kWeightsFile, safetensors_bytes({}));
  }
  EXPECT_THAT(names_in(run_), IsEmpty());
}

TEST_F(StateFolderTest, AFileThatIsThereIsNotMadeAgain) {
  NewState made(step(20));
  made.create_file(kWeightsFile, 10);
  EXPECT_THAT(state_error_of([&] { made.create_file(kWeightsFile, 10); }),
              HasSubstr("File exists"));
}

TEST_F(StateFolderTest, AStateThatIsReplacedStaysUntilTheNewOneIsWhole) {
  save_step(20);
  const SmallState after = trained_state(20, 1.0F);
  {
    NewState abandoned(step(20));
    add_file(abandoned, kWeightsFile, safetensors_bytes(after.weights));
    EXPECT_EQ(SavedState(step(20)).verify(), SavedState(find_state(run_)).verify());
  }
  EXPECT_EQ(bytes_in(step(20) / kWeightsFile),
            safetensors_bytes(trained_state(20).weights, trained_state(20).metadata));
  save(after, step(20));
  EXPECT_EQ(bytes_in(step(20) / kWeightsFile), safetensors_bytes(after.weights, after.metadata));
  EXPECT_THAT(names_in(run_), UnorderedElementsAre("step-20", "latest"));
}

TEST_F(StateFolderTest, WhatStoodBesideAReplacedStateStays) {
  save_step(20);
  put_bytes(step(20) / "notes.txt", "mine");
  NewState made(step(20));
  const FileEntry entry = add_file(made, kWeightsFile, safetensors_bytes({}));
  made.commit({.step = 20, .files = {entry}}, false);
  EXPECT_THAT(made.notes(), ElementsAre(HasSubstr(".step-20.writing has what was beside")));
  EXPECT_EQ(bytes_in(run_ / ".step-20.writing" / "notes.txt"), "mine");
  // The next save needs the name, and says so rather than removing it.
  EXPECT_THAT(state_error_of([&] { NewState again(step(20)); }), HasSubstr("move it away"));
  EXPECT_EQ(bytes_in(run_ / ".step-20.writing" / "notes.txt"), "mine");
}

TEST_F(StateFolderTest, ADamagedStateIsMovedAside) {
  save_step(20);
  for (const int number : {1, 2}) {
    damage(20);
    NewState made(step(20));
    EXPECT_THAT(made.notes(),
                ElementsAre(AllOf(HasSubstr(".step-20.damaged-" + std::to_string(number)),
                                  HasSubstr("the manifest is damaged"))));
    EXPECT_FALSE(fs::exists(step(20)));
    const FileEntry entry = add_file(made, kWeightsFile, safetensors_bytes({}));
    made.commit({.step = 20, .files = {entry}}, false);
  }
  EXPECT_TRUE(fs::exists(run_ / ".step-20.damaged-1" / kWeightsFile));
  EXPECT_EQ(SavedState(step(20)).verify(), 4096U);
}

TEST_F(StateFolderTest, WhatIsNoStateIsLeftAlone) {
  fs::create_directories(step(20));
  put_bytes(step(20) / "thesis.tex", "mine");
  EXPECT_THAT(state_error_of([&] { NewState made(step(20)); }),
              HasSubstr("is there and is no state"));
  EXPECT_EQ(bytes_in(step(20) / "thesis.tex"), "mine");
  put_bytes(step(40), "a file");
  EXPECT_THAT(state_error_of([&] { NewState made(step(40)); }),
              HasSubstr("is there and is no state"));
  fs::create_symlink("step-20", step(60));
  EXPECT_THAT(state_error_of([&] { NewState made(step(60)); }),
              HasSubstr("is there and is no state"));
  // An empty folder of that name is nothing to keep.
  fs::create_directory(step(80));
  save_step(80);
  EXPECT_EQ(step_of(step(80)), 80);
}

TEST_F(StateFolderTest, LatestThatIsNoLinkIsRefusedBeforeAnythingIsWritten) {
  fs::create_directories(run_);
  put_bytes(run_ / kLatest, "mine");
  EXPECT_THAT(state_error_of([&] { NewState made(step(20)); }),
              HasSubstr("expected a symbolic link, got something else; move it away"));
  EXPECT_THAT(names_in(run_), ElementsAre("latest"));
  EXPECT_EQ(bytes_in(run_ / kLatest), "mine");
}

TEST_F(StateFolderTest, NamesThatAreNoStatesAreRefused) {
  for (const char* name : {"latest", ".hidden", "/"}) {
    EXPECT_THAT(
        state_error_of([&] { NewState made(name[0] == '/' ? fs::path(name) : run_ / name); }),
        HasSubstr("expected the name of a folder for a state"))
        << name;
  }
  save(trained_state(), run_ / "any-name" / "");
  EXPECT_EQ(step_of(run_ / "any-name"), 20);
}

TEST_F(StateFolderTest, WhatARunThatDiedLeftIsRemovedByTheNextSave) {
  fs::create_directories(run_ / ".step-20.writing");
  put_bytes(run_ / ".step-20.writing" / kWeightsFile, "half of it");
  fs::create_symlink("step-20", run_ / ".latest.writing");
  {
    NewState made(step(20));
    EXPECT_THAT(made.notes(), ElementsAre(HasSubstr("which a save that did not end had left")));
  }
  save_step(20);
  EXPECT_THAT(names_in(run_), UnorderedElementsAre("step-20", "latest"));
}

TEST_F(StateFolderTest, RunsThatSaveIntoOneFolderAtOnceAllSave) {
  constexpr int kRuns = 4;
  constexpr int64_t kStates = 50;
  std::array<std::string, kRuns> errors;
  std::vector<std::thread> runs;
  for (int run = 0; run < kRuns; ++run) {
    runs.emplace_back([&, run] {
      try {
        for (int64_t i = 0; i < kStates; ++i) {
          save(trained_state(i), run_ / ("run" + std::to_string(run)), /*update_latest=*/true);
        }
      } catch (const std::exception& error) {
        errors[run] = error.what();
      }
    });
  }
  for (std::thread& run : runs) run.join();
  EXPECT_THAT(errors, Each(""));
  EXPECT_THAT(names_in(run_), UnorderedElementsAre("run0", "run1", "run2", "run3", "latest"));
  EXPECT_EQ(step_of(find_state(run_)), kStates - 1);
}

TEST_F(StateFolderTest, ALinkUnderTheNameOfWritingIsNotFollowed) {
  fs::create_directories(run_);
  fs::create_directories(scratch_ / "elsewhere");
  put_bytes(scratch_ / "elsewhere" / kWeightsFile, "mine");
  fs::create_directory_symlink(scratch_ / "elsewhere", run_ / ".step-20.writing");
  EXPECT_THAT(state_error_of([&] { NewState made(step(20)); }), HasSubstr("move it away"));
  EXPECT_EQ(bytes_in(scratch_ / "elsewhere" / kWeightsFile), "mine");
}

TEST_F(StateFolderTest, AStateMayBeMeantByItselfByLatestOrByItsFolder) {
  for (const int64_t number : {20, 100, 40}) save_step(number);
  EXPECT_EQ(step_of(find_state(step(20))), 20);
  EXPECT_EQ(step_of(find_state(run_)), 40);
  EXPECT_EQ(step_of(find_state(run_ / kLatest)), 40);
  fs::remove(run_ / kLatest);
  EXPECT_EQ(step_of(find_state(run_)), 100);
  fs::remove(step(100) / kManifestFile);
  EXPECT_EQ(step_of(find_state(run_)), 40);
  EXPECT_THAT(state_error_of([&] { find_state(run_ / "none"); }), HasSubstr("got nothing there"));
}

TEST_F(StateFolderTest, OnlyStepsWithOneSpellingAreStates) {
  for (const char* name : {"step-20", "step-3", "step-030", "step--1", "step-", "step-1x",
                           "step-9999999999999999999"}) {
    fs::create_directories(run_ / name);
  }
  put_bytes(run_ / "step-7", "a file");
  fs::create_directory_symlink(run_ / "step-3", run_ / "step-4");
  std::vector<std::string> names;
  for (const fs::path& state : states_in(run_)) names.push_back(state.filename());
  EXPECT_THAT(names, ::testing::IsSupersetOf({"step-20", "step-3"}));
  EXPECT_THAT(
      names, ::testing::Not(::testing::Contains(::testing::AnyOf(
                 "step-030", "step-", "step-1x", "step-9999999999999999999", "step-7", "step-4"))));
  EXPECT_THAT(state_error_of([&] { states_in(run_ / "none"); }), HasSubstr("No such file"));
}

TEST_F(StateFolderTest, KeepsTheLastAndThoseOfEvery) {
  for (int64_t number = 10; number <= 100; number += 10) save_step(number);
  EXPECT_THAT(remove_old_states(run_, {}), IsEmpty());
  EXPECT_EQ(states_in(run_).size(), 10U);
  EXPECT_THAT(remove_old_states(run_, {.last = 2, .every = 40}), IsEmpty());
  EXPECT_THAT(names_in(run_),
              UnorderedElementsAre("latest", "step-100", "step-90", "step-80", "step-40"));
  remove_old_states(run_, {.last = 1});
  EXPECT_THAT(names_in(run_), UnorderedElementsAre("latest", "step-100"));
}

TEST_F(StateFolderTest, KeepsWhatLatestNamesAndWhatIsNoState) {
  for (const int64_t number : {40, 60, 20}) save_step(number);  // latest: step-20
  fs::create_directories(step(10));
  put_bytes(step(10) / "thesis.tex", "mine");
  remove_old_states(run_, {.last = 1});
  EXPECT_THAT(names_in(run_), UnorderedElementsAre("latest", "step-60", "step-20", "step-10"));
}

TEST_F(StateFolderTest, RemovingLeavesFilesThatAreNotOfAState) {
  for (const int64_t number : {20, 40}) save_step(number);
  put_bytes(step(20) / "notes.txt", "mine");
  EXPECT_THAT(remove_old_states(run_, {.last = 1}), ElementsAre(HasSubstr("stays")));
  EXPECT_EQ(bytes_in(run_ / ".step-20.removing" / "notes.txt"), "mine");
}

TEST_F(StateFolderTest, ARemovalThatARunDiedInIsFinished) {
  for (const int64_t number : {20, 40}) save_step(number);
  // A run leaves it so: the manifest is removed first.
  fs::rename(step(20), run_ / ".step-20.removing");
  fs::remove(run_ / ".step-20.removing" / kManifestFile);
  save_step(20);
  save_step(40);
  EXPECT_THAT(remove_old_states(run_, {.last = 1}),
              ElementsAre(HasSubstr("whose removal had begun")));
  EXPECT_THAT(names_in(run_), UnorderedElementsAre("latest", "step-40"));
}

TEST_F(StateFolderTest, TheNewestWholeStateIsFoundAndTheOthersAreNamed) {
  for (const int64_t number : {20, 40, 60}) save_step(number);
  EXPECT_EQ(step_of(find_valid_state(run_).directory), 60);
  EXPECT_THAT(find_valid_state(run_).refused, IsEmpty());
  damage(60);
  std::string weights = bytes_in(step(40) / kWeightsFile);
  weights.back() = static_cast<char>(weights.back() ^ 1);
  put_bytes(step(40) / kWeightsFile, weights);
  const FoundState found = find_valid_state(run_);
  EXPECT_EQ(step_of(found.directory), 20);
  EXPECT_THAT(found.refused, ElementsAre(HasSubstr("step-60/manifest.json"),
                                         HasSubstr("step-40/weights.safetensors")));
  // Older than what was asked for, never newer.
  EXPECT_EQ(step_of(find_valid_state(step(40)).directory), 20);
  damage(20);
  EXPECT_THAT(state_error_of([&] { find_valid_state(run_); }),
              AllOf(HasSubstr("expected a state that is whole, got none:\n"), HasSubstr("step-60"),
                    HasSubstr("step-40"), HasSubstr("step-20")));
}

// Root goes where it likes; as root this asks as nobody.
TEST_F(StateFolderTest, FoldersThatThisUserMayNotEnterAreNamed) {
  constexpr uid_t kNobody = 65534;
  save_step(20);
  fs::permissions(run_, fs::perms::none);
  const bool is_root = ::geteuid() == 0;
  ASSERT_EQ(is_root ? ::seteuid(kNobody) : 0, 0);
  const std::vector<std::string> errors = {
      state_error_of([&] { find_state(run_); }),
      state_error_of([&] { find_state(step(20)); }),
      state_error_of([&] { SavedState saved(step(20)); }),
      state_error_of([&] { NewState made(step(20)); }),
      state_error_of([&] { NewState made(run_ / "further" / "step-1"); }),
      state_error_of([&] { find_valid_state(run_); }),
      state_error_of([&] { states_in(run_); })};
  ASSERT_EQ(is_root ? ::seteuid(0) : 0, 0);
  fs::permissions(run_, fs::perms::owner_all);
  EXPECT_THAT(errors, ::testing::Each(AllOf(HasSubstr(run_.string()),
                                            HasSubstr("Permission denied; this user may not"))));
}

TEST_F(StateFolderTest, LatestThatIsNoLinkNamesNothing) {
  for (const int64_t number : {20, 40}) save_step(number);
  fs::remove(run_ / kLatest);
  put_bytes(run_ / kLatest, "step-20");
  EXPECT_EQ(step_of(find_state(run_)), 40);
  EXPECT_EQ(step_of(find_valid_state(run_).directory), 40);
  remove_old_states(run_, {.last = 1});
  EXPECT_THAT(names_in(run_), UnorderedElementsAre("latest", "step-40"));
}

TEST_F(StateFolderTest, LatestThatLeadsNowhereIsPassedOver) {
  for (const int64_t number : {20, 40}) save_step(number);
  fs::remove_all(step(40));
  EXPECT_EQ(step_of(find_valid_state(run_).directory), 20);
}

TEST_F(StateFolderTest, AProbeMakesTheFolderTakesWritesAndLeavesNothingElse) {
  const fs::path folder = run_ / "a" / "b";
  {
    const FolderProbe probe(folder);
    write_to_probe(probe.file());
    probe.check_room(1);
    EXPECT_THAT(state_error_of([&] { probe.check_room(uint64_t{1} << 62); }),
                AllOf(HasSubstr(folder.string() + ": expected room for a state of "
                                                  "4611686018427387904 bytes, got "),
                      HasSubstr("make room there, or give another folder")));
    // As if the run had died here: the next one takes over.
    const FolderProbe next(folder);
  }
  EXPECT_TRUE(fs::is_empty(folder));
  EXPECT_THAT(state_error_of([&] { write_to_probe(folder / "nothing"); }),
              HasSubstr("open: No such"));
}

TEST_F(StateFolderTest, AProbeOfAFolderThatCannotBeSaysWhy) {
  const fs::path file = run_ / "file";
  fs::create_directories(run_);
  put_bytes(file, "not a folder");
  EXPECT_THAT(state_error_of([&] { FolderProbe(file / "run"); }),
              HasSubstr("file: expected a folder, got something else"));
  EXPECT_THAT(state_error_of([&] { FolderProbe probe(file); }),
              HasSubstr("file: expected a folder, got something else"));
  fs::create_directory(run_ / kLatest);
  EXPECT_THAT(state_error_of([&] { FolderProbe probe(run_); }),
              HasSubstr("expected a symbolic link"));
}

}  // namespace
}  // namespace zeropage::state::state_folder_test
