#include "language_model/model/layers.h"

#include <cmath>
#include <numbers>

namespace language_model {

RotaryAngles rotary_angles(const ModelConfig& config, const torch::Tensor& positions,
                           torch::ScalarType of) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < config.head_width; i += 2) {
    double frequency = std::pow(config.rope_theta,
                                -static_cast<double>(i) / static_cast<double>(config.head_width));
    if (const auto& scaling = config.rope_scaling) {
      const double turns =
          static_cast<double>(scaling->original_context) * frequency / (2 * std::numbers::pi);
      // 0: slow ones, which are divided; 1: fast ones, which stay.
      const double share =
          std::clamp((turns - scaling->low_frequency_factor) /
                         (scaling->high_frequency_factor - scaling->low_frequency_factor),
                     0.0, 1.0);
      frequency *= share + (1 - share) / scaling->factor;
    }
    frequencies.push_back(static_cast<float>(frequency));
  }
  const torch::Tensor by_pair = torch::tensor(frequencies).to(positions.device());
  torch::Tensor angles = positions.to(torch::kFloat32).unsqueeze(-1) * by_pair;
  if (angles.size(0) == 1) angles = angles.squeeze(0);
  if (of == torch::kFloat64) angles = angles.to(of);
  return {angles.cos(), angles.sin()};
}

torch::Tensor attention(const torch::Tensor& queries, const torch::Tensor& keys,
                        const torch::Tensor& values, const AttentionMask& mask) {
  const int64_t batch = queries.size(0), heads = queries.size(1), length = queries.size(2);
  const int64_t width = queries.size(3), shared_by = heads / keys.size(1);
  const auto joined = [&](const torch::Tensor& mixed) {
    return mixed.transpose(1, 2).reshape({batch, length, heads * width});
  };
  if (mask.context != nullptr) {
    return joined(zeropage::parallel::context_attention(
        queries, keys, values, mask.context->ranks,
        {.is_causal = true, .form = mask.context->form, .documents = mask.documents}));
  }
  std::optional<torch::Tensor> seen;
  if (mask.seen.defined()) seen = mask.seen;
  if (length == 1 && !seen) {
    // One token: the queries that share a head of keys go as several queries of that head, and nothing is repeated.
    const torch::Tensor grouped = queries.reshape({batch, keys.size(1), shared_by, width});
    return joined(torch::scaled_dot_product_attention(grouped, keys, values, {}, mask.dropout)
                      .reshape({batch, heads, 1, width}));
  }
  const auto repeated = [&](const torch::Tensor& of_group) {
    if (shared_by == 1) return of_group;
    return of_group.unsqueeze(2)
        .expand({batch, of_group.size(1), shared_by, of_group.size(2), width})
        .reshape({batch, heads, of_group.size(2), width});
  };
  return joined(torch::scaled_dot_product_attention(queries, repeated(keys), repeated(values), seen,
                                                    mask.dropout, /*is_causal=*/!seen));
}

torch::Tensor head_loss(const torch::Tensor& x, const torch::Tensor& weight,
                        const torch::Tensor& targets) {
  using namespace zeropage::fused;
  const torch::Tensor sum =
      linear_cross_entropy(x, weight, targets, {.ignore_index = kIgnored, .over = LossOver::kSum});
  return sum / targets.ne(kIgnored).sum().clamp_min(1);
}

RmsNormImpl::RmsNormImpl(int64_t width, double epsilon)
    : weight(register_parameter("weight", torch::ones({width}))), epsilon_(epsilon) {}

zeropage::fused::Added RmsNormImpl::add(const torch::Tensor& x, const torch::Tensor& residual) {
  return zeropage::fused::add_rms_norm(x, residual, weight, epsilon_);
}

ProjectionImpl::ProjectionImpl(int64_t inputs, int64_t outputs, bool has_bias, Layout layout)
    : inputs_(inputs), outputs_(outputs), layout_(layout) {
  const bool outputs_first = layout == Layout::kOutputsFirst;
  weight = register_parameter(
      "weight", torch::zeros({outputs_first ? outputs : inputs, outputs_first ? inputs : outputs}));
  if (has_bias) bias = register_parameter("bias", torch::zeros({outputs}));
}

torch::Tensor ProjectionImpl::forward(const torch::Tensor& x) {
  torch::Tensor y =
      torch::linear(x, layout_ == Layout::kOutputsFirst ? weight : weight.t(),
                    bias.defined() ? std::optional<torch::Tensor>(bias) : std::nullopt);
  if (!has_adapter()) return y;
  const torch::Tensor input = torch::dropout(x, adapter_.dropout, is_training());
  const double scale = adapter_.alpha / static_cast<double>(adapter_.rank);
  return y + lora_b(lora_a(input)) * scale;
}

void ProjectionImpl::add_adapter(const AdapterOptions& options) {
  TORCH_CHECK(!has_adapter(), "this layer has an adapter already");
  adapter_ = options;
  const auto make = [&](int64_t in, int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  };
  lora_a = register_module("lora_A", make(inputs_, options.rank));
  lora_b = register_module("lora_B", make(options.rank, outputs_));
  const torch::NoGradGuard no_grad;
  lora_b->weight.zero_();
}

torch::Tensor ProjectionImpl::adapter_product(const torch::Tensor& a,
                                              const torch::Tensor& b) const {
  const torch::NoGradGuard no_grad;
  const double scale = adapter_.alpha / static_cast<double>(adapter_.rank);
  const torch::Tensor product = b.matmul(a) * scale;
  return layout_ == Layout::kOutputsFirst ? product : product.t();
}

TableImpl::TableImpl(int64_t rows, int64_t width, const torch::Tensor& tied)
    : weight(register_parameter("weight", tied.defined() ? tied : torch::zeros({rows, width}))) {}

KeyValueCache::KeyValueCache(int64_t layers, int64_t capacity)
    : capacity_(capacity),
      keys_(static_cast<size_t>(layers)),
      values_(static_cast<size_t>(layers)) {}

std::pair<torch::Tensor, torch::Tensor> KeyValueCache::append(int64_t layer,
                                                              const torch::Tensor& keys,
                                                              const torch::Tensor& values) {
  const int64_t tokens = keys.size(2);
  TORCH_CHECK(length_ + tokens <= capacity_, "the cache of keys and values has room for ",
              capacity_, " tokens, and ", length_ + tokens, " are asked for");
  const auto put = [&](torch::Tensor& all, const torch::Tensor& next) {
    if (!all.defined()) {
      all = torch::empty({next.size(0), next.size(1), capacity_, next.size(3)}, next.options());
    }
    all.narrow(2, length_, tokens).copy_(next);
    return all.narrow(2, 0, length_ + tokens);
  };
  return {put(keys_.at(static_cast<size_t>(layer)), keys),
          put(values_.at(static_cast<size_t>(layer)), values)};
}

}  // namespace language_model
