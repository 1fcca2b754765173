// A test that ends by a signal says which case it was in, and where: GoogleTest prints nothing then, and a crash that comes
// once in a hundred runs is found by what that one run printed. Linked into every test binary.
#include <array>
#include <cstring>
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};

void write_text(const char* text) {
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

// The process ends anyway, so it may ask GoogleTest, which is not made for handlers of signals.
void report(int signal) {
  if (const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info()) {
    write_text("\ncrashed by ");
    write_text(::strsignal(signal));
    write_text(" in ");
    write_text(test->test_suite_name());
    write_text(".");
    write_text(test->name());
    write_text(", on this thread (`addr2line -Cfpie FILE ADDRESS` names the lines):\n");
  }
  std::array<void*, 64> frames;
  ::backtrace_symbols_fd(frames.data(), ::backtrace(frames.data(), frames.size()), STDERR_FILENO);
  ::raise(signal);  // SA_RESETHAND: ends the process as it would have ended
}

[[maybe_unused]] const bool kInstalled = [] {
  std::array<void*, 1> frame;
  ::backtrace(frame.data(), frame.size());  // loads what it needs, which a handler may not do
  struct sigaction action = {};
  action.sa_handler = &report;
  action.sa_flags = SA_RESETHAND | SA_NODEFER;
  for (const int signal : kSignals) ::sigaction(signal, &action, nullptr);
  return true;
}();

}  // namespace
