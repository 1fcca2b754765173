#include <algorithm>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>

#include "parallel/detail/kernels.h"
#include "zeropage/check.h"

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

namespace {

int64_t wrapped(int64_t dim, const at::Tensor& tensor) {
  return dim < 0 ? dim + tensor.dim() : dim;
}

bool has_size(const at::Tensor& tensor, int64_t dim, int64_t size) {
  return dim >= 0 && dim < tensor.dim() && tensor.size(dim) == size;
}

// One slice behind the other, [ranks, slice]. Slices of a collective are equal, so all have the longest's
// size.
at::Tensor slices_in_a_row(const at::Tensor& like, at::IntArrayRef sizes, int64_t dim) {
  const auto [shortest, longest] = std::minmax_element(sizes.begin(), sizes.end());
  std::vector<int64_t> in_a_row = {static_cast<int64_t>(sizes.size())};
  in_a_row.insert(in_a_row.end(), like.sizes().begin(), like.sizes().end());
  in_a_row[static_cast<size_t>(dim) + 1] = *longest;
  return *shortest == *longest ? at::empty(in_a_row, like.options())
                               : at::zeros(in_a_row, like.options());
}

}  // namespace

at::Tensor compute_all_gather(const at::Tensor& slice, at::IntArrayRef sizes, int64_t dim,
                              const RanksPointer& ranks, const std::string& name) {
  const comm::World& world = ranks->world;
  const int64_t own = sizes[static_cast<size_t>(world.rank())];
  const int64_t cut = wrapped(dim, slice);
  ZP_CHECK(has_size(slice, cut, own), name, ": expected a slice of ", own,
           " elements in dimension ", dim, ", got sizes ", slice.sizes(),
           "; give it what this rank's layers made");
  const at::Tensor whole = slices_in_a_row(slice, sizes, cut);
  whole.select(0, world.rank()).narrow(cut, 0, own).copy_(slice);
  world.communicator().all_gather(whole.view({-1}), name).wait();
  std::vector<at::Tensor> slices;
  slices.reserve(sizes.size());
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    slices.push_back(whole.select(0, static_cast<int64_t>(rank)).narrow(cut, 0, sizes[rank]));
  }
  return at::cat(slices, cut);
}

at::Tensor compute_reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t dim,
                                  const RanksPointer& ranks, const std::string& name) {
  const comm::World& world = ranks->world;
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const int64_t cut = wrapped(dim, tensor);
  ZP_CHECK(has_size(tensor, cut, total), name, ": expected ", total, " elements in dimension ", dim,
           ", got sizes ", tensor.sizes(), "; give it the whole of what is cut");
  const at::Tensor slices = slices_in_a_row(tensor, sizes, cut);
  int64_t begin = 0;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    slices.select(0, static_cast<int64_t>(rank))
        .narrow(cut, 0, sizes[rank])
        .copy_(tensor.narrow(cut, begin, sizes[rank]));
    begin += sizes[rank];
  }
  world.communicator().reduce_scatter(slices.view({-1}), comm::ReduceOp::kSum, name).wait();
  // Copied, so that the other ranks' slices go.
  return slices.select(0, world.rank())
      .narrow(cut, 0, sizes[static_cast<size_t>(world.rank())])
      .clone(at::MemoryFormat::Contiguous);
}

}  // namespace zeropage::parallel::detail
