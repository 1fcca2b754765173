// Plans of fewer samples than a script shows: while it lives on a thread, a micro-batch that is planned there has only the first
// of its samples.
//
// Samples are in dimension 0 of the first tensor that is shown; tensors with a multiple of as many are cut alike.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace zeropage::planning {

class FewerSamples {
 public:
  // pieces: of a micro-batch, of which the first is planned. 1: only looks how many samples there are.
  explicit FewerSamples(int64_t pieces);
  ~FewerSamples();
  FewerSamples(const FewerSamples&) = delete;
  FewerSamples& operator=(const FewerSamples&) = delete;

  // Samples of a whole micro-batch, once one was planned; 0: none was shown, as by a loss of the script's own.
  int64_t samples() const { return samples_; }
  // Those in the first piece.
  int64_t planned_samples() const { return (samples_ + pieces_ - 1) / pieces_; }

  // The sizes that a tensor of a sample is planned with on this thread.
  static std::vector<int64_t> sizes_of(const at::Tensor& tensor);

 private:
  const int64_t pieces_;
  FewerSamples* const before_;
  int64_t samples_ = 0;
};

}  // namespace zeropage::planning
