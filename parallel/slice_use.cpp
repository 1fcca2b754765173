#include "parallel/slice_use.h"

#include <string_view>
#include <unordered_set>

#include <ATen/core/enum_tag.h>

#include "operators/operator_schema.h"

namespace zeropage::parallel {
namespace {

using Names = std::unordered_set<std::string_view>;

bool reads_sizes_alone(std::string_view name) {
  static const Names kNames = {"aten::detach",
                               "aten::detach_",
                               "aten::alias",
                               "aten::requires_grad_",
                               "aten::retain_grad",
                               "aten::is_same_size",
                               "aten::size",
                               "aten::stride",
                               "aten::is_floating_point",
                               "aten::is_complex",
                               "aten::is_pinned",
                               "aten::result_type",
                               "aten::record_stream",
                               "aten::_has_compatible_shallow_copy_type",
                               "aten::_has_same_storage_numel"};
  return name.ends_with("_like") || name.starts_with("aten::new_") || kNames.contains(name);
}

// LibTorch 2.11 tags most of them as reductions, and 2.9 has no such tag.
bool tells_figures(std::string_view name) {
  static const Names kNames = {"aten::all",
                               "aten::allclose",
                               "aten::amax",
                               "aten::amin",
                               "aten::aminmax",
                               "aten::any",
                               "aten::argmax",
                               "aten::argmin",
                               "aten::count_nonzero",
                               "aten::dist",
                               "aten::equal",
                               "aten::_foreach_max",
                               "aten::_foreach_norm",
                               "aten::_foreach_powsum",
                               "aten::frobenius_norm",
                               "aten::histc",
                               "aten::linalg__powsum",
                               "aten::linalg_norm",
                               "aten::linalg_vector_norm",
                               "aten::logsumexp",
                               "aten::max",
                               "aten::mean",
                               "aten::median",
                               "aten::min",
                               "aten::nanmean",
                               "aten::nansum",
                               "aten::norm",
                               "aten::prod",
                               "aten::quantile",
                               "aten::std",
                               "aten::std_mean",
                               "aten::sum",
                               "aten::var",
                               "aten::var_mean"};
  return kNames.contains(name);
}

// LibTorch tags most of them as pointwise, but not these.
bool treats_elements_alike(std::string_view name) {
  static const Names kNames = {"aten::copy_",        "aten::zero_",   "aten::fill_",
                               "aten::fill",         "aten::to",      "aten::_to_copy",
                               "aten::contiguous",   "aten::where",   "aten::rsub",
                               "aten::masked_fill_", "aten::isclose", "aten::set_"};
  return name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_adam") ||
         name.starts_with("aten::_fused_sgd") || name.starts_with("aten::_fused_adagrad") ||
         kNames.contains(name);
}

// aten::max and aten::min are of all elements, along a dimension, or of two tensors.
bool is_of_two(const c10::OperatorName& name) {
  const bool may_be = name.name == "aten::max" || name.name == "aten::min";
  return may_be && (name.overload_name == "other" || name.overload_name == "out");
}

}  // namespace

SliceUse slice_use_of(const c10::OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  if (operators::draws(op))
    return name.ends_with("_like") ? SliceUse::kDrawsLike : SliceUse::kDraws;
  if (reads_sizes_alone(name)) return SliceUse::kSizes;
  if (is_of_two(op.operator_name())) return SliceUse::kElements;
  if (tells_figures(name)) return SliceUse::kFigures;
  if (op.hasTag(at::Tag::pointwise) || treats_elements_alike(name)) return SliceUse::kElements;
  return SliceUse::kOther;
}

}  // namespace zeropage::parallel
