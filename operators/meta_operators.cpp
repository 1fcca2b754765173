#include "operators/meta_operators.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

namespace zeropage::operators {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Optional = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor like(const Tensor& tensor) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

// Undefined where autograd does not ask for it.
Tensor if_asked(bool asked, const Tensor& tensor) {
  return asked ? like(tensor) : Tensor();
}

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty())
    sizes[static_cast<size_t>(at::maybe_wrap_dim(dim, self.dim()))] = index.numel();
  return at::empty(sizes, self.options());
}

Tensor embedding_dense_backward(const Tensor& gradient, const Tensor&, int64_t rows, int64_t,
                                bool) {
  return at::empty({rows, gradient.size(-1)}, gradient.options());
}

std::vector<int64_t> broadcast_sizes(const Tensor& first, const Tensor& second,
                                     const Tensor& third) {
  return at::infer_size(at::infer_size(first.sizes(), second.sizes()), third.sizes());
}

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  return at::empty(broadcast_sizes(condition, self, other),
                   condition.options().dtype(at::result_type(self, other)));
}

Tensor& where_out(const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) {
  out.resize_(broadcast_sizes(condition, self, other));
  return out;
}

// logsumexp is made of it, too.
Tensor& abs_out(const Tensor& self, Tensor& out) {
  out.resize_(self.sizes());
  return out;
}

Tensor relu(const Tensor& self) {
  return at::empty_like(self);
}

Tensor& relu_in_place(Tensor& self) {
  return self;
}

Tensor mse_loss_backward(const Tensor&, const Tensor& self, const Tensor& target, int64_t) {
  return at::empty(at::infer_size(self.sizes(), target.sizes()), self.options());
}

Three native_layer_norm(const Tensor& input, IntArrayRef normalized, const Optional&,
                        const Optional&, double) {
  std::vector<int64_t> sizes = input.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(normalized.size()), sizes.end(), 1);
  return {like(input), at::empty(sizes, input.options()), at::empty(sizes, input.options())};
}

Three native_layer_norm_backward(const Tensor&, const Tensor& input, IntArrayRef normalized,
                                 const Tensor&, const Tensor&, const Optional& weight,
                                 const Optional&, std::array<bool, 3> asked) {
  const bool has_weight = weight && weight->defined();
  const Tensor affine = at::empty(normalized, has_weight ? weight->options() : input.options());
  return {if_asked(asked[0], input), if_asked(asked[1], affine), if_asked(asked[2], affine)};
}

Three native_batch_norm(const Tensor& input, const Optional&, const Optional&, const Optional&,
                        const Optional&, bool training, double, double) {
  const int64_t saved = training ? input.size(1) : 0;
  return {like(input), at::empty({saved}, input.options()), at::empty({saved}, input.options())};
}

Three native_batch_norm_backward(const Tensor&, const Tensor& input, const Optional&,
                                 const Optional&, const Optional&, const Optional&, const Optional&,
                                 bool, double, std::array<bool, 3> asked) {
  const Tensor affine = at::empty({input.size(1)}, input.options());
  return {if_asked(asked[0], input), if_asked(asked[1], affine), if_asked(asked[2], affine)};
}

Tensor convolution(const Tensor& input, const Tensor& weight, const Optional&, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  const auto sizes =
      transposed
          ? at::native::conv_input_size(input.sizes(), weight.sizes(), padding, output_padding,
                                        stride, dilation, groups)
          : at::native::conv_output_size(input.sizes(), weight.sizes(), padding, stride, dilation);
  return at::empty(sizes, input.options());
}

Three convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
                           IntArrayRef, IntArrayRef, IntArrayRef, bool, IntArrayRef, int64_t,
                           std::array<bool, 3> asked) {
  const Tensor bias = at::empty({gradient.size(1)}, gradient.options());
  return {if_asked(asked[0], input), if_asked(asked[1], weight), if_asked(asked[2], bias)};
}

// Without values two tensors are taken to be equal where they are the same memory, as the inputs of
// self-attention are.
bool equal(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides() && self.scalar_type() == other.scalar_type();
}

std::tuple<Tensor, Tensor> flash_attention(const Tensor& query, const Tensor& /*key*/,
                                           const Tensor& /*value*/, double /*dropout*/,
                                           bool /*is_causal*/, const Optional& /*mask*/,
                                           std::optional<double> /*scale*/) {
  const auto sums =
      at::isReducedFloatingType(query.scalar_type()) ? at::kFloat : query.scalar_type();
  return {at::empty_like(query),
          at::empty({query.size(0), query.size(2), query.size(1)}, query.options().dtype(sums))
              .transpose(1, 2)};
}

Three flash_attention_backward(const Tensor& /*gradient*/, const Tensor& query, const Tensor& key,
                               const Tensor& value, const Tensor& /*result*/,
                               const Tensor& /*sums*/, double /*dropout*/, bool /*is_causal*/,
                               const Optional& /*mask*/, std::optional<double> /*scale*/) {
  return {at::empty_like(query), at::empty_like(key), at::empty_like(value)};
}

// What the host's kernel takes (ATen/native/transformers/sdp_utils_cpp): others are computed with all
// scores in memory.
bool is_flash(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask,
              double dropout) {
  const auto fits = [&](const Tensor& tensor) {
    return tensor.dim() == 4 && tensor.size(-1) == query.size(-1) && tensor.stride(-1) == 1 &&
           tensor.size(0) == query.size(0) && tensor.size(1) == query.size(1) && tensor.size(2) > 0;
  };
  return dropout == 0 && fits(query) && fits(key) && fits(value) &&
         !(mask && mask->defined() && mask->requires_grad());
}

// LibTorch's own choice on the meta device has all scores in memory.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask,
                 double dropout, bool is_causal, std::optional<double> scale, bool shares_keys) {
  if (is_flash(query, key, value, mask, dropout)) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout,
                                                                       is_causal, mask, scale));
  }
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal,
                                             /*dropout_mask=*/std::nullopt, scale, shares_keys));
}

// ---- LSTM ----
//
// On the host a layer of an LSTM is one operator of oneDNN, which keeps more for its backward than the gates. The sizes are those that
// LibTorch 2.11 gave on a processor with AVX-512, for 34 shapes in fp32 and bf16 to the byte.

constexpr int64_t kFloatBytes = sizeof(float);

int64_t rounded_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// A row of so many elements as oneDNN lays it out: whole cache lines, and no multiple of 256 elements.
int64_t row_elements(int64_t elements, int64_t element_bytes) {
  constexpr int64_t kLineBytes = 64;
  const int64_t line = kLineBytes / element_bytes;
  const int64_t row = rounded_up(elements, line);
  return row % 256 == 0 ? row + line : row;
}

struct LstmLayer {
  int64_t steps, batch, inputs, hidden;
  int64_t element_bytes;

  static LstmLayer of(const Tensor& input, int64_t hidden) {
    return {.steps = input.size(0),
            .batch = input.size(1),
            .inputs = input.size(2),
            .hidden = hidden,
            .element_bytes = static_cast<int64_t>(input.element_size())};
  }

  int64_t gates() const { return 4 * hidden; }
  bool is_float() const { return element_bytes == kFloatBytes; }
  // Gates and outputs of all steps, states before and behind each, and room for the gradients of those.
  int64_t workspace_bytes() const {
    constexpr int64_t kPage = 4096, kBeforeAndBehind = 2;
    const int64_t widest = std::max(inputs, hidden);
    const auto of_steps = [&](int64_t row, int64_t bytes) {
      return rounded_up(steps * batch * row * bytes, kPage);
    };
    const auto of_states = [&](int64_t row, int64_t bytes) {
      return rounded_up(kBeforeAndBehind * (steps + 1) * batch * row * bytes, kPage);
    };
    return of_steps(row_elements(gates(), element_bytes), element_bytes) +
           of_steps(row_elements(hidden, element_bytes), element_bytes) +
           of_states(row_elements(widest, element_bytes), element_bytes) +
           of_states(hidden, element_bytes) +
           2 * of_states(row_elements(widest, kFloatBytes), kFloatBytes) +
           of_states(hidden, kFloatBytes);
  }
  // While it computes: weights in another order, gates in fp32, and a step's gates.
  int64_t forward_scratch_bytes() const {
    constexpr int64_t kRest = 16384;
    const int64_t gate_row = row_elements(gates(), kFloatBytes) * kFloatBytes;
    const int64_t weights =
        (inputs + hidden) * row_elements(gates(), element_bytes) * element_bytes;
    return weights + (is_float() ? steps * batch * gates() * kFloatBytes : 0) +
           2 * batch * gate_row + kRest;
  }
  int64_t backward_scratch_bytes() const {
    int64_t bytes = forward_scratch_bytes();
    // Gradients of weights, and in lower precision of the outputs too, in fp32.
    if (!is_float()) {
      bytes += (steps * batch * hidden + (inputs + hidden) * gates()) * kFloatBytes;
    }
    for (const int64_t row : {inputs, hidden}) {
      const int64_t padded = row_elements(row, element_bytes);
      if (padded != row) bytes += gates() * padded * element_bytes;
    }
    return bytes;
  }
};

Tensor scratch(int64_t bytes, const Tensor& like_tensor) {
  return at::empty({bytes}, like_tensor.options().dtype(at::kByte));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> lstm_layer(
    const Tensor& input, const Tensor& weight, const Tensor& /*recurrent*/, const Tensor& /*bias*/,
    const Tensor& /*recurrent_bias*/, const Tensor& state, const Tensor& cell, bool /*reverse*/,
    IntArrayRef /*batch_sizes*/, int64_t /*mode*/, int64_t hidden, int64_t /*layers*/,
    bool /*has_biases*/, bool /*bidirectional*/, bool /*batch_first*/, bool /*train*/) {
  const LstmLayer layer = LstmLayer::of(input, hidden);
  const Tensor output = at::empty({layer.steps, layer.batch, hidden}, input.options());
  const Tensor last_state = at::empty(state.sizes(), state.options());
  const Tensor last_cell = at::empty(cell.sizes(), cell.options());
  const Tensor bias = at::empty({layer.gates()}, weight.options());
  const Tensor workspace =
      at::GradMode::is_enabled() ? scratch(layer.workspace_bytes(), input) : Tensor();
  const Tensor passing = scratch(layer.forward_scratch_bytes(), input);
  return {output, last_state, last_cell, workspace};
}

using LstmGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

LstmGradients lstm_layer_backward(
    const Tensor& input, const Tensor& weight, const Tensor& recurrent, const Tensor& /*bias*/,
    const Tensor& /*recurrent_bias*/, const Tensor& state, const Tensor& cell, const Tensor& output,
    const Tensor& /*last_state*/, const Tensor& /*last_cell*/, const Optional& gradient,
    const Optional& state_gradient, const Optional& cell_gradient, bool /*reverse*/,
    int64_t /*mode*/, int64_t hidden, int64_t /*layers*/, bool /*has_biases*/, bool /*train*/,
    bool /*bidirectional*/, IntArrayRef /*batch_sizes*/, bool /*batch_first*/,
    const Tensor& /*workspace*/) {
  const auto is_there = [](const Optional& tensor) { return tensor && tensor->defined(); };
  if (!is_there(gradient) && !is_there(state_gradient) && !is_there(cell_gradient)) return {};
  const auto given_or_zeros = [&](const Optional& tensor, const Tensor& other) {
    return is_there(tensor) ? tensor->contiguous() : like(other);
  };
  const std::array<Tensor, 3> gradients = {given_or_zeros(gradient, output),
                                           given_or_zeros(state_gradient, state),
                                           given_or_zeros(cell_gradient, cell)};
  const LstmLayer layer = LstmLayer::of(input, hidden);
  const auto in_float = [](const Tensor& tensor) {
    return at::empty(tensor.sizes(), tensor.options().dtype(at::kFloat));
  };
  const Tensor bias = at::empty({layer.gates()}, weight.options());
  const Tensor passing = scratch(layer.backward_scratch_bytes(), input);
  return {in_float(input), in_float(weight), in_float(recurrent), in_float(bias),
          in_float(bias),  in_float(state),  in_float(cell)};
}

bool is_made_by(const std::shared_ptr<torch::autograd::Node>& node, std::string_view operation) {
  if (node == nullptr) return false;
  if (node->name().find(operation) != std::string::npos) return true;
  const auto& edges = node->next_edges();
  return std::any_of(edges.begin(), edges.end(), [operation](const torch::autograd::Edge& edge) {
    return is_made_by(edge.function, operation);
  });
}

// Whether a layer of that dtype is oneDNN's on this host. LibTorch asks the processor and oneDNN's settings, which are not ours to
// repeat: a layer of one element tells.
bool is_onednns(at::ScalarType dtype) {
  bool found = false;
  // On a thread of its own, which has none of the caller's modes.
  std::thread([dtype, &found] {
    try {
      const auto as = at::TensorOptions(at::kCPU).dtype(dtype);
      const auto weight = [&as](int64_t inputs) {
        return (inputs == 0 ? at::zeros({4}, as) : at::zeros({4, inputs}, as)).requires_grad_();
      };
      const Tensor state = at::zeros({1, 1, 1}, as);
      const auto [output, last, cell] = at::lstm(
          at::zeros({1, 1, 1}, as), {state, state}, {weight(1), weight(1), weight(0), weight(0)},
          /*has_biases=*/true, /*num_layers=*/1, /*dropout=*/0.0, /*train=*/true,
          /*bidirectional=*/false, /*batch_first=*/false);
      found = is_made_by(output.grad_fn(), "MkldnnRnnLayer");
    } catch (const c10::Error&) {
      // A host that cannot run it has no kernel for it.
    }
  }).join();
  return found;
}

// The host's kernel takes no projections, and no other precisions.
bool is_layers_of_onednn(const Tensor& input, at::TensorList states) {
  static const bool takes_float = is_onednns(at::kFloat),
                    takes_bfloat16 = is_onednns(at::kBFloat16);
  const auto dtype = input.scalar_type();
  const bool takes =
      (dtype == at::kFloat && takes_float) || (dtype == at::kBFloat16 && takes_bfloat16);
  return takes && at::globalContext().userEnabledMkldnn() && input.numel() > 0 &&
         input.dim() == 3 && states.size() == 2 && states[0].size(2) == states[1].size(2);
}

// LibTorch's own choice on the meta device is a product for each step.
Three lstm(const Tensor& input, at::TensorList states, at::TensorList weights, bool has_biases,
           int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  if (!is_layers_of_onednn(input, states)) {
    return at::native::lstm(input, states, weights, has_biases, layers, dropout, train,
                            bidirectional, batch_first);
  }
  constexpr int64_t kLstm = 2;  // among the modes of the operator
  const int64_t directions = bidirectional ? 2 : 1;
  const size_t of_layer = has_biases ? 4 : 2;
  const Tensor first_state = states[0].contiguous(), first_cell = states[1].contiguous();
  Tensor layer_input = (batch_first ? input.transpose(0, 1) : input).contiguous();
  std::vector<Tensor> last_states, last_cells;
  for (int64_t layer = 0; layer < layers; ++layer) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const int64_t index = layer * directions + direction;
      const auto own = weights.slice(static_cast<size_t>(index) * of_layer, of_layer);
      const auto bias = [&](size_t of) {
        return has_biases ? own[of + 2] : at::zeros(own[of].sizes(), own[of].options());
      };
      const auto [output, state, cell, workspace] = at::mkldnn_rnn_layer(
          layer_input, own[0], own[1], bias(0), bias(1), first_state[index], first_cell[index],
          /*reverse=*/direction > 0, /*batch_sizes=*/{}, kLstm, states[0].size(2), layers,
          has_biases, bidirectional, batch_first, train);
      outputs.push_back(output);
      last_states.push_back(state);
      last_cells.push_back(cell);
    }
    layer_input = directions == 1 ? outputs.front() : at::cat(outputs, -1);
    const bool is_last = layer == layers - 1;
    if (dropout != 0 && train && !is_last) layer_input = at::dropout(layer_input, dropout, true);
  }
  return {batch_first ? layer_input.transpose(0, 1) : layer_input, at::stack(last_states, 0),
          at::stack(last_cells, 0)};
}

// Made of other operators, so autograd's key has it too.
torch::Library make_library_of_autograd() {
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::AutogradMeta, __FILE__,
                         __LINE__);
  library.impl("scaled_dot_product_attention", &attention);
  library.impl("lstm.input", &lstm);
  return library;
}

torch::Library make_library() {
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
  library.impl("equal", &equal);
  library.impl("scaled_dot_product_attention", &attention);
  library.impl("_scaled_dot_product_flash_attention_for_cpu", &flash_attention);
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &flash_attention_backward);
  library.impl("lstm.input", &lstm);
  library.impl("mkldnn_rnn_layer", &lstm_layer);
  library.impl("mkldnn_rnn_layer_backward", &lstm_layer_backward);
  library.impl("index_select", &index_select);
  library.impl("embedding_dense_backward", &embedding_dense_backward);
  library.impl("where.self", &where);
  library.impl("where.self_out", &where_out);
  library.impl("abs.out", &abs_out);
  library.impl("relu", &relu);
  library.impl("relu_", &relu_in_place);
  library.impl("mse_loss_backward", &mse_loss_backward);
  library.impl("native_layer_norm", &native_layer_norm);
  library.impl("native_layer_norm_backward", &native_layer_norm_backward);
  library.impl("native_batch_norm", &native_batch_norm);
  library.impl("native_batch_norm_backward", &native_batch_norm_backward);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  return library;
}

}  // namespace

void provide_meta_operators() {
  static const torch::Library library = make_library();
  static const torch::Library library_of_autograd = make_library_of_autograd();
}

}  // namespace zeropage::operators
