#include "operators/meta_operators.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "memory/meta_memory.h"
#include "zero/setup/slow_precision.h"
#include "zeropage/distributed_data_parallel.h"
#include "zeropage/ledger.h"

namespace zeropage::operators::meta_operators_test {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Function = std::function<Tensor(const Tensors&)>;

std::string describe(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " strides ", tensor.strides());
}

// The function's result and the gradients of its inputs, in words. inputs: on the host.
std::vector<std::string> shapes(const Function& function, const Tensors& inputs,
                                torch::Device device) {
  Tensors there;
  for (const Tensor& input : inputs) {
    there.push_back(torch::zeros(input.sizes(), input.options().device(device)));
    if (input.is_floating_point()) there.back().requires_grad_();
  }
  const Tensor result = function(there);
  result.sum().backward();
  std::vector<std::string> found = {describe(result)};
  for (const Tensor& input : there) found.push_back(describe(input.grad()));
  return found;
}

class MetaOperatorsTest : public ::testing::Test {
 protected:
  void SetUp() override { provide_meta_operators(); }

  static void expect_shapes_of_host(const Function& function, const Tensors& inputs) {
    EXPECT_EQ(shapes(function, inputs, torch::kMeta), shapes(function, inputs, torch::kCPU));
  }
};

Tensor floats(at::IntArrayRef sizes) {
  return torch::empty(sizes);
}

TEST_F(MetaOperatorsTest, GiveEmbeddingsTheirSizes) {
  expect_shapes_of_host([](const Tensors& in) { return torch::embedding(in[0], in[1]); },
                        {floats({10, 4}), torch::empty({2, 3}, torch::kInt64)});
  expect_shapes_of_host([](const Tensors& in) { return in[0].index_select(-1, in[1]); },
                        {floats({3, 10, 4}), torch::empty({7}, torch::kInt64)});
}

TEST_F(MetaOperatorsTest, GiveNormsTheirSizes) {
  const auto layer_norm = [](const Tensors& in) {
    return torch::layer_norm(in[0], in[1].sizes(), in[1], in[2]);
  };
  expect_shapes_of_host(layer_norm, {floats({2, 3, 4}), floats({4}), floats({4})});
  expect_shapes_of_host(layer_norm, {floats({2, 3, 4}), floats({3, 4}), floats({3, 4})});
  expect_shapes_of_host([](const Tensors& in) { return torch::layer_norm(in[0], {4}); },
                        {floats({2, 4})});
  for (const bool training : {true, false}) {
    expect_shapes_of_host(
        [training](const Tensors& in) {
          return torch::batch_norm(in[0], in[1], in[2], torch::zeros_like(in[1]).detach(),
                                   torch::ones_like(in[1]).detach(), training, 0.1, 1e-5, false);
        },
        {floats({6, 4, 5}), floats({4}), floats({4})});
  }
}

TEST_F(MetaOperatorsTest, GiveElementwiseOperatorsTheirSizes) {
  expect_shapes_of_host([](const Tensors& in) { return torch::where(in[0] > 0, in[0], in[1]); },
                        {floats({3, 1}), torch::empty({4}, torch::kFloat64)});
  expect_shapes_of_host([](const Tensors& in) { return torch::relu(in[0]); }, {floats({3, 4})});
  expect_shapes_of_host([](const Tensors& in) { return in[0].mul(2).relu_(); }, {floats({3, 4})});
  expect_shapes_of_host([](const Tensors& in) { return torch::mse_loss(in[0], in[1]); },
                        {floats({3, 4}), floats({3, 4})});
}

TEST_F(MetaOperatorsTest, GiveAttentionItsSizes) {
  expect_shapes_of_host(
      [](const Tensors& in) {
        return at::scaled_dot_product_attention(in[0], in[1], in[2], {}, 0.0, /*is_causal=*/true);
      },
      {floats({2, 3, 8, 4}), floats({2, 3, 8, 4}), floats({2, 3, 8, 4})});
  expect_shapes_of_host(
      [](const Tensors& in) {
        return at::scaled_dot_product_attention(in[0], in[1], in[2], in[3]).contiguous();
      },
      {floats({2, 3, 8, 4}), floats({2, 3, 5, 4}), floats({2, 3, 5, 4}), floats({8, 5})});
}

// Scores of 4 MiB would show.
TEST_F(MetaOperatorsTest, KeepOfAttentionWhatTheHostsKernelKeeps) {
  memory::observe_meta_memory();
  const auto ledger = std::make_shared<memory::Ledger>();
  const memory::LedgerScope scope(ledger);
  const Tensor input = torch::zeros({1, 1, 1024, 8}, torch::device(torch::kMeta)).requires_grad_();
  const Tensor mixed = at::scaled_dot_product_attention(input, input, input);
  EXPECT_EQ(ledger->now(c10::kMeta).total(), 2 * 1024 * 8 * 4 + 1024 * 4);
  mixed.sum().backward();
  EXPECT_LT(ledger->at_peak(c10::kMeta).total(), 1 << 20);
}

// A module of LibTorch on the device; on the meta device it has no values.
template <typename M>
M module_on(torch::Device device, const std::function<M()>& construct) {
  if (!device.is_meta()) return construct();
  return DeferredModule<M>(construct).module();
}

// Tensors that are made while it lives have that dtype.
class DefaultDtype {
 public:
  explicit DefaultDtype(torch::ScalarType dtype) {
    torch::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  }
  ~DefaultDtype() { torch::set_default_dtype(before_); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;

 private:
  const caffe2::TypeMeta before_ = torch::get_default_dtype();
};

// A graph of many steps has far more paths than nodes.
bool is_made_by(const std::shared_ptr<torch::autograd::Node>& node, const std::string& operation,
                std::set<torch::autograd::Node*>& seen) {
  if (node == nullptr || !seen.insert(node.get()).second) return false;
  if (node->name().find(operation) != std::string::npos) return true;
  const auto& edges = node->next_edges();
  return std::any_of(edges.begin(), edges.end(),
                     [&](const auto& edge) { return is_made_by(edge.function, operation, seen); });
}

TEST_F(MetaOperatorsTest, GiveAnLstmItsSizesWithWhatTheHostsKernelKeepsAndTakes) {
  memory::observe_meta_memory();
  at::set_num_threads(1);
  struct Bytes {
    std::string result;
    int64_t kept, forward_peak, backward_peak;
    bool is_onednns;
  };
  const auto bytes_on = [](torch::Device device, const torch::nn::LSTMOptions& options,
                           at::IntArrayRef sizes, torch::ScalarType dtype) {
    const auto ledger = std::make_shared<memory::Ledger>();
    const memory::LedgerScope scope(ledger);
    auto lstm = module_on<torch::nn::LSTM>(device, [&] {
      const DefaultDtype of_parameters(dtype);
      return torch::nn::LSTM(options);
    });
    const Tensor input = torch::zeros(sizes, torch::dtype(dtype).device(device)).requires_grad_();
    const auto held = [&] { return ledger->now(device.type()).total(); };
    const int64_t before = held();
    ledger->reset_peak();
    Bytes bytes;
    Tensor output = std::get<0>(lstm(input));
    bytes.kept = held() - before;
    bytes.forward_peak = ledger->at_peak(device.type()).total() - before;
    ledger->reset_peak();
    bytes.result = describe(output);
    std::set<torch::autograd::Node*> seen;
    bytes.is_onednns = is_made_by(output.grad_fn(), "MkldnnRnnLayer", seen);
    output.sum().backward();
    bytes.backward_peak = ledger->at_peak(device.type()).total() - before;
    for (const Tensor& parameter : lstm->parameters()) bytes.result += describe(parameter.grad());
    bytes.result += describe(input.grad());
    return bytes;
  };
  using torch::nn::LSTMOptions;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const auto& [options, sizes] :
         {std::pair(LSTMOptions(96, 96).num_layers(2).batch_first(true), std::vector{8L, 64L, 96L}),
          std::pair(LSTMOptions(100, 50).bidirectional(true), std::vector{32L, 3L, 100L}),
          std::pair(LSTMOptions(128, 256).num_layers(2).bidirectional(true).dropout(0.1),
                    std::vector{40L, 16L, 128L})}) {
      const Bytes host = bytes_on(torch::kCPU, options, sizes, dtype);
      const Bytes meta = bytes_on(torch::kMeta, options, sizes, dtype);
      SCOPED_TRACE(c10::str(dtype, " ", options.input_size(), " -> ", options.hidden_size()));
      EXPECT_EQ(meta.result, host.result);
      EXPECT_EQ(meta.is_onednns, host.is_onednns);
      // Step by step, as a processor without bf16 has it, nobody says what operators take.
      if (!host.is_onednns) continue;
      // Nor what the kernel takes that computes bf16 by instructions of fp32.
      if (dtype == torch::kBFloat16 && !zero::HostPrecisions::of_this_host().bfloat16) continue;
      // Another processor may lay its rows out otherwise.
      const auto expect_near = [](int64_t expected, int64_t got, double below, double above) {
        EXPECT_GE(static_cast<double>(got), (1 - below) * static_cast<double>(expected));
        EXPECT_LE(static_cast<double>(got), (1 + above) * static_cast<double>(expected));
      };
      expect_near(host.kept, meta.kept, 0.01, 0.01);
      expect_near(host.forward_peak, meta.forward_peak, 0.01, 0.1);
      expect_near(host.backward_peak, meta.backward_peak, 0.01, 0.1);
    }
  }
}

TEST_F(MetaOperatorsTest, LeaveAnLstmThatTheHostsKernelDoesNotTakeToLibTorch) {
  const auto run = [](const Tensors& in) {
    auto lstm = module_on<torch::nn::LSTM>(
        in[0].device(), [] { return torch::nn::LSTM(torch::nn::LSTMOptions(6, 8).proj_size(4)); });
    return std::get<0>(lstm(in[0])).contiguous();
  };
  expect_shapes_of_host(run, {floats({5, 3, 6})});
}

TEST_F(MetaOperatorsTest, GiveTransformersOfLibTorchTheirSizes) {
  using namespace torch::nn;
  const auto encode = [](const Tensors& in) {
    const auto layer = TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.0);
    return module_on<TransformerEncoder>(in[0].device(), [&] {
      return TransformerEncoder(TransformerEncoderOptions(layer, 2));
    })(in[0]);
  };
  expect_shapes_of_host(encode, {floats({5, 3, 8})});
  const auto decode = [](const Tensors& in) {
    const auto layer = TransformerDecoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.0);
    return module_on<TransformerDecoder>(in[0].device(), [&] {
      return TransformerDecoder(TransformerDecoderOptions(layer, 1));
    })(in[0], in[1]);
  };
  expect_shapes_of_host(decode, {floats({5, 3, 8}), floats({4, 3, 8})});
}

TEST_F(MetaOperatorsTest, GiveConvolutionsTheirSizes) {
  expect_shapes_of_host(
      [](const Tensors& in) { return torch::conv2d(in[0], in[1], in[2], 2, 1, 1, 2).contiguous(); },
      {floats({3, 4, 9, 7}), floats({6, 2, 3, 3}), floats({6})});
  expect_shapes_of_host(
      [](const Tensors& in) {
        return torch::conv_transpose1d(in[0], in[1], in[2], 2, 1, 1).contiguous();
      },
      {floats({3, 4, 9}), floats({4, 5, 3}), floats({5})});
}

}  // namespace
}  // namespace zeropage::operators::meta_operators_test
