// The ranks of one run: rank 0 says what comes next, and all of them do it at the same time.
//
// Lifetime: one in each rank's process, made and dropped by all ranks together.
// Threads: one calls.
// Throws: on every rank that notices, when an operation fails or its result is wrong.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "bench/collectives/backend.h"
#include "bench/collectives/flags.h"
#include "zeropage/world.h"

namespace collectives {

// A transport that was asked for and cannot be had here.
struct Absent {
  std::string transport;
  std::string reason;
};

class Team {
 public:
  // Meets the others in the store and connects every transport of the flags. Collective.
  Team(const zeropage::comm::Place& place, const c10::intrusive_ptr<c10d::Store>& store,
       const Flags& flags);

  int rank() const { return control_.rank(); }
  int size() const { return control_.size(); }
  // Those that could be had, in the order of the flags; the functions below take an index of it.
  const std::vector<std::string>& transports() const { return transports_; }
  const std::vector<Absent>& absent() const { return absent_; }

  // The next two are called on rank 0.
  // Runs the operation once with known values; throws unless every element is what it must be.
  void verify(const Case& measured, size_t transport);
  // Seconds of `iterations` operations one after the other, of the rank that took longest.
  double time(const Case& measured, size_t transport, int64_t iterations);
  // Ends the others' follow().
  void dismiss();

  // Called on the other ranks: does what rank 0 does, until it is dismissed.
  void follow();

 private:
  enum class Verb : int64_t { kVerify, kTime, kDismiss };
  struct Command {
    Verb verb = Verb::kDismiss;
    Case measured;
    size_t transport = 0;
    int64_t iterations = 0;
  };

  Command exchange(const Command& command);
  double perform(const Command& command);
  void verify_here(const Command& command);
  double time_here(const Command& command);
  Call call(const Case& measured) const;

  zeropage::comm::World control_;
  std::vector<std::string> transports_;
  std::vector<std::unique_ptr<Backend>> backends_;  // by transport
  std::vector<Absent> absent_;
  at::Tensor tensor_;  // [largest size], of which the operations take the front
};

}  // namespace collectives
