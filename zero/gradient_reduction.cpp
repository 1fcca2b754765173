#include "zero/gradient_reduction.h"

#include "memory/check.h"

namespace zeropage {

comm::Pending ReplicatedGradients::start(comm::Communicator& communicator, const at::Tensor& bucket,
                                         const std::string& what) const {
  return communicator.all_reduce(bucket, comm::ReduceOp::kMean, what);
}

comm::Pending OwnedGradients::start(comm::Communicator& communicator, const at::Tensor& bucket,
                                    const std::string& what) const {
  return communicator.reduce_scatter(bucket, comm::ReduceOp::kMean, what);
}

std::unique_ptr<GradientReduction> make_gradient_reduction(Stage stage) {
  switch (stage) {
    case Stage::kReplicated:
      return std::make_unique<ReplicatedGradients>();
    case Stage::kOptimizerState:
      return std::make_unique<OwnedGradients>();
    case Stage::kGradients:
    case Stage::kParameters:
      break;
  }
  ZP_THROW("stage ", static_cast<int>(stage),
           " has no gradient reduction in this version; use 0 or 1");
}

}  // namespace zeropage
