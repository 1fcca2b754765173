#include "tests/harness/warm_program.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <map>
#include <spawn.h>
#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "tests/harness/warm_messages.h"

namespace zeropage::testing {

#ifdef WARM_START

namespace {

[[noreturn]] void fail(const std::string& program, const std::string& what) {
  throw std::runtime_error("warm start of " + program + ": " + what + ": " + std::strerror(errno));
}

// The words of a command, each ended by a zero.
std::string arguments_of(const std::string& command) {
  std::string arguments;
  for (size_t at = 0; (at = command.find_first_not_of(' ', at)) != std::string::npos;) {
    const size_t end = std::min(command.find(' ', at), command.size());
    arguments.append(command, at, end - at).push_back('\0');
    at = end;
  }
  return arguments;
}

class WarmProgram {
 public:
  explicit WarmProgram(std::string program) : program_(std::move(program)) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
      fail(program_, "expected a socket");
    socket_ = ends[0];
    const int passed_on = ::dup(ends[1]);  // which exec keeps open
    ::close(ends[1]);
    std::vector<std::string> variables;
    for (char** variable = environ; *variable != nullptr; ++variable)
      variables.emplace_back(*variable);
    variables.push_back("LD_PRELOAD=" WARM_START);
    variables.push_back(kWarmSocket + ("=" + std::to_string(passed_on)));
    std::vector<char*> environment;
    for (std::string& variable : variables) environment.push_back(variable.data());
    environment.push_back(nullptr);
    char* argv[] = {program_.data(), nullptr};
    errno = ::posix_spawn(&process_, program_.c_str(), nullptr, nullptr, argv, environment.data());
    const bool spawned = errno == 0;
    ::close(passed_on);
    if (!spawned) fail(program_, "expected a process");
  }

  WarmProgram(const WarmProgram&) = delete;
  WarmProgram& operator=(const WarmProgram&) = delete;

  ~WarmProgram() {
    ::close(socket_);
    ::waitpid(process_, nullptr, 0);
  }

  Outcome run(const std::string& arguments) {
    int output[2];
    if (::pipe2(output, O_CLOEXEC) != 0) fail(program_, "expected a pipe");
    const bool sent = send_request(socket_, {arguments, output[1]});
    ::close(output[1]);
    if (!sent) fail(program_, "expected that it takes a request");
    Outcome outcome;
    char buffer[4096];
    for (ssize_t count; (count = ::read(output[0], buffer, sizeof(buffer))) > 0;)
      outcome.output.append(buffer, static_cast<size_t>(count));
    ::close(output[0]);
    int status = -1;
    if (::recv(socket_, &status, sizeof(status), 0) != sizeof(status))
      fail(program_, "expected how the run ended");
    outcome.exit_code = exit_code_of(status);
    return outcome;
  }

 private:
  std::string program_;
  pid_t process_ = -1;
  int socket_ = -1;
};

}  // namespace

#endif

bool runs_warm([[maybe_unused]] const std::string& command) {
#ifdef WARM_START
  return command.starts_with('/') && command.size() < kMostBytes &&
         command.find_first_of("\"'`$\\&|;<>()*?[]{}~#!\t\n") == std::string::npos;
#else
  return false;
#endif
}

Outcome run_program(const std::string& command) {
#ifdef WARM_START
  if (runs_warm(command)) {
    static std::map<std::string, WarmProgram> programs;
    const std::string arguments = arguments_of(command), program = arguments.c_str();
    return programs.try_emplace(program, program).first->second.run(arguments);
  }
#endif
  return shell(command);
}

}  // namespace zeropage::testing
