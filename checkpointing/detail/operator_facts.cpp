#include "checkpointing/detail/operator_facts.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <ATen/core/TensorBody.h>

#include "operators/operator_schema.h"

namespace zeropage::checkpointing::detail {
namespace {

bool returns(const c10::OperatorHandle& handle, const c10::Argument& argument) {
  const auto& results = handle.schema().returns();
  return std::any_of(results.begin(), results.end(), [&](const c10::Argument& result) {
    return result.alias_info() != nullptr && argument.alias_info() != nullptr &&
           result.alias_info()->beforeSets() == argument.alias_info()->beforeSets();
  });
}

OperatorFacts learn(const c10::OperatorHandle& handle) {
  OperatorFacts facts;
  facts.name = handle.operator_name().name;
  facts.is_composite = handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  facts.only_views = operators::only_views(handle);
  const auto& arguments = handle.schema().arguments();
  for (size_t index = 0; index < arguments.size(); ++index) {
    const std::string& name = arguments[index].name();
    const bool is_statistic = name == "running_mean" || name == "running_var";
    if (operators::is_written(arguments[index])) {
      facts.written.push_back(index);
      if (!returns(handle, arguments[index])) facts.filled.push_back(index);
    } else if (is_statistic) {
      facts.statistics.push_back(index);
    } else if (name == "training" || name == "train" || name == "use_input_stats") {
      facts.training = index;
    }
  }
  if (facts.training == 0) facts.statistics.clear();
  return facts;
}

void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  for (at::Tensor& tensor : operators::tensors_in(value)) {
    if (tensor.defined()) tensors.push_back(std::move(tensor));
  }
}

double numel_of(at::IntArrayRef sizes, size_t from) {
  double product = 1;
  for (size_t index = from; index < sizes.size(); ++index) {
    product *= static_cast<double>(sizes[index]);
  }
  return product;
}

// [..., n, k] times [..., k, m].
double product_flops(const at::Tensor& left, const at::Tensor& right) {
  return 2 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
}

// query [batch, heads, n, e], keys: how many each query meets, value [batch, heads, m, v]: scores and
// their product with the values, without regard to a causal mask.
double attention_flops(const at::Tensor& query, int64_t keys, const at::Tensor& value) {
  const int64_t rows = query.numel() / std::max<int64_t>(query.size(-1), 1);
  return 2 * static_cast<double>(rows) * static_cast<double>(keys) *
         static_cast<double>(query.size(-1) + value.size(-1));
}

// weight [out, in / groups, kernel...]: each output element costs in / groups x kernel products;
// a transposed one each input element.
double convolution_flops(at::ArrayRef<c10::IValue> arguments) {
  const at::Tensor& input = arguments[0].toTensor();
  const at::Tensor& weight = arguments[1].toTensor();
  const bool transposed = arguments[6].toBool();
  const double of_one = 2 * numel_of(weight.sizes(), 1);
  if (transposed) return of_one * static_cast<double>(input.numel());
  const auto stride = arguments[3].toIntVector(), padding = arguments[4].toIntVector(),
             dilation = arguments[5].toIntVector();
  double outputs = static_cast<double>(input.size(0)) * static_cast<double>(weight.size(0));
  for (int64_t axis = 2; axis < input.dim(); ++axis) {
    const auto at = [&](const std::vector<int64_t>& values) {
      return values.size() == 1 ? values[0] : values[static_cast<size_t>(axis - 2)];
    };
    const int64_t reach = at(dilation) * (weight.size(axis) - 1) + 1;
    const int64_t places = (input.size(axis) + 2 * at(padding) - reach) / at(stride) + 1;
    outputs *= static_cast<double>(places);
  }
  return outputs * of_one;
}

constexpr std::array<std::string_view, 4> kProducts = {"aten::mm", "aten::bmm", "aten::mv",
                                                       "aten::dot"};
constexpr std::array<std::string_view, 4> kProductsAfterAnAddend = {"aten::addmm", "aten::baddbmm",
                                                                    "aten::addbmm", "aten::addmv"};

template <size_t size>
bool among(const std::array<std::string_view, size>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_attention(std::string_view name) {
  return name.starts_with("aten::_scaled_dot_product_") && !name.ends_with("_backward");
}

bool is_convolution(std::string_view name) {
  return name == "aten::convolution" || name == "aten::_convolution";
}

// Nothing: it is no product.
std::optional<double> flops_of_product(const OperatorFacts& facts,
                                       at::ArrayRef<c10::IValue> arguments) {
  if (among(kProducts, facts.name)) {
    const at::Tensor& right = arguments[1].toTensor();
    if (right.dim() == 1) return 2 * static_cast<double>(arguments[0].toTensor().numel());
    return product_flops(arguments[0].toTensor(), right);
  }
  if (among(kProductsAfterAnAddend, facts.name)) {
    const at::Tensor& right = arguments[2].toTensor();
    if (right.dim() == 1) return 2 * static_cast<double>(arguments[1].toTensor().numel());
    return product_flops(arguments[1].toTensor(), right);
  }
  // The head's product. Its two others are of its backward, though it computes them at once.
  if (facts.name == "zeropage::linear_cross_entropy") {
    return product_flops(arguments[0].toTensor(), arguments[1].toTensor().t());
  }
  // Each row is multiplied by one expert's [out, in] of a weight [experts, out, in].
  if (facts.name == "zeropage::expert_linear") {
    return 2 * static_cast<double>(arguments[0].toTensor().numel()) *
           static_cast<double>(arguments[1].toTensor().size(1));
  }
  if (is_attention(facts.name)) {
    return attention_flops(arguments[0].toTensor(), arguments[1].toTensor().size(-2),
                           arguments[2].toTensor());
  }
  // A rank's queries meet the keys of all ranks, of which it has its own.
  if (facts.name == "zeropage::context_ring_forward") {
    return attention_flops(arguments[0].toTensor(), arguments[4].toInt(), arguments[2].toTensor());
  }
  if (is_convolution(facts.name)) return convolution_flops(arguments);
  return std::nullopt;
}

}  // namespace

const OperatorFacts& facts_of(const c10::OperatorHandle& handle) {
  // A schema lives as long as its operator is registered.
  thread_local std::unordered_map<const c10::FunctionSchema*, OperatorFacts> known;
  const c10::FunctionSchema* key = &handle.schema();
  const auto found = known.find(key);
  return found != known.end() ? found->second : known.emplace(key, learn(handle)).first->second;
}

std::vector<at::Tensor> written_tensors(const OperatorFacts& facts,
                                        at::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> tensors;
  for (const size_t index : facts.written) add_tensors(arguments[index], tensors);
  if (!facts.statistics.empty() && arguments[facts.training].toBool()) {
    for (const size_t index : facts.statistics) add_tensors(arguments[index], tensors);
  }
  return tensors;
}

double flops_of(const OperatorFacts& facts, at::ArrayRef<c10::IValue> arguments) {
  const auto flops = flops_of_product(facts, arguments);
  return flops ? std::max(1.0, *flops) : 0;
}

c10::Device place_of_arguments(at::ArrayRef<c10::IValue> arguments) {
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && !argument.toTensor().is_cpu()) {
      return argument.toTensor().device();
    }
  }
  return c10::kCPU;
}

}  // namespace zeropage::checkpointing::detail
