// What a layer's router has done in training forwards with gradients, until somebody takes it.
//
// A checkpointed region's repetition counts nothing, for the first run has counted. What the region computes from what it
// takes within has the values again, without their graphs.
//
// Threads: as the layer.
#pragma once

#include <optional>

#include <ATen/core/TensorBody.h>

#include "fused/experts/routing.h"
#include "zeropage/experts.h"

namespace zeropage::fused {

class RouterNotes {
 public:
  // loss: of balance, []; undefined where the layer has none. Throws where many forwards have added what nobody has taken.
  void add(const Routing& routing, const at::Tensor& loss, const parallel::ExpertsOptions& options);

  // Sums since they were taken last; undefined or nullopt where there are none.
  at::Tensor take_loss();
  std::optional<parallel::RouterSums> take_sums();

  // How often each expert was chosen by this rank's tokens, [experts], int64; undefined: never since it was forgotten.
  const at::Tensor& load() const { return load_; }
  void forget_load() { load_ = at::Tensor(); }

 private:
  struct Untaken {
    at::Tensor loss;
    std::optional<parallel::RouterSums> sums;
    int forwards = 0;  // in both
    int task =
        -1;  // autograd's number of the backward that has repeated them; -1: they are no repetitions
  };
  Untaken& untaken();

  at::Tensor load_;
  Untaken of_forwards_;
  Untaken of_repetitions_;
};

}  // namespace zeropage::fused
