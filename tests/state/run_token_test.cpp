#include "state/run_token.h"

#include <csignal>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/small_states.h"
#include "zeropage/saved_state.h"

namespace zeropage::state::run_token_test {
namespace {

using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

// While it lives, no file of this process can be written to, as on a disk that is full.
class FullDisk {
 public:
  FullDisk() {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit none = before_;
    none.rlim_cur = 0;
    ::setrlimit(RLIMIT_FSIZE, &none);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  void (*const handler_)(int) = ::signal(SIGXFSZ, SIG_IGN);
  rlimit before_{};
};

class RunTokenTest : public ::testing::Test {
 protected:
  const StateScratch scratch_;
  const fs::path run_ = scratch_ / "run";
};

TEST_F(RunTokenTest, TheRunThatTookTheFolderLastHasIt) {
  const RunToken older(run_);
  EXPECT_EQ(older.number(), 1);
  EXPECT_THAT(older.hold()->note(), IsEmpty());
  const RunToken newer(run_);
  EXPECT_EQ(newer.number(), 2);
  EXPECT_THAT(
      state_error_of([&] { older.hold(); }),
      AllOf(HasSubstr(run_.string() + ": run 1 (host "), HasSubstr("process "),
            HasSubstr(" has lost this folder to run 2 (host "),
            HasSubstr("saves nothing more here"), HasSubstr("one StateSaver for a folder")));
  EXPECT_EQ(state_error_of([&] { newer.hold(); }), "");
}

// The process that took it ended without a word, as a requeued job finds it.
TEST_F(RunTokenTest, ARunThatWasKilledDoesNotKeepTheFolder) {
  const pid_t child = ::fork();
  if (child == 0) {
    const RunToken token(run_);
    const auto held = token.hold();
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  const RunToken next(run_);
  EXPECT_EQ(next.number(), 2);
  EXPECT_EQ(state_error_of([&] { next.hold(); }), "");
}

TEST_F(RunTokenTest, ARunOfAnotherProcessIsToldToEnd) {
  const RunToken older(run_);
  const pid_t child = ::fork();
  if (child == 0) {
    const RunToken newer(run_);
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_THAT(state_error_of([&] { older.hold(); }),
              AllOf(HasSubstr("to run 2 (host "), HasSubstr("process " + std::to_string(child)),
                    HasSubstr("If that is this job, started again, let this run end")));
}

TEST_F(RunTokenTest, NoOtherRunTakesTheFolderWhileItIsHeld) {
  const RunToken older(run_);
  const auto held = older.hold();
  EXPECT_THAT(state_error_of([&] { RunToken newer(run_, std::chrono::milliseconds(50)); }),
              AllOf(HasSubstr(".run-token: has been locked for 50 ms by run 1 (host "),
                    HasSubstr("is that process stopped")));
  EXPECT_EQ(held->read(), bytes_in(run_ / kRunTokenFile));
}

TEST_F(RunTokenTest, AFileThatCannotBeReadBelongsToNobody) {
  const RunToken older(run_);
  put_bytes(run_ / kRunTokenFile, std::string(100, '\0'));
  EXPECT_THAT(state_error_of([&] { older.hold(); }), HasSubstr("has lost this folder to run 0"));
  const RunToken next(run_);
  EXPECT_EQ(next.number(), 1);
  EXPECT_EQ(state_error_of([&] { next.hold(); }), "");
  EXPECT_THAT(state_error_of([&] { older.hold(); }), HasSubstr("has lost this folder to run 1"));
}

TEST_F(RunTokenTest, ARunThatCannotWriteItsTokenLeavesTheFolderToTheOneThatHasIt) {
  const RunToken older(run_);
  const RunToken newer(run_);
  {
    const FullDisk full;
    EXPECT_THAT(state_error_of([&] { RunToken third(run_); }), HasSubstr("pwrite"));
  }
  EXPECT_THAT(state_error_of([&] { older.hold(); }), HasSubstr("has lost this folder to run 2"));
  EXPECT_EQ(state_error_of([&] { newer.hold(); }), "");
  EXPECT_EQ(RunToken(run_).number(), 3);
}

TEST_F(RunTokenTest, AFolderThatWasRemovedMeanwhileIsTakenAgain) {
  const RunToken token(run_);
  fs::remove_all(run_);
  EXPECT_EQ(state_error_of([&] { token.hold(); }), "");
  EXPECT_EQ(RunToken(run_).number(), 2);
}

TEST_F(RunTokenTest, AFolderThatCannotBeSaysWhy) {
  put_bytes(run_, "a file");
  EXPECT_THAT(state_error_of([&] { RunToken token(run_); }), HasSubstr("expected a folder"));
}

TEST_F(RunTokenTest, EachWriterHasAFolderOfItsOwnAndTheNewerOneRemovesTheOlders) {
  NewState older(run_ / "step-20", "1");
  add_file(older, kWeightsFile, safetensors_bytes({}));
  const NewState newer(run_ / "step-20", "2");
  EXPECT_EQ(newer.directory(), run_ / ".step-20.writing-2");
  EXPECT_FALSE(fs::exists(older.directory()));
  EXPECT_THAT(newer.notes(), ElementsAre(AllOf(HasSubstr(".step-20.writing-1"),
                                               HasSubstr("a save that did not end had left"))));
}

TEST_F(RunTokenTest, AWriterThatGivesUpRemovesItsOwnFolderAlone) {
  auto older = std::make_unique<NewState>(run_ / "step-20", "1");
  NewState newer(run_ / "step-20", "2");
  const FileEntry entry = add_file(newer, kWeightsFile, safetensors_bytes({}));
  older.reset();
  newer.commit({.step = 20, .files = {entry}}, /*update_latest=*/true);
  EXPECT_EQ(find_state(run_), run_ / "step-20");
}

TEST_F(RunTokenTest, AnOldersFolderWithOtherFilesStays) {
  NewState older(run_ / "step-20", "1");
  put_bytes(older.directory() / "notes.txt", "mine");
  const NewState newer(run_ / "step-20", "2");
  EXPECT_THAT(newer.notes(),
              ElementsAre(HasSubstr("has files that are not of a state, and stays")));
  EXPECT_EQ(bytes_in(older.directory() / "notes.txt"), "mine");
}

}  // namespace
}  // namespace zeropage::state::run_token_test
