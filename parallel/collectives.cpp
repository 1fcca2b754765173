#include <algorithm>
#include <vector>

#include <ATen/ATen.h>

#include "memory/check.h"
#include "parallel/detail/kernels.h"

namespace zeropage::parallel::detail {

void refuse_second_derivative(const char* who, const std::string& name) {
  ZP_CHECK(!at::GradMode::is_enabled(), who, " of ", name,
           ": expected a plain backward, got one with create_graph=true; a second derivative over "
           "ranks is not supported, so keep this layer out of it");
}

at::Tensor compute_all_reduce(const at::Tensor& tensor, int64_t op, const RanksPointer& ranks,
                              const std::string& name) {
  at::Tensor reduced = tensor.clone(at::MemoryFormat::Contiguous);
  ranks->world.communicator()
      .all_reduce(reduced.view({-1}), static_cast<comm::ReduceOp>(op), name)
      .wait();
  return reduced;
}

at::Tensor compute_all_gather(const at::Tensor& slice, at::IntArrayRef sizes,
                              const RanksPointer& ranks, const std::string& name) {
  const comm::World& world = ranks->world;
  const int64_t own = sizes[static_cast<size_t>(world.rank())];
  ZP_CHECK(slice.dim() >= 1 && slice.size(-1) == own, name,
           ": expected a slice whose last dimension has ", own, " elements, got sizes ",
           slice.sizes(), "; give it what this rank's layers made");
  // Slices of a collective are equal, so the shorter ones are padded.
  const int64_t longest = *std::max_element(sizes.begin(), sizes.end());
  std::vector<int64_t> padded = {world.size()};
  padded.insert(padded.end(), slice.sizes().begin(), slice.sizes().end());
  padded.back() = longest;
  const at::Tensor whole = at::zeros(padded, slice.options());
  whole.select(0, world.rank()).narrow(-1, 0, own).copy_(slice);
  world.communicator().all_gather(whole.view({-1}), name).wait();
  std::vector<at::Tensor> slices;
  slices.reserve(static_cast<size_t>(world.size()));
  for (int rank = 0; rank < world.size(); ++rank) {
    slices.push_back(whole.select(0, rank).narrow(-1, 0, sizes[static_cast<size_t>(rank)]));
  }
  return at::cat(slices, -1);
}

}  // namespace zeropage::parallel::detail
