// Batch norm over the batches of all ranks, as if they were one batch.
//
//   parallel::SyncBatchNorm norm(torch::nn::BatchNormOptions(64), world);
//
// A module that has torch::nn::BatchNorm1d, 2d or 3d needs no change: sync_batch_norm(module, world)
// (zero/sync_batch_norm.h) gives their forward to batch_norm_over_ranks().
//
// Batches may differ in size, and a rank's may be empty. In training every forward is a collective, and so
// is its backward where the input requires a gradient: all ranks run the same layers in the same order, and
// the loss of every rank depends on them. In eval mode, and with one rank, it is LibTorch's batch norm.
//
// Bits: all ranks compute the same statistics, in double precision from each rank's; so running statistics
// are the same on all ranks. Inputs of a lower precision are computed in fp32.
// Sent: a gather of 16 bytes a channel and 8 a rank in forward, an all-reduce of 16 bytes a channel in
// backward.
// Memory: what LibTorch's saves; a tensor of the input's size passes in backward.
#pragma once

#include <ostream>
#include <string>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include "comm/world.h"
#include "parallel/ranks.h"

namespace zeropage::parallel {

// Does what torch::batch_norm does in training. input: [batch, channels, ...]; the optional tensors: [channels]. name: for
// errors.
// Throws on all ranks alike where a channel has fewer than two values on all ranks together (on the host: on
// an accelerator the running variance becomes NaN, as nobody waits for the number).
at::Tensor batch_norm_over_ranks(const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& bias, const at::Tensor& running_mean,
                                 const at::Tensor& running_var, double momentum, double eps,
                                 const RanksPointer& ranks, const std::string& name);

// A BatchNorm of any number of dimensions whose training batches are those of all ranks. Without tensors
// (neither affine nor running statistics) it works too.
class SyncBatchNormImpl
    : public torch::nn::NormImplBase<0, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, const comm::World& world);

  // input: [batch, channels, ...]
  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  RanksPointer ranks_;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace zeropage::parallel
