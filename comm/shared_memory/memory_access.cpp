#include "comm/shared_memory/memory_access.h"

#include <fstream>
#include <mutex>
#include <sys/prctl.h>
#include <unistd.h>

namespace zeropage::comm::detail {
namespace {

// The permission is the process's, as its ranks may be threads.
struct Permission {
  std::mutex mutex;
  int users = 0;        // guarded by mutex
  bool is_set = false;  // guarded by mutex
};

Permission& permission() {
  static Permission of_process;
  return of_process;
}

bool is_needed() {
  std::ifstream scope("/proc/sys/kernel/yama/ptrace_scope");
  int value = 0;
  return scope >> value && value == 1;
}

}  // namespace

SiblingsMayRead::SiblingsMayRead() {
  Permission& shared = permission();
  const std::lock_guard lock(shared.mutex);
  if (shared.users++ > 0 || !is_needed()) return;
  shared.is_set = prctl(PR_SET_PTRACER, getppid(), 0, 0, 0) == 0;
}

SiblingsMayRead::~SiblingsMayRead() {
  Permission& shared = permission();
  const std::lock_guard lock(shared.mutex);
  if (--shared.users > 0 || !shared.is_set) return;
  prctl(PR_SET_PTRACER, 0, 0, 0, 0);
  shared.is_set = false;
}

int SiblingsMayRead::count() {
  Permission& shared = permission();
  const std::lock_guard lock(shared.mutex);
  return shared.users;
}

}  // namespace zeropage::comm::detail
