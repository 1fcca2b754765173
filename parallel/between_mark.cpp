#include "parallel/between_mark.h"

#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "parallel/detail/kernels.h"
#include "parallel/rank_operators.h"
#include "parallel/slice_mark.h"
#include "parallel/slice_use.h"
#include "zeropage/check.h"

namespace zeropage::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// One or two numbers may be the same by rounding.
constexpr int64_t kFewElements = 3;
constexpr int kMostAlikeOfFew = 3;

}  // namespace

class PartsSeen : public torch::CustomClassHolder {
 public:
  // All ranks find the same, but for one whose part is the mean of all.
  void check(const at::Tensor& own, const at::Tensor& sum, int ranks, const std::string& who,
             const std::string& name) {
    OfOperator& seen = seen_[name];
    if (seen.have_differed || ranks == 1 || own.is_meta()) return;
    if (!sum.equal(own * ranks)) {
      seen.have_differed = true;
      return;
    }
    if (!sum.any().item<bool>()) return;
    ++seen.alike;
    ZP_CHECK(own.numel() < kFewElements && seen.alike < kMostAlikeOfFew, who, ": expected each of ",
             ranks, " ranks to have a part of the gradient of ", name,
             ", as between a column and its row, got the same on all, so that the sum is ", ranks,
             " times too large; use the layer on slices alone, or leave it out of the plan");
  }

 private:
  struct OfOperator {
    bool have_differed = false;
    int alike = 0;  // so far
  };
  // Used by the thread that runs backward.
  std::unordered_map<std::string, OfOperator> seen_;
};

namespace {

// Forward gives what it is given. In backward each rank's gradient is a part.
class SumOfParts : public torch::autograd::Function<SumOfParts> {
 public:
  // is_own: nobody else has the tensor, so it becomes the result, which may be written in place as a view may not.
  static at::Tensor forward(AutogradContext* context, at::Tensor tensor,
                            const BetweenMark::Layer& layer,
                            const c10::intrusive_ptr<PartsSeen>& seen, const std::string& used_by,
                            bool is_own) {
    context->saved_data["ranks"] = layer.ranks;
    context->saved_data["name"] = layer.name;
    context->saved_data["who"] = layer.who;
    context->saved_data["seen"] = c10::IValue::make_capsule(seen);
    context->saved_data["used_by"] = used_by;
    if (!is_own) return tensor.view_as(tensor);
    context->mark_dirty({tensor});
    return tensor;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto& saved = context->saved_data;
    const std::string name = saved["name"].toStringRef();
    detail::refuse_second_derivative("a layer between a column and its row", name);
    const auto ranks = saved["ranks"].toCustomClass<Ranks>();
    at::Tensor sum = all_reduce(gradients[0], comm::ReduceOp::kSum, ranks, name);
    const auto seen = c10::static_intrusive_pointer_cast<PartsSeen>(saved["seen"].toCapsule());
    seen->check(gradients[0], sum, ranks->world.size(), saved["who"].toStringRef(),
                saved["used_by"].toStringRef());
    return {std::move(sum), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor without_mark(const at::Tensor& weight, bool is_transposed) {
  const SlicesAsTheyAre scope;
  const at::Tensor other_way = weight.t();
  return is_transposed ? other_way : other_way.t();
}

}  // namespace

BetweenMark::BetweenMark(std::shared_ptr<const Layer> layer, Of of)
    : BetweenMark(std::move(layer), of, c10::make_intrusive<PartsSeen>()) {}

BetweenMark::BetweenMark(std::shared_ptr<const Layer> layer, Of of,
                         c10::intrusive_ptr<PartsSeen> seen)
    : TensorMark(layer->who, On::kParameter),
      layer_(std::move(layer)),
      of_(of),
      seen_(std::move(seen)) {}

BetweenMark::~BetweenMark() = default;

bool BetweenMark::is_product(const c10::OperatorHandle& handle) const {
  const std::string_view name = handle.operator_name().name;
  if (of_ == Of::kWeight) return name == "aten::t" || name == "aten::linear";
  return of_ == Of::kTransposed && (name == "aten::matmul" || name == "aten::addmm");
}

bool BetweenMark::replaces(const c10::OperatorHandle& handle) const {
  if (!slices_are_seen() || !at::GradMode::is_enabled()) return false;
  const bool of_layer = of_ == Of::kWeight || of_ == Of::kTransposed;
  return of_layer ? is_product(handle) : slice_use_of(handle) != SliceUse::kSizes;
}

bool BetweenMark::run(const c10::OperatorHandle& handle, const at::Tensor& marked,
                      torch::jit::Stack& stack) {
  const std::string_view name = handle.operator_name().name;
  const bool is_read = slice_use_of(handle) != SliceUse::kSizes;
  if (of_ == Of::kParameter) {
    check_features(handle, marked, torch::jit::last(stack, handle.schema().arguments().size()));
  }
  // Without a gradient the values are those of the whole, and a frozen parameter needs none.
  if (!slices_are_seen() || !at::GradMode::is_enabled() || !is_read) return false;
  const size_t count = handle.schema().arguments().size();
  if (is_product(handle)) {
    at::Tensor result = product(handle, torch::jit::last(stack, count));
    torch::jit::drop(stack, count);
    torch::jit::push(stack, std::move(result));
    return true;
  }
  if (!marked.requires_grad()) return false;
  ZP_CHECK(
      of_ == Of::kParameter || of_ == Of::kBias, who(), ": expected a linear layer, got ", name,
      ", for which the gradient of the layer's input would be this rank's part alone; call the "
      "layer's forward()");
  // The weight's mark takes it along.
  if (of_ == Of::kBias && (name == "aten::linear" || name == "aten::addmm")) return false;
  add_up_gradient_of(handle, marked, stack);
  handle.callBoxed(&stack);
  return true;
}

void BetweenMark::check_features(const c10::OperatorHandle& handle, const at::Tensor& marked,
                                 at::ArrayRef<c10::IValue> arguments) const {
  static const std::unordered_set<std::string_view> kOfChannels = {
      "aten::prelu", "aten::group_norm", "aten::batch_norm", "aten::instance_norm"};
  static const std::unordered_set<std::string_view> kOfLast = {"aten::layer_norm",
                                                               "aten::rms_norm"};
  const std::string_view name = handle.operator_name().name;
  const bool of_channels = kOfChannels.contains(name);
  if (!of_channels && !kOfLast.contains(name)) return;
  const at::Tensor& input = arguments[0].toTensor();
  if (input.is_same(marked) || input.dim() == 0) return;
  // One number is for all channels.
  if (of_channels && (marked.numel() == 1 || input.dim() == 1)) return;
  const int64_t features = of_channels ? input.size(1) : input.size(-1);
  const int64_t expected = of_channels ? marked.numel() : marked.size(-1);
  ZP_CHECK(features == expected, who(), ": expected an input of ", expected,
           " features, as it has a number for each, got this rank's ", features, " to ", name,
           "; give it a number for all features, or for those of one head, which are then viewed "
           "by view({.., -1, head}), or use it before the column or behind the row");
}

void BetweenMark::add_up_gradient_of(const c10::OperatorHandle& handle, const at::Tensor& marked,
                                     torch::jit::Stack& stack) const {
  const size_t count = handle.schema().arguments().size();
  const at::Tensor summed = [&] {
    const SlicesAsTheyAre scope;
    return SumOfParts::apply(marked, *layer_, seen_, handle.operator_name().name, /*is_own=*/false);
  }();
  for (size_t index = 0; index < count; ++index) {
    c10::IValue& argument = torch::jit::peek(stack, index, count);
    if (argument.isTensor() && argument.toTensor().is_same(marked)) {
      argument = summed;
    } else if (argument.isTensorList()) {
      std::vector<at::Tensor> tensors = argument.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        if (tensor.is_same(marked)) tensor = summed;
      }
      argument = tensors;
    }
  }
}

at::Tensor BetweenMark::product(const c10::OperatorHandle& handle,
                                at::ArrayRef<c10::IValue> given) const {
  const std::string_view name = handle.operator_name().name;
  if (name == "aten::t") {
    const SlicesAsTheyAre scope;
    at::Tensor view = given[0].toTensor().t();
    operators::set_mark(view, c10::make_intrusive<BetweenMark>(layer_, Of::kTransposed, seen_));
    return view;
  }
  const size_t of_weight = name == "aten::addmm" ? 2 : 1;
  ZP_CHECK(given[of_weight].isTensor() && operators::mark_of(given[of_weight].toTensor()) == this,
           who(),
           ": expected it as the weight of a linear layer, got it as another argument; leave the "
           "layer out of the plan");
  const at::Tensor& weight = given[of_weight].toTensor();
  at::Tensor bias;
  if (name == "aten::addmm") {
    ZP_CHECK(given[3].toScalar().equal(1) && given[4].toScalar().equal(1), who(),
             ": expected torch::addmm without factors; leave the layer out of the plan");
    bias = given[0].toTensor();
  } else if (name == "aten::linear" && given[2].isTensor()) {
    bias = given[2].toTensor();
  }
  const at::Tensor& input = given[of_weight - 1].toTensor();
  const at::Tensor part = at::linear(input, without_mark(weight, of_ == Of::kTransposed));
  const at::Tensor output =
      SumOfParts::apply(part, *layer_, seen_, handle.operator_name().name, /*is_own=*/true);
  return bias.defined() ? output + bias : output;
}

}  // namespace zeropage::parallel
