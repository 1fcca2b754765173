// Which threads of this process are ranks: what belongs to the process is shared by several of them.
//
// Threads: any.
#pragma once

#include <thread>

namespace zeropage::base {

// While it lives, the thread that made it is a rank. A thread may be one several times over.
class RankThread {
 public:
  RankThread();
  ~RankThread();
  RankThread(const RankThread&) = delete;
  RankThread& operator=(const RankThread&) = delete;

 private:
  const std::thread::id thread_;
};

// Whether two or more threads of this process are ranks now.
bool ranks_are_threads();

}  // namespace zeropage::base
