// Preloaded into a program, it holds it before main(), where LibTorch is loaded and no thread has begun, and runs main() in a fork for
// each request: a start takes milliseconds instead of 0.3 s. warm_program.h is the other end.
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "tests/harness/warm_messages.h"

namespace {

using Main = int (*)(int, char**, char**);

Main program_main = nullptr;

// In the fork. What is returned goes through the program's own exit().
int run_main(zeropage::testing::WarmRequest& request) {
  ::dup2(request.output, STDOUT_FILENO);
  ::dup2(request.output, STDERR_FILENO);
  ::close(request.output);
  // Called behind the destructors of all that main() constructed. Those of what was loaded before it take LibTorch longer than its start,
  // since each operator is deregistered in memory that is copied for it.
  ::on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        ::_exit(status);
      },
      nullptr);
  // Until the process ends: programs keep what argv points to.
  static std::string arguments;
  static std::vector<char*> argv;
  arguments = std::move(request.arguments);
  for (size_t at = 0; at < arguments.size(); at = arguments.find('\0', at) + 1)
    argv.push_back(&arguments[at]);
  argv.push_back(nullptr);
  return program_main(static_cast<int>(argv.size()) - 1, argv.data(), environ);
}

int run_requests(int, char**, char**) {
  const int socket = std::atoi(std::getenv(zeropage::testing::kWarmSocket));
  ::fcntl(socket, F_SETFD, FD_CLOEXEC);
  // What the program starts begins as always.
  ::unsetenv(zeropage::testing::kWarmSocket);
  ::unsetenv("LD_PRELOAD");
  zeropage::testing::WarmRequest request;
  while (zeropage::testing::receive_request(socket, request)) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(socket);
      return run_main(request);
    }
    ::close(request.output);
    int status = -1;
    if (child < 0 || ::waitpid(child, &status, 0) != child ||
        ::send(socket, &status, sizeof(status), MSG_NOSIGNAL) != sizeof(status))
      break;
  }
  ::_exit(0);
}

}  // namespace

// glibc's first call into a program, after its constructors of static objects.
extern "C" __attribute__((visibility("default"))) int __libc_start_main(Main main, int argc,
                                                                        char** argv, void (*init)(),
                                                                        void (*fini)(),
                                                                        void (*rtld_fini)(),
                                                                        void* stack_end) {
  using Start = int (*)(Main, int, char**, void (*)(), void (*)(), void (*)(), void*);
  const auto start = reinterpret_cast<Start>(::dlsym(RTLD_NEXT, "__libc_start_main"));
  if (std::getenv(zeropage::testing::kWarmSocket) != nullptr) {
    program_main = main;
    main = run_requests;
  }
  return start(main, argc, argv, init, fini, rtld_fini, stack_end);
}
