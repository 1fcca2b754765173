// A thread that nobody joins, and that may be left behind.
//
// It is detached from its beginning. std::thread::detach() is not safe for a thread that may end at the same time: glibc reads the
// thread's memory after it has given it up, and by then the thread may have unmapped it (seen in glibc 2.36).
#pragma once

#include <functional>

namespace zeropage::comm::detail {

// body: must own all that it uses; what it throws ends the process. Throws std::system_error where no thread can be started.
void start_detached(std::function<void()> body);

}  // namespace zeropage::comm::detail
