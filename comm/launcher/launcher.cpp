#include "zeropage/launcher.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>

#include "comm/launcher/rank_environment.h"
#include "comm/launcher/rank_supervisor.h"
#include "device/accelerator_driver.h"

namespace zeropage::comm {
namespace {

constexpr int kMostLocalRanks = 4096;
constexpr int kNotFound = 127;
constexpr int kNotExecutable = 126;

#if defined(__SANITIZE_THREAD__)
constexpr int kOwnThreads = 2;  // ThreadSanitizer runs one of its own
#else
constexpr int kOwnThreads = 1;
#endif

void check_options(const LaunchOptions& options) {
  if (options.ranks < 1 || options.ranks > kMostLocalRanks) {
    throw std::invalid_argument("zeropage launcher: expected 1 to " +
                                std::to_string(kMostLocalRanks) + " ranks, got " +
                                std::to_string(options.ranks) +
                                "; more ranks need more machines and their own launcher (srun)");
  }
  if (options.grace.count() < 0) {
    throw std::invalid_argument("zeropage launcher: expected a grace of 0 ms or more, got " +
                                std::to_string(options.grace.count()) +
                                " ms; 0 ends the other ranks at once");
  }
  if (options.restarts < 0 || options.restarts > detail::kMostRestarts) {
    throw std::invalid_argument("zeropage launcher: expected 0 to " +
                                std::to_string(detail::kMostRestarts) + " restarts, got " +
                                std::to_string(options.restarts));
  }
}

void check_single_thread() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int threads = 0;
  while (status >> word) {
    if (word == "Threads:") status >> threads;
  }
  if (threads > kOwnThreads) {
    throw std::runtime_error(
        "zeropage launcher: launch_function forks, which needs a process with 1 thread, got " +
        std::to_string(threads) +
        " (a fork copies only the calling thread: locks of the others would stay locked); call it "
        "before anything starts threads, first thing in main(), or start the program with zp run");
  }
}

void check_no_driver() {
  const std::string use = device::driver_use();
  if (!use.empty()) {
    throw std::runtime_error(
        "zeropage launcher: launch_function forks, which needs a process that has not started an "
        "accelerator's driver, and this one has (" +
        use +
        "): its ranks would get errors from the driver; ask for devices in the ranks only "
        "(memory::has_cuda_driver() asks without the driver), or start the program with zp run");
  }
}

// Pipes must not land on 0, 1 or 2 when we were started without them: the children's dup2 would mix
// them up.
void open_missing_standard_streams() {
  int fd = 0;
  while ((fd = ::open("/dev/null", O_RDWR)) >= 0 && fd <= STDERR_FILENO) {
  }
  if (fd >= 0) ::close(fd);
}

// Low bits that would hide a failure become 1.
int to_exit_code(int value) {
  const int low = value & 0xff;
  return value != 0 && low == 0 ? 1 : low;
}

void print_exception(int rank, std::string message) {
  if (std::getenv("TORCH_SHOW_CPP_STACKTRACES") == nullptr) {
    message.resize(std::min(message.find("\nException raised from "), message.size()));
  }
  while (!message.empty() && message.back() == '\n') message.pop_back();
  std::fprintf(stderr, "zeropage: rank %d ended by an exception: %s\n", rank, message.c_str());
}

// Lines should show when they are printed, and survive a crash. With a buffer that stdio finds by
// itself, glibc goes on filling the one it had before the fork.
void make_output_line_buffered() {
  static char buffer[BUFSIZ];
  std::setvbuf(stdout, buffer, _IOLBF, sizeof(buffer));
}

int run_function(const std::function<int()>& function, int rank) {
  int code = 1;
  try {
    code = to_exit_code(function());
  } catch (const std::exception& error) {
    print_exception(rank, error.what());
  } catch (...) {
    print_exception(rank, "of a type that is not a std::exception");
  }
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  return code;
}

int launch(const LaunchOptions& options, detail::RankSupervisor::MakeBody make_body) {
  detail::SignalRelay relay;
  detail::RankEnvironment environment;
  environment.world_size = options.ranks;
  // Held until rank 0 has it.
  const detail::PortSocket store = detail::bind_free_port();
  environment.master_port = store.port;
  environment.store_socket = store.socket.get();
  environment.launcher = ::getpid();
  detail::RankSupervisor supervisor(options, relay, environment, std::move(make_body));
  supervisor.start_ranks();
  return supervisor.run();
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& string : strings) pointers.push_back(string.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

int launch_program(const std::vector<std::string>& argv, const LaunchOptions& options) {
  check_options(options);
  if (argv.empty()) {
    throw std::invalid_argument(
        "zeropage launcher: expected a program and its arguments, got nothing; name the program");
  }
  open_missing_standard_streams();
  // Everything that allocates is done before the fork: other threads may hold the allocator's lock.
  std::vector<std::string> arguments = argv;
  const std::vector<char*> argument_pointers = pointers_to(arguments);
  std::vector<std::string> variables;
  std::vector<char*> variable_pointers;
  try {
    return launch(options, [&](const detail::RankEnvironment& environment) {
      variables = environment.merged_with_own();
      variable_pointers = pointers_to(variables);
      return [&](int status) {
        if (environment.rank == 0 && environment.store_socket >= 0) {
          ::fcntl(environment.store_socket, F_SETFD, 0);
        }
        ::execvpe(argument_pointers[0], argument_pointers.data(), variable_pointers.data());
        const int error = errno;
        [[maybe_unused]] const ssize_t told = ::write(status, &error, sizeof(error));
        return kNotExecutable;
      };
    });
  } catch (const detail::CannotExecute& failure) {
    detail::write_fully(STDERR_FILENO,
                        "zeropage: cannot start '" + argv[0] + "': " + failure.what() + "\n");
    return failure.error == ENOENT ? kNotFound : kNotExecutable;
  }
}

int launch_function(const std::function<int()>& function, const LaunchOptions& options) {
  check_options(options);
  check_single_thread();
  check_no_driver();
  open_missing_standard_streams();
  // What is buffered here would otherwise come out once more from every rank.
  std::cout.flush();
  std::fflush(nullptr);
  return launch(options, [&](const detail::RankEnvironment& environment) {
    const bool bare =
        environment.rank == 0 && options.output == LaunchOptions::Output::kRankZeroBare;
    return [&function, environment, bare](int status) {
      ::close(status);
      environment.apply();
      if (environment.rank != 0 && environment.store_socket >= 0) ::close(environment.store_socket);
      if (!bare) make_output_line_buffered();
      return run_function(function, environment.rank);
    };
  });
}

}  // namespace zeropage::comm
