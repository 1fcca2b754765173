#include "zero/layout/parameter_checks.h"

#include <algorithm>
#include <utility>

#include "memory/storage.h"
#include "paging/page_storages.h"
#include "zeropage/check.h"

namespace zeropage::zero {

Range reach(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {tensor.storage_offset(), tensor.storage_offset()};
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {tensor.storage_offset(), last + 1};
}

void check_can_be_placed(const NamedParameter& named, c10::Device device, bool from_tape) {
  const at::Tensor& tensor = named.tensor;
  const bool is_deferred = from_tape && tensor.is_meta();
  ZP_CHECK(tensor.device() == device || is_deferred, "parameter \"", named.name(),
           "\": expected it on ", device, ", got ", tensor.device(),
           device.is_meta()
               ? "; a simulated world has no values: construct the module as a DeferredModule"
               : "; move the whole module there with ->to(world.device()), or make the world on "
                 "that device (WorldOptions::device)");
  ZP_CHECK(!tensor.has_storage() || !paging::is_paged(*tensor.storage().unsafeGetStorageImpl()),
           "parameter \"", named.name(),
           "\" is sharded by another DistributedDataParallel, which is alive or has taken its "
           "values along; "
           "wrap a module once");
  ZP_CHECK(tensor.layout() == at::kStrided && tensor.has_storage(), "parameter \"", named.name(),
           "\": expected a dense tensor, got layout ", tensor.layout(), "; densify it first");
  ZP_CHECK(tensor.is_leaf(), "parameter \"", named.name(),
           "\": expected a leaf tensor, got the result of ", tensor.grad_fn()->name(),
           "; register the leaf itself");
  ZP_CHECK(tensor.is_non_overlapping_and_dense(), "parameter \"", named.name(), "\": sizes ",
           tensor.sizes(), " with strides ", tensor.strides(),
           " leave gaps or repeat elements; make it .contiguous() before registering it");
  const auto dtype = tensor.scalar_type();
  ZP_CHECK(!tensor.requires_grad() || dtype == at::kFloat || dtype == at::kDouble ||
               dtype == at::kBFloat16 || dtype == at::kHalf,
           "parameter \"", named.name(), "\" trains in ", dtype,
           ", whose gradients are not reduced over ranks; use float, double, bfloat16 or half");
}

void check_no_overlap(const std::vector<const NamedParameter*>& sharing) {
  std::vector<std::pair<Range, const NamedParameter*>> reaches;
  for (const NamedParameter* named : sharing) reaches.emplace_back(reach(named->tensor), named);
  std::sort(reaches.begin(), reaches.end(), [](const auto& left, const auto& right) {
    return left.first.begin < right.first.begin;
  });
  for (size_t i = 1; i < reaches.size(); ++i) {
    ZP_CHECK(
        reaches[i - 1].first.end <= reaches[i].first.begin, "parameters \"",
        reaches[i - 1].second->name(), "\" and \"", reaches[i].second->name(),
        "\" are different tensors over the same memory, so each would be updated by the other's "
        "gradient; to tie them, register one and the same tensor under both names");
  }
}

}  // namespace zeropage::zero
