#include "parallel/rank_operators.h"

#include <torch/library.h>

#include "operators/operator_handle.h"
#include "parallel/detail/kernels.h"

namespace zeropage::parallel {
namespace {

TORCH_LIBRARY(zeropage, library) {
  register_ranks();
  library.def(
      "all_reduce(Tensor tensor, int op, __torch__.torch.classes.zeropage.Ranks ranks, str name) "
      "-> Tensor");
  library.def(
      "all_gather(Tensor slice, int[] sizes, int dim, "
      "__torch__.torch.classes.zeropage.Ranks ranks, str name) -> Tensor");
  library.def(
      "reduce_scatter(Tensor tensor, int[] sizes, int dim, "
      "__torch__.torch.classes.zeropage.Ranks ranks, str name) -> Tensor");
  library.def(
      "batch_norm_statistics(Tensor input, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
      "float momentum, __torch__.torch.classes.zeropage.Ranks ranks, str name) "
      "-> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("all_reduce", &detail::compute_all_reduce);
  library.impl("all_gather", &detail::compute_all_gather);
  library.impl("reduce_scatter", &detail::compute_reduce_scatter);
  library.impl("batch_norm_statistics", &detail::compute_batch_norm_statistics);
}

}  // namespace

void register_ranks() {
  static const torch::class_<Ranks> registered("zeropage", "Ranks");
}

at::Tensor all_reduce(const at::Tensor& tensor, comm::ReduceOp op, const RanksPointer& ranks,
                      const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::all_reduce", &detail::compute_all_reduce);
  return handle.call(tensor, static_cast<int64_t>(op), ranks, name);
}

at::Tensor all_gather(const at::Tensor& slice, at::IntArrayRef sizes, int64_t dim,
                      const RanksPointer& ranks, const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::all_gather", &detail::compute_all_gather);
  return handle.call(slice, sizes, dim, ranks, name);
}

at::Tensor reduce_scatter(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t dim,
                          const RanksPointer& ranks, const std::string& name) {
  static const auto handle =
      operators::operator_of("zeropage::reduce_scatter", &detail::compute_reduce_scatter);
  return handle.call(tensor, sizes, dim, ranks, name);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_statistics(
    const at::Tensor& input, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, double momentum, const RanksPointer& ranks,
    const std::string& name) {
  static const auto op = operators::operator_of("zeropage::batch_norm_statistics",
                                                &detail::compute_batch_norm_statistics);
  return op.call(input, running_mean, running_var, momentum, ranks, name);
}

}  // namespace zeropage::parallel
