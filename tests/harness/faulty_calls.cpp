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
std::array<bool, kMostDescriptors> watched{};

bool is_watched(const char* path) {
  return !plan.folder.empty() && std::string(path).starts_with(plan.folder);
}

bool is_watched(int descriptor) {
  return descriptor >= 0 && static_cast<size_t>(descriptor) < kMostDescriptors &&
         watched[static_cast<size_t>(descriptor)];
}

enum class Verdict : uint8_t { kGoOn, kFails, kIsShort };

// Counts the call, if it is about what is watched.
template <typename PathOrDescriptor>
Verdict look(const char* call, PathOrDescriptor what) {
  const std::lock_guard lock(mutex);
  if (!is_watched(what)) return Verdict::kGoOn;
  ++calls;
  const bool due =
      plan.fault != Fault::kNone && (calls == plan.at || (plan.for_good && calls > plan.at));
  if (!due) return Verdict::kGoOn;
  if (call_of_fault.empty()) call_of_fault = call;
  if (plan.fault == Fault::kKill) ::kill(::getpid(), SIGKILL);
  if (plan.fault == Fault::kShort) return Verdict::kIsShort;
  errno = plan.error;
  return Verdict::kFails;
}

}  // namespace

void plan_faults(const FaultPlan& new_plan) {
  const std::lock_guard lock(mutex);
  plan = new_plan;
  calls = 0;
  call_of_fault.clear();
  watched.fill(false);
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
  if (descriptor >= 0 && static_cast<size_t>(descriptor) < zeropage::testing::kMostDescriptors) {
    zeropage::testing::watched[static_cast<size_t>(descriptor)] =
        zeropage::testing::is_watched(path);
  }
  return descriptor;
}

ssize_t pwrite(int descriptor, const void* from, size_t bytes, off_t offset) {
  using zeropage::testing::Verdict;
  const Verdict verdict = zeropage::testing::look("pwrite", descriptor);
  if (verdict == Verdict::kFails) return -1;
  if (verdict == Verdict::kIsShort && bytes > 1) bytes /= 2;
  // Whole sectors are written past the page cache, or none.
  const bool direct = (::fcntl(descriptor, F_GETFL) & O_DIRECT) != 0;
  if (direct && verdict == Verdict::kIsShort) bytes = (bytes + 4095) / 4096 * 4096;
  return ::syscall(SYS_pwrite64, descriptor, from, bytes, offset);
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
  if (zeropage::testing::is_watched(descriptor)) {
    zeropage::testing::watched[static_cast<size_t>(descriptor)] = false;
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
