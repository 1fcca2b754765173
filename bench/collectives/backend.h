// One way to run the collectives: what the bench compares.
//
// Lifetime: every rank makes and drops its backends at the same point of the program. Threads: one
// calls. Throws what the implementation throws.
#pragma once

#include <memory>
#include <string>

#include <ATen/core/TensorBody.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bench/collectives/case.h"
#include "zeropage/world.h"

namespace collectives {

struct Call {
  Operation operation = Operation::kBarrier;
  at::Tensor whole;  // [ranks * slice_numel], fp32
  at::Tensor slice;  // [slice_numel], this rank's part of `whole`
  int root = 0;      // of a broadcast
};

class Backend {
 public:
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // One operation, from its start to its end on this rank. Sums; in place.
  virtual void run(const Call& call) = 0;

 protected:
  Backend() = default;
};

// "shared", "gloo": our communicators; "c10d": ProcessGroupGloo with its own collectives. The ranks
// meet in `store`, which must be this backend's alone. Collective; throws if it cannot be had.
std::unique_ptr<Backend> make_backend(const std::string& transport,
                                      const zeropage::comm::Place& place,
                                      c10::intrusive_ptr<c10d::Store> store);

std::unique_ptr<Backend> make_c10d_backend(const zeropage::comm::Place& place,
                                           const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace collectives
