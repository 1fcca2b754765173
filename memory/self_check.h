// Tries what Zeropage needs of LibTorch beyond the interface that LibTorch documents, so that a
// release is refused for what it does and not for its number.
//
//   void check_trap() {
//     static SelfCheck check("sharded parameters", "stage 0 or 1", &probe_trap);
//     check.require();
//   }
//
// The probes run on tensors of a few elements, once a process, when the part that needs them is
// first used. They run on a thread of their own, so nothing of the caller's modes, hooks and ledger
// reaches them.
//
// Threads: any. The first one waits for the probes, and others for it. Within probes require()
// returns at once, as probes use what they check.
// Errors: a probe that fails, and an error of LibTorch's within one, are thrown by every require()
// with the release of LibTorch, what was expected, what came and what works without the part.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include <c10/util/StringUtil.h>

namespace zeropage::memory {

class SelfCheck {
 public:
  // part: what cannot be had from a LibTorch that fails. without: what can be used instead; empty:
  // nothing.
  SelfCheck(std::string part, std::string without, void (*probes)());

  // Cheap after the first call.
  void require();

 private:
  const std::string part_;
  const std::string without_;
  void (*const probes_)();
  std::atomic<bool> passed_ = false;
  std::mutex mutex_;
  bool has_run_ = false;  // guarded by mutex_
  std::string fault_;     // guarded by mutex_; empty: none
};

[[noreturn]] void throw_unexpected(const char* what, const std::string& expected,
                                   const std::string& got);

// A probe. what: names what is compared, or states what is true.
template <typename T>
void expect_of_libtorch(const char* what, const T& expected, const T& got) {
  if (!(expected == got)) throw_unexpected(what, c10::str(expected), c10::str(got));
}
inline void expect_of_libtorch(const char* what, bool got) {
  if (!got) throw_unexpected(what, "true", "false");
}

// What every world needs: storages and tensors keep their identity when they are given other memory.
// Another check runs before main(): that the LibTorch that is loaded is the one that Zeropage was compiled with.
void check_libtorch();

}  // namespace zeropage::memory
