// Attention of some queries to some keys, and its gradients; parts over different keys are merged.
#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>

namespace zeropage::parallel::context {

struct Attended {
  at::Tensor output;  // [batch, heads, queries, head size], in the queries' dtype
  at::Tensor
      log_sum;  // [batch, heads, queries]: log of the sum of exp(scores); fp32, or fp64 of fp64
};

struct Form {
  double scale = 1;
  bool is_diagonal = false;  // each query attends to the keys up to its own place
  at::Tensor allowed;        // [batch, 1, queries, keys], bool; undefined: all
};

// query: [batch, heads, queries, head size]; key, value: [batch, heads, keys, head size].
Attended attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const Form& form);

struct AttentionGradients {
  at::Tensor query, key, value;
};
// whole: the output and log_sum of all keys, and not of these alone, so that the parts' gradients add up to the whole's.
AttentionGradients attend_backward(const at::Tensor& gradient, const at::Tensor& query,
                                   const at::Tensor& key, const at::Tensor& value,
                                   const Attended& whole, const Form& form);

// While it lives, what this thread computes on the meta device is computed as on a device, whose blocks take the scores of a tile
// of queries; by default as on the host, whose kernel keeps none.
class SimulatedDeviceScope {
 public:
  explicit SimulatedDeviceScope(bool is_device);
  ~SimulatedDeviceScope();
  SimulatedDeviceScope(const SimulatedDeviceScope&) = delete;
  SimulatedDeviceScope& operator=(const SimulatedDeviceScope&) = delete;

 private:
  const bool before_;
};

// The dtype in which parts are merged, and gradients of keys added up.
at::ScalarType merged_dtype(at::ScalarType dtype);

// Attention to several parts of keys, merged (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
class MergedAttention {
 public:
  // like: the queries.
  explicit MergedAttention(const at::Tensor& like);
  // part: of queries from first_query on.
  void add(const Attended& part, int64_t first_query);
  // In the queries' dtype; 0 where a query had no key.
  Attended whole() const;

 private:
  at::Tensor output_;
  at::Tensor log_sum_;
  at::ScalarType dtype_;
};

// Each key head as often as query heads use it, one behind the other; and the sums of such copies' gradients.
at::Tensor repeat_heads(const at::Tensor& heads, int64_t count);
at::Tensor sum_repeated(const at::Tensor& gradients, int64_t count);

}  // namespace zeropage::parallel::context
