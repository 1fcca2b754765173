// How a program ends that a signal has ended after a save.
#pragma once

#include <csignal>

namespace examples {

// signal: StateSaver::stop_signal().
inline const char* name_of(int signal) {
  return signal == SIGINT ? "SIGINT" : "SIGTERM";
}

// The exit code of a process that the signal ends. Whoever started it may start it again.
inline int exit_code_of(int signal) {
  return 128 + signal;
}

}  // namespace examples
