// Lets the processes that the same launcher started read this one's memory, while it lives.
//
// Yama's default lets a process be read by its ancestors only; this names the launcher, whose children may
// read then. What the process had allowed before is not known to it: afterwards nobody but ancestors may.
//
// Lifetime: the permission ends with the last of them in a process.
// Threads: any. Throws: nothing.
#pragma once

namespace zeropage::comm::detail {

class SiblingsMayRead {
 public:
  SiblingsMayRead();
  ~SiblingsMayRead();
  SiblingsMayRead(const SiblingsMayRead&) = delete;
  SiblingsMayRead& operator=(const SiblingsMayRead&) = delete;

  // How many there are in this process.
  static int count();
};

}  // namespace zeropage::comm::detail
