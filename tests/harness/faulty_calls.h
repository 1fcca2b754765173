// The operating system's calls that write, between a program and the kernel: counted, and at one of them
// the process is killed, or the call fails. For binaries that link faulty_calls.cpp; of their own code,
// not of shared libraries.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace zeropage::testing {

enum class Fault : uint8_t {
  kNone,   // calls are counted
  kKill,   // SIGKILL before the call does anything
  kFail,   // it fails with an errno, and does nothing
  kShort,  // a write writes half; other calls are as they are
  kTorn,   // the same, and the write says that it has written all
};

struct FaultPlan {
  std::string folder;  // calls about files in it; "" : none is counted
  Fault fault = Fault::kNone;
  int64_t at = 0;         // of the calls, from 1
  int error = 0;          // of kFail
  bool for_good = false;  // all calls from `at` on
};

// From here on; the count begins anew.
void plan_faults(const FaultPlan& plan);
int64_t calls_so_far();
// Name of the call at which the fault happened, such as "fsync"; "" if it has not.
std::string faulty_call();

struct FaultOfCall {
  Fault fault = Fault::kNone;
  int error = 0;  // of kFail
};
// Asked, beside the plan, about each call on a file whose path has `part` in it; on the thread that calls. For several plans at once.
using CallJudge = std::function<FaultOfCall(const std::string& call, const std::string& path)>;
void judge_calls(const std::string& part, const CallJudge& judge);

}  // namespace zeropage::testing
