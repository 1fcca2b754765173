// A launcher run in a forked child whose stdout and stderr are files, so that a test can watch it
// and kill it.
//
// Lifetime: the destructor kills a launcher that still runs (its ranks die with it) and removes the
// files.
// Threads: forks, so the test process must have no other thread.
// Units: seconds.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <signal.h>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>

namespace zeropage::comm {

// Polls until `condition` holds; false after `seconds`.
inline bool holds_within(double seconds, const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

// A zombie counts as ended: who inherits it may be slow to reap.
inline bool is_running(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(stat, text)) return false;
  const char state = text[text.rfind(')') + 2];
  return state != 'Z' && state != 'X';
}

class LaunchedProcess {
 public:
  explicit LaunchedProcess(const std::function<int()>& launcher) {
    start_ = std::chrono::steady_clock::now();
    pid_ = ::fork();
    if (pid_ != 0) return;
    // A shell ignores them for what it runs in the background, and a launcher would leave them ignored.
    for (const int stop : {SIGHUP, SIGINT, SIGQUIT}) ::signal(stop, SIG_DFL);
    ::dup2(::open(out_.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_APPEND, 0600), STDOUT_FILENO);
    ::dup2(::open(err_.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_APPEND, 0600), STDERR_FILENO);
    try {
      ::_exit(launcher());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "launcher threw: %s\n", error.what());
      ::_exit(99);
    }
  }
  LaunchedProcess(const LaunchedProcess&) = delete;
  LaunchedProcess& operator=(const LaunchedProcess&) = delete;
  ~LaunchedProcess() {
    if (!ended_) {
      signal(SIGKILL);
      wait();
    }
    std::remove(out_.c_str());
    std::remove(err_.c_str());
  }

  void signal(int number) const { ::kill(pid_, number); }

  // Does not wait.
  bool has_ended() const {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == pid_;
  }

  // The exit code, or minus the signal that killed the launcher.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    ended_ = true;
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

  // From start to the end of wait().
  double seconds() const { return seconds_; }
  std::string out() const { return contents(out_); }
  std::string err() const { return contents(err_); }

  bool prints(const std::string& text) const {
    return holds_within(3.0, [&] { return out().find(text) != std::string::npos; });
  }

  // Waits for "key=<number>\n" on stdout; -1 when it does not come.
  int printed_number(const std::string& key) const {
    int number = -1;
    holds_within(3.0, [&] {
      const std::string text = out();
      const std::size_t at = text.find(key + "=");
      if (at == std::string::npos || text.find('\n', at) == std::string::npos) return false;
      number = std::atoi(text.c_str() + at + key.size() + 1);
      return true;
    });
    return number;
  }

 private:
  static std::string new_file() {
    std::string path = testing::TempDir() + "zeropage_launcher_XXXXXX";
    const int fd = ::mkstemp(path.data());
    if (fd >= 0) ::close(fd);
    return path;
  }
  static std::string contents(const std::string& path) {
    std::ifstream file(path);
    return (std::ostringstream() << file.rdbuf()).str();
  }

  std::string out_ = new_file();
  std::string err_ = new_file();
  std::chrono::steady_clock::time_point start_;
  double seconds_ = 0;
  bool ended_ = false;
  pid_t pid_ = -1;
};

}  // namespace zeropage::comm
