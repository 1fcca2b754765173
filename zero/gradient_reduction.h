// How gradients of the ranks become one, by stage.
//
// A page's bucket holds this rank's gradient of the page, at the offsets of the parameters. A
// reduction turns it, in place, into the mean over ranks, wherever this rank needs that to update
// what it owns.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"
#include "zero/options.h"
#include "zero/parameter_pages.h"

namespace zeropage {

class GradientReduction {
 public:
  virtual ~GradientReduction() = default;

  // bucket: [padded_numel]. `what` names the page in errors.
  virtual comm::Pending start(comm::Communicator& communicator, const at::Tensor& bucket,
                              const std::string& what) const = 0;
  virtual Ownership ownership() const = 0;
  // Whether the whole bucket is the mean afterwards, so that p.grad() may be read and changed.
  virtual bool leaves_whole_gradient() const = 0;
};

// Every rank gets the whole mean: 2 (N-1)/N bytes a gradient byte on the wire.
class ReplicatedGradients final : public GradientReduction {
 public:
  comm::Pending start(comm::Communicator& communicator, const at::Tensor& bucket,
                      const std::string& what) const override;
  Ownership ownership() const override { return Ownership::kWholePage; }
  bool leaves_whole_gradient() const override { return true; }
};

// Every rank gets the mean of its shard; elsewhere the bucket keeps the rank's own gradient:
// (N-1)/N bytes.
class OwnedGradients final : public GradientReduction {
 public:
  comm::Pending start(comm::Communicator& communicator, const at::Tensor& bucket,
                      const std::string& what) const override;
  Ownership ownership() const override { return Ownership::kShard; }
  bool leaves_whole_gradient() const override { return false; }
};

// The one place that reads the stage.
std::unique_ptr<GradientReduction> make_gradient_reduction(Stage stage);

}  // namespace zeropage
