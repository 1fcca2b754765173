// Whether this process has started an accelerator's driver. From then on it cannot fork ranks: CUDA
// answers a forked process with an initialisation error. The launcher asks before it forks.
//
// Two things show it. Code of this project that asks a driver notes it. And CUDA holds a file open once it has
// started, whoever
// started it: LibTorch, or the user's own code.
//
// The note is global to the process. Threads: any. Free of torch, for the launcher.
#pragma once

#include <string>

namespace zeropage::device {

// CUDA opens it when it starts; NVML, which survives a fork, does not.
inline constexpr const char* kDriverFile = "/dev/nvidia-uvm";

// who: the function that asks, such as "memory::device_count(cuda)". The first one is kept.
void note_driver_use(const std::string& who);

// The same of a build that has no such driver, so that nothing was started and ranks may be forked. It
// counts where ZEROPAGE_STRICT_FORK is set in the environment: tests on the host find who asks too early.
void note_driver_question(const std::string& who);

// What shows that a driver was started, as words in brackets; "" if nothing does. file: the beginning
// of the name of the driver's file.
std::string driver_use(const std::string& file = kDriverFile);

}  // namespace zeropage::device
