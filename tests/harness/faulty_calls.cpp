#include "tests/harness/faulty_calls.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <fcntl.h>
#include <linux/fs.h>
#include <mutex>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace zeropage::testing {
namespace {

constexpr size_t kMostDescriptors = 4096;

std::mutex mutex;
// Guarded by mutex.
FaultPlan plan;
int64_t calls = 0;
std::string call_of_fault;
std::string judged_part;
CallJudge call_judge;
// By descriptor, of the files that the plan or the judge is about. "": others.
std::array<std::string, kMostDescriptors> watched;

bool is_of_plan(const std::string& path) {
  return !plan.folder.empty() && path.starts_with(plan.folder);
}

bool is_judged(const std::string& path) {
  return !judged_part.empty() && path.find(judged_part) != std::string::npos;
}

bool has_slot(int descriptor) {
  return descriptor >= 0 && static_cast<size_t>(descriptor) < kMostDescriptors;
}

std::string path_of(const char* path) {
  return path;
}

std::string path_of(int descriptor) {
  return has_slot(descriptor) ? watched[static_cast<size_t>(descriptor)] : std::string();
}

enum class Verdict : uint8_t { kGoOn, kFails, kIsShort, kIsTorn };

Verdict verdict_of(const FaultOfCall& fault) {
  switch (fault.fault) {
    case Fault::kNone:
      return Verdict::kGoOn;
    case Fault::kKill:
      ::kill(::getpid(), SIGKILL);
      return Verdict::kFails;
    case Fault::kFail:
      errno = fault.error;
      return Verdict::kFails;
    case Fault::kShort:
      return Verdict::kIsShort;
    case Fault::kTorn:
      return Verdict::kIsTorn;
  }
  return Verdict::kGoOn;
}

// Counts the call, if it is about what is watched.
template <typename PathOrDescriptor>
Verdict look(const char* call, PathOrDescriptor what) {
  std::unique_lock lock(mutex);
  const std::string path = path_of(what);
  if (is_judged(path)) {
    const CallJudge judge = call_judge;
    lock.unlock();
    return verdict_of(judge(call, path));
  }
  if (!is_of_plan(path)) return Verdict::kGoOn;
  ++calls;
  const bool due =
      plan.fault != Fault::kNone && (calls == plan.at || (plan.for_good && calls > plan.at));
  if (!due) return Verdict::kGoOn;
  if (call_of_fault.empty()) call_of_fault = call;
  return verdict_of({plan.fault, plan.error});
}

}  // namespace

void plan_faults(const FaultPlan& new_plan) {
  const std::lock_guard lock(mutex);
  plan = new_plan;
  calls = 0;
  call_of_fault.clear();
  watched.fill({});
}

void judge_calls(const std::string& part, const CallJudge& judge) {
  const std::lock_guard lock(mutex);
  judged_part = part;
  call_judge = judge;
}

int64_t calls_so_far() {
  const std::lock_guard lock(mutex);
  return calls;
}

std::string faulty_call() {
  const std::lock_guard lock(mutex);
  return call_of_fault;
}

namespace {

template <typename... Arguments>
int kernel(const char* name, const char* path, long number, Arguments... arguments) {
  if (look(name, path) == Verdict::kFails) return -1;
  return static_cast<int>(::syscall(number, arguments...));
}

template <typename... Arguments>
int kernel(const char* name, int descriptor, long number, Arguments... arguments) {
  if (look(name, descriptor) == Verdict::kFails) return -1;
  return static_cast<int>(::syscall(number, arguments...));
}

}  // namespace
}  // namespace zeropage::testing

// In place of libc's.
extern "C" {

using zeropage::testing::kernel;

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const auto mode = static_cast<mode_t>((flags & O_CREAT) != 0 ? va_arg(arguments, int) : 0);
  va_end(arguments);
  const int descriptor = kernel("open", path, SYS_openat, AT_FDCWD, path, flags, mode);
  const std::lock_guard lock(zeropage::testing::mutex);
  if (zeropage::testing::has_slot(descriptor)) {
    const bool is_ours = zeropage::testing::is_of_plan(path) || zeropage::testing::is_judged(path);
    zeropage::testing::watched[static_cast<size_t>(descriptor)] = is_ours ? path : "";
  }
  return descriptor;
}

ssize_t pwrite(int descriptor, const void* from, size_t bytes, off_t offset) {
  using zeropage::testing::Verdict;
  const Verdict verdict = zeropage::testing::look("pwrite", descriptor);
  if (verdict == Verdict::kFails) return -1;
  const size_t all = bytes;
  if (verdict != Verdict::kGoOn && bytes > 1) bytes /= 2;
  // Whole sectors are written past the page cache, or none.
  const bool direct = (::fcntl(descriptor, F_GETFL) & O_DIRECT) != 0;
  if (direct && verdict != Verdict::kGoOn) bytes = (bytes + 4095) / 4096 * 4096;
  const ssize_t written = ::syscall(SYS_pwrite64, descriptor, from, bytes, offset);
  return verdict == Verdict::kIsTorn && written >= 0 ? static_cast<ssize_t>(all) : written;
}

int fsync(int descriptor) {
  return kernel("fsync", descriptor, SYS_fsync, descriptor);
}
int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
  return kernel("fallocate", descriptor, SYS_fallocate, descriptor, mode, offset, bytes);
}
int ftruncate(int descriptor, off_t bytes) noexcept {
  return kernel("ftruncate", descriptor, SYS_ftruncate, descriptor, bytes);
}
int close(int descriptor) {
  const int result = kernel("close", descriptor, SYS_close, descriptor);
  const std::lock_guard lock(zeropage::testing::mutex);
  if (zeropage::testing::has_slot(descriptor)) {
    zeropage::testing::watched[static_cast<size_t>(descriptor)].clear();
  }
  return result;
}
int mkdir(const char* path, mode_t mode) noexcept {
  return kernel("mkdir", path, SYS_mkdir, path, mode);
}
int rmdir(const char* path) noexcept {
  return kernel("rmdir", path, SYS_rmdir, path);
}
int unlink(const char* path) noexcept {
  return kernel("unlink", path, SYS_unlink, path);
}
int symlink(const char* target, const char* path) noexcept {
  return kernel("symlink", path, SYS_symlink, target, path);
}
int rename(const char* from, const char* to) noexcept {
  return kernel("rename", from, SYS_rename, from, to);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned flags) noexcept {
  return kernel("renameat2", from, SYS_renameat2, from_folder, from, to_folder, to, flags);
}

}  // extern "C"
