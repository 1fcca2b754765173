#include <optional>
#include <utility>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "fused/head_tiles.h"
#include "fused/operators.h"
#include "parallel/rank_operators.h"
#include "parallel/slice_gradient.h"
#include "parallel/slice_mark.h"
#include "zeropage/check.h"
#include "zeropage/fused.h"

namespace zeropage::fused {
namespace {

using at::Tensor;
using parallel::RanksPointer;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kLoss = "zeropage::fused::linear_cross_entropy()";

struct LossSettings {
  int64_t ignore_index = 0;
  bool mean = true;
  int64_t tile_bytes = 0;
  std::optional<RanksPointer> ranks = {};
  int64_t classes = 0;
};

HeadArguments arguments_of(const Tensor& hidden, const Tensor& weight,
                           const std::optional<Tensor>& bias, const Tensor& targets,
                           const LossSettings& settings) {
  return {.hidden = hidden.reshape({-1, hidden.size(-1)}),
          .weight = weight,
          .bias = value_or_none(bias),
          .targets = targets.reshape({-1}).contiguous(),
          .ignore_index = settings.ignore_index,
          .tile_bytes = settings.tile_bytes,
          .ranks = settings.ranks.value_or(nullptr),
          .classes = settings.classes};
}

// What the sum is divided by. []
Tensor divisor_of(const HeadResults& head, bool mean) {
  if (!mean) return at::ones_like(head.count);
  ZP_CHECK(!head.count.is_cpu() || head.count.item<double>() > 0, kLoss,
           ": expected at least one target that counts, got none; leave such a batch out, or take "
           "LossOver::kSum and divide by the "
           "targets of all batches");
  return head.count;
}

class LossOfHead : public torch::autograd::Function<LossOfHead> {
 public:
  // wants_gradients: whether the caller's thread records them, which it does not within.
  static Tensor forward(AutogradContext* context, const Tensor& hidden, const Tensor& weight,
                        const std::optional<Tensor>& bias, const Tensor& targets,
                        const LossSettings& settings, bool wants_gradients) {
    HeadArguments head = arguments_of(hidden, weight, bias, targets, settings);
    head.of_hidden = wants_gradients && hidden.requires_grad();
    head.of_weight = wants_gradients && weight.requires_grad();
    head.of_bias = wants_gradients && bias && bias->requires_grad();
    const HeadResults results = head_in_tiles(head);
    const Tensor divisor = divisor_of(results, settings.mean);
    // No saved tensors: whoever offloads those, or computes them again, would move what backward needs at once.
    if (head.of_hidden) context->saved_data["of_hidden"] = results.of_hidden.view(hidden.sizes());
    if (head.of_weight) context->saved_data["of_weight"] = results.of_weight;
    if (head.of_bias) context->saved_data["of_bias"] = results.of_bias;
    context->saved_data["biased"] = bias.has_value();
    context->saved_data["divisor"] = divisor;
    context->saved_data["dtype"] = hidden.scalar_type();
    return results.loss / divisor;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_derivative("linear_cross_entropy()");
    auto& kept = context->saved_data;
    const Tensor factor = gradients[0] / kept["divisor"].toTensor();
    const auto dtype = kept["dtype"].toScalarType();
    // Each is given once, when it is asked for: who splits a backward asks for the input's and for the weight's by turns.
    const auto scaled = [&](const char* name, size_t edge) {
      if (!context->needs_input_grad(edge)) return Tensor();
      const auto found = kept.find(name);
      ZP_CHECK(found != kept.end(), kLoss,
               ": expected one backward, got a second one over a retained graph, whose gradients "
               "the first has taken; run "
               "forward again, or add the losses up before one backward");
      Tensor gradient = std::move(found->second).toTensor();
      kept.erase(found);
      return gradient.mul_(factor).to(dtype);
    };
    const Tensor of_hidden = scaled("of_hidden", 0);
    const Tensor of_weight = scaled("of_weight", 1);
    const bool biased = kept["biased"].toBool();
    const Tensor of_bias = biased ? scaled("of_bias", 2) : Tensor();
    return {of_hidden, of_weight, of_bias, Tensor(), Tensor(), Tensor()};
  }
};

LossSettings settings_of(int64_t ignore_index, bool mean, int64_t tile_bytes,
                         const std::optional<RanksPointer>& ranks, int64_t classes) {
  return {.ignore_index = ignore_index,
          .mean = mean,
          .tile_bytes = tile_bytes,
          .ranks = ranks,
          .classes = classes};
}

Tensor loss_with_gradients(const Tensor& hidden, const Tensor& weight,
                           const std::optional<Tensor>& bias, const Tensor& targets,
                           int64_t ignore_index, bool mean, int64_t tile_bytes,
                           const std::optional<RanksPointer>& ranks, int64_t classes) {
  return LossOfHead::apply(hidden, weight, bias, targets,
                           settings_of(ignore_index, mean, tile_bytes, ranks, classes),
                           at::GradMode::is_enabled());
}

Tensor loss(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
            const Tensor& targets, int64_t ignore_index, bool mean, int64_t tile_bytes,
            const std::optional<RanksPointer>& ranks, int64_t classes) {
  const HeadResults results = head_in_tiles(arguments_of(
      hidden, weight, bias, targets, settings_of(ignore_index, mean, tile_bytes, ranks, classes)));
  return results.loss / divisor_of(results, mean);
}

TORCH_LIBRARY_FRAGMENT(zeropage, library) {
  parallel::register_ranks();
  library.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, int "
      "ignore_index, bool mean, "
      "int tile_bytes, __torch__.torch.classes.zeropage.Ranks? ranks, int classes) -> Tensor");
}
TORCH_LIBRARY_IMPL(zeropage, Autograd, library) {
  library.impl("linear_cross_entropy", &loss_with_gradients);
}
TORCH_LIBRARY_IMPL(zeropage, CompositeExplicitAutograd, library) {
  library.impl("linear_cross_entropy", &loss);
}

// How tensor_parallel() cut the classes; null where it did not.
const parallel::SliceMark* cut_of(const Tensor& weight, const Tensor& bias) {
  const parallel::SliceMark* const mark = parallel::slice_mark_of(weight);
  if (mark == nullptr || mark->ranks().size() == 1) return nullptr;
  ZP_CHECK(mark->cut().dim() == 0 && mark->cut().parts().size() == 1, kLoss, ": expected ",
           mark->who(), " whole or cut by classes, got one that is cut in dimension ",
           mark->cut().dim(), "; plan it as a column, or leave it whole");
  ZP_CHECK(!bias.defined() || parallel::slice_mark_of(bias) != nullptr, kLoss,
           ": expected the bias of ", mark->who(),
           " cut as the weight is, got a whole one; give the layer's own bias");
  return mark;
}

}  // namespace

Tensor linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                            const LinearCrossEntropyOptions& options, const Tensor& bias) {
  static const auto handle = operator_of("zeropage::linear_cross_entropy", &loss);
  check_alike("linear_cross_entropy()", hidden, weight, "the weight");
  ZP_CHECK(weight.dim() == 2 && hidden.dim() >= 1 && hidden.size(-1) == weight.size(1), kLoss,
           ": expected a weight of [classes, ", hidden.dim() >= 1 ? hidden.size(-1) : 0,
           "] for hidden states of ", hidden.sizes(), ", got ", weight.sizes());
  ZP_CHECK(targets.scalar_type() == at::kLong &&
               targets.sizes() == hidden.sizes().slice(0, static_cast<size_t>(hidden.dim() - 1)),
           kLoss, ": expected int64 targets of ",
           hidden.sizes().slice(0, static_cast<size_t>(hidden.dim() - 1)), ", got ",
           targets.scalar_type(), " of ", targets.sizes(), "; give one class for each token");
  if (bias.defined()) {
    check_alike("linear_cross_entropy()", hidden, bias, "the bias");
    ZP_CHECK(bias.dim() == 1 && bias.size(0) == weight.size(0), kLoss, ": expected a bias of [",
             weight.size(0), "], got ", bias.sizes());
  }
  ZP_CHECK(options.tile_bytes >= 0, kLoss, ": expected tile_bytes of 0 (the default) or more, got ",
           options.tile_bytes);
  const parallel::SliceMark* const cut = cut_of(weight, bias);
  std::optional<RanksPointer> ranks;
  if (cut != nullptr) {
    ranks = cut->group();
    parallel::watch_gradient(weight);
    if (bias.defined()) parallel::watch_gradient(bias);
  }
  const int64_t classes = cut == nullptr ? weight.size(0) : cut->cut().total();
  const parallel::SlicesAsTheyAre as_they_are;
  return handle.call(hidden, weight, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt,
                     targets, options.ignore_index, options.over == LossOver::kMean,
                     options.tile_bytes, ranks, classes);
}

}  // namespace zeropage::fused
