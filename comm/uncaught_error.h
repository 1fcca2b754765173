// What a rank says of an exception that its program does not catch.
#pragma once

namespace zeropage::comm::detail {

// From here on such an exception ends the process with its message in a line, and not with some 25 lines of LibTorch's
// stack. TORCH_SHOW_CPP_STACKTRACES=1, and a program with a terminate handler of its own, keep theirs. Threads: any.
void say_uncaught_errors_shortly();

}  // namespace zeropage::comm::detail
