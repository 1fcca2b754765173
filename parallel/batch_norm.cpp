#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/exact.h"
#include "parallel/detail/kernels.h"
#include "parallel/nodes_of_ranks.h"
#include "parallel/rank_operators.h"
#include "zeropage/check.h"
#include "zeropage/parallel_layers.h"

namespace zeropage::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

// The dtype in which statistics are applied. Exchanged they are in double precision, which costs nothing there.
at::ScalarType precision_of(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

at::Tensor in_precision(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// [channels] as [1, channels, 1, ...]
at::Tensor along(const at::Tensor& of_channels, const at::Tensor& input) {
  std::vector<int64_t> sizes(static_cast<size_t>(input.dim()), 1);
  sizes[1] = -1;
  return of_channels.view(sizes);
}

std::vector<int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<int64_t> dims = {0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// [1 + 2 * channels]: how many values a channel has, their mean, and the sum of their squared distances to it.
at::Tensor moments_of(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  const auto options = input.options().dtype(at::kDouble);
  if (input.numel() == 0) return at::zeros({1 + 2 * channels}, options);
  const auto count = static_cast<double>(base::div_exact(input.numel(), channels));
  const auto [var, mean] = at::var_mean(in_precision(input, precision_of(input)),
                                        all_but_channels(input), /*correction=*/at::Scalar(0));
  return at::cat(
      {at::full({1}, count, options), mean.to(at::kDouble), var.to(at::kDouble) * count});
}

// (input - mean) / sqrt(var + eps) * weight + bias. The gradient goes through the statistics too, on all ranks.
class BatchNormFunction : public torch::autograd::Function<BatchNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const at::Tensor& mean, const at::Tensor& var, const at::Tensor& count,
                            double eps, const RanksPointer& ranks, const std::string& name) {
    context->save_for_backward({input, weight.value_or(at::Tensor()), mean, var, count});
    context->saved_data["eps"] = eps;
    context->saved_data["ranks"] = ranks;
    context->saved_data["name"] = name;
    context->saved_data["has_bias"] = bias.has_value();
    if (input.numel() == 0) return at::empty_like(input);
    return std::get<0>(at::native_batch_norm(input, weight, bias, mean, var, /*training=*/false,
                                             /*momentum=*/0, eps));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string name = context->saved_data["name"].toStringRef();
    detail::refuse_second_derivative("batch norm over ranks", name);
    const auto saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &mean = saved[2], &var = saved[3],
                     &count = saved[4];
    const double eps = context->saved_data["eps"].toDouble();
    const auto dtype = precision_of(input);
    const at::Tensor x = in_precision(input, dtype);
    const bool is_empty = x.numel() == 0;
    at::Tensor of_input = at::empty_like(x), of_weight = at::zeros_like(mean),
               of_bias = at::zeros_like(mean);
    if (!is_empty) {
      // The gradient as if the statistics were constants.
      std::tie(of_input, of_weight, of_bias) = at::native_batch_norm_backward(
          in_precision(gradients[0], dtype), x, optional(weight), mean, var, {}, {},
          /*train=*/false, eps, {true, true, true});
    }
    if (context->needs_input_grad(0)) {
      const auto ranks = context->saved_data["ranks"].toCustomClass<Ranks>();
      const at::Tensor sums = at::cat({of_bias, of_weight}).to(at::kDouble);
      ranks->world.communicator().all_reduce(sums, comm::ReduceOp::kSum, name).wait();
      if (!is_empty) {
        // Through the mean and the variance, of which every rank's gradients are part.
        const auto means = (sums / count).to(dtype).chunk(2);
        const at::Tensor inverse = at::rsqrt(var + eps);
        const at::Tensor scale = weight.defined() ? inverse * weight : inverse;
        of_input.sub_((x - along(mean, x))
                          .mul_(along(scale * inverse * means[1], x))
                          .add_(along(scale * means[0], x)));
      }
    }
    variable_list all(9);
    all[0] = in_precision(of_input, input.scalar_type());
    if (weight.defined()) all[1] = of_weight;
    if (context->saved_data["has_bias"].toBool()) all[2] = of_bias;
    return all;
  }
};

}  // namespace

bool is_node_of_batch_norm(const torch::autograd::Node& node) {
  using torch::autograd::CppNode;
  return dynamic_cast<const CppNode<BatchNormFunction>*>(&node) != nullptr;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> detail::compute_batch_norm_statistics(
    const at::Tensor& input, const OptionalTensor& running_mean, const OptionalTensor& running_var,
    double momentum, const RanksPointer& ranks, const std::string& name) {
  const at::NoGradGuard no_grad;
  const int64_t channels = input.size(1);
  const comm::World& world = ranks->world;
  const at::Tensor own = moments_of(input);
  const at::Tensor all = at::empty({world.size(), own.numel()}, own.options());
  all.select(0, world.rank()).copy_(own);
  world.communicator().all_gather(all.view({-1}), name).wait();

  const at::Tensor counts = all.narrow(1, 0, 1);
  const at::Tensor means = all.narrow(1, 1, channels);
  const at::Tensor count = counts.sum(0);
  if (count.is_cpu()) {
    ZP_CHECK(count.item<double>() > 1, name,
             ": expected two or more values of a channel on all ranks together, got ",
             count.item<double>(), "; train with larger batches, or call eval()");
  }
  const at::Tensor mean = (counts * means).sum(0) / count;
  const at::Tensor squares =
      (all.narrow(1, 1 + channels, channels) + counts * (means - mean).square()).sum(0);
  if (running_mean)
    running_mean->mul_(1 - momentum).add_(mean.to(running_mean->scalar_type()), momentum);
  if (running_var) {
    running_var->mul_(1 - momentum)
        .add_((squares / (count - 1)).to(running_var->scalar_type()), momentum);
  }
  const auto dtype = precision_of(input);
  return {mean.to(dtype), (squares / count).to(dtype), count};
}

at::Tensor batch_norm_over_ranks(const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& bias, const at::Tensor& running_mean,
                                 const at::Tensor& running_var, double momentum, double eps,
                                 const RanksPointer& ranks, const std::string& name) {
  ZP_CHECK(input.dim() >= 2, name, ": expected an input of sizes [batch, channels, ...], got ",
           input.sizes(), "; add the dimensions that are missing");
  const auto dtype = precision_of(input);
  const auto [mean, var, count] = batch_norm_statistics(
      input.detach(), optional(running_mean), optional(running_var), momentum, ranks, name);
  return BatchNormFunction::apply(input, optional(in_precision(weight, dtype)),
                                  optional(in_precision(bias, dtype)), mean, var, count, eps, ranks,
                                  name);
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                                     const comm::World& world)
    : NormImplBase(options), ranks_(ranks_of(world)) {}

void SyncBatchNormImpl::_check_input_dim(const torch::Tensor& input) {
  const int64_t channels = options.num_features();
  ZP_CHECK(input.dim() >= 2 && input.size(1) == channels,
           "SyncBatchNorm: expected an input of sizes [batch, ", channels, ", ...], got ",
           input.sizes(), "; make the layer of as many features as its input has channels");
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input) {
  _check_input_dim(input);
  double factor = options.momentum().value_or(0);
  if (is_training() && options.track_running_stats()) {
    num_batches_tracked += 1;
    if (!options.momentum()) factor = 1 / num_batches_tracked.item<double>();
  }
  if (is_training() && ranks_->world.size() > 1) {
    return batch_norm_over_ranks(
        input, weight, bias, running_mean, running_var, factor, options.eps(), ranks_,
        c10::str("a SyncBatchNorm of ", options.num_features(), " channels"));
  }
  return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                   is_training() || !options.track_running_stats(),
                                                   factor, options.eps());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "zeropage::SyncBatchNorm(" << options.num_features()
         << ", ranks=" << ranks_->world.size() << ")";
}

}  // namespace zeropage::parallel
