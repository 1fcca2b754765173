#include "parallel/context/blocks.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace zeropage::parallel::context {
namespace {

constexpr int64_t kTileQueries = 256;
// The log of the sum of no scores.
constexpr double kNone = -std::numeric_limits<double>::infinity();

thread_local bool simulates_a_device = false;

// LibTorch's kernel for the host keeps no scores, and takes no mask that we need.
bool has_kernel(const at::Tensor& query, const Form& form) {
  const bool is_host = query.is_meta() ? !simulates_a_device : query.device().is_cpu();
  return is_host && !form.allowed.defined();
}

// exp(scores - log_sum), 0 where nothing is allowed. [batch, heads, tile, keys]
class Tile {
 public:
  Tile(const at::Tensor& query, const at::Tensor& key, const Form& form, int64_t begin,
       int64_t numel)
      : scores_(at::matmul(query.narrow(2, begin, numel).to(merged_dtype(query.scalar_type())),
                           key.to(merged_dtype(key.scalar_type())).transpose(-2, -1))
                    .mul_(form.scale)) {
    if (form.allowed.defined()) {
      scores_.masked_fill_(form.allowed.narrow(2, begin, numel).logical_not(), kNone);
    }
    if (!form.is_diagonal) return;
    const at::Tensor places = at::arange(key.size(2), key.options().dtype(at::kLong));
    scores_.masked_fill_(places.unsqueeze(0) > places.narrow(0, begin, numel).unsqueeze(1), kNone);
  }

  at::Tensor log_sum() const { return at::logsumexp(scores_, -1); }
  at::Tensor weights(const at::Tensor& log_sum) const {
    // Without a key both are minus infinity.
    const at::Tensor finite = log_sum.masked_fill(log_sum == kNone, 0);
    return at::exp(scores_ - finite.unsqueeze(-1));
  }

 private:
  at::Tensor scores_;
};

template <typename Visit>
void for_each_tile(int64_t queries, const Visit& visit) {
  for (int64_t begin = 0; begin < queries; begin += kTileQueries) {
    visit(begin, std::min(kTileQueries, queries - begin));
  }
}

Attended attend_by_products(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const Form& form) {
  const at::ScalarType dtype = merged_dtype(query.scalar_type());
  const at::Tensor wide_value = value.to(dtype);
  std::vector<at::Tensor> outputs, log_sums;
  for_each_tile(query.size(2), [&](int64_t begin, int64_t numel) {
    const Tile tile(query, key, form, begin, numel);
    log_sums.push_back(tile.log_sum());
    outputs.push_back(
        at::matmul(tile.weights(log_sums.back()), wide_value).to(query.scalar_type()));
  });
  return {at::cat(outputs, 2), at::cat(log_sums, 2)};
}

AttentionGradients backward_by_products(const at::Tensor& gradient, const at::Tensor& query,
                                        const at::Tensor& key, const at::Tensor& value,
                                        const Attended& whole, const Form& form) {
  const at::ScalarType dtype = merged_dtype(query.scalar_type());
  const at::Tensor wide_key = key.to(dtype);
  const at::Tensor wide_value = value.to(dtype);
  std::vector<at::Tensor> of_query;
  const at::Tensor of_key = at::zeros_like(wide_key);
  const at::Tensor of_value = at::zeros_like(wide_value);
  for_each_tile(query.size(2), [&](int64_t begin, int64_t numel) {
    const auto rows = [&](const at::Tensor& all) { return all.narrow(2, begin, numel).to(dtype); };
    const at::Tensor given = rows(gradient);
    const at::Tensor weights =
        Tile(query, key, form, begin, numel).weights(whole.log_sum.narrow(2, begin, numel));
    of_value.add_(at::matmul(weights.transpose(-2, -1), given));
    const at::Tensor dot = (given * rows(whole.output)).sum(-1, /*keepdim=*/true);
    const at::Tensor of_scores =
        weights * (at::matmul(given, wide_value.transpose(-2, -1)) - dot) * form.scale;
    of_query.push_back(at::matmul(of_scores, wide_key).to(query.scalar_type()));
    of_key.add_(at::matmul(of_scores.transpose(-2, -1), rows(query)));
  });
  return {at::cat(of_query, 2), of_key, of_value};
}

}  // namespace

SimulatedDeviceScope::SimulatedDeviceScope(bool is_device)
    : before_(std::exchange(simulates_a_device, is_device)) {}

SimulatedDeviceScope::~SimulatedDeviceScope() {
  simulates_a_device = before_;
}

at::ScalarType merged_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

Attended attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const Form& form) {
  if (!has_kernel(query, form)) return attend_by_products(query, key, value, form);
  auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, /*dropout_p=*/0, form.is_diagonal, /*attn_mask=*/{}, form.scale);
  return {std::move(output), std::move(log_sum)};
}

AttentionGradients attend_backward(const at::Tensor& gradient, const at::Tensor& query,
                                   const at::Tensor& key, const at::Tensor& value,
                                   const Attended& whole, const Form& form) {
  if (!has_kernel(query, form)) {
    return backward_by_products(gradient, query, key, value, whole, form);
  }
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, whole.output, whole.log_sum, /*dropout_p=*/0, form.is_diagonal,
      /*attn_mask=*/{}, form.scale);
  return {std::move(of_query), std::move(of_key), std::move(of_value)};
}

MergedAttention::MergedAttention(const at::Tensor& like) : dtype_(like.scalar_type()) {
  const at::TensorOptions options = like.options().dtype(merged_dtype(dtype_));
  output_ = at::zeros(like.sizes(), options);
  log_sum_ = at::full(like.sizes().slice(0, 3), kNone, options);
}

void MergedAttention::add(const Attended& part, int64_t first_query) {
  const int64_t queries = part.output.size(2);
  const at::Tensor output = output_.narrow(2, first_query, queries);
  const at::Tensor log_sum = log_sum_.narrow(2, first_query, queries);
  const at::Tensor together = at::logaddexp(log_sum, part.log_sum);
  // Without a key in either, all three are minus infinity, and both weights 0.
  const at::Tensor finite = together.masked_fill(together == kNone, 0);
  output.mul_(at::exp(log_sum - finite).unsqueeze(-1));
  output.addcmul_(part.output.to(output.scalar_type()),
                  at::exp(part.log_sum - finite).unsqueeze(-1));
  log_sum.copy_(together);
}

Attended MergedAttention::whole() const {
  return {output_.to(dtype_), log_sum_};
}

at::Tensor repeat_heads(const at::Tensor& heads, int64_t count) {
  return heads.size(1) == count ? heads : heads.repeat_interleave(count / heads.size(1), 1);
}

at::Tensor sum_repeated(const at::Tensor& gradients, int64_t count) {
  if (gradients.size(1) == count) return gradients;
  return gradients.unflatten(1, {count, gradients.size(1) / count}).sum(2);
}

}  // namespace zeropage::parallel::context
