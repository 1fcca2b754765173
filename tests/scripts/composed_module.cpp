#include "tests/scripts/composed_module.h"

#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include "zeropage/fused.h"
#include "zeropage/tiled.h"
#include "zeropage/touch_all.h"

namespace zeropage::scripts {
namespace {

constexpr int64_t kHidden = 256;

namespace nn = torch::nn;

at::Generator generator_of(uint64_t seed) {
  return at::detail::createCPUGenerator(seed);
}

struct Scale : torch::autograd::Function<Scale> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& scale) {
    context->save_for_backward({x, scale});
    return x * scale;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
};

// Multiplies by numbers of the default generator, which nobody foresees where ranks are threads, and divides by those that forward
// drew: nothing changes, also in low precision, and the gradient is right only if backward has the same numbers.
class DrawnOnce {
 public:
  torch::Tensor times_one(const torch::Tensor& x, int pass) {
    const torch::Tensor drawn = torch::randint(1, 3, x.sizes(), x.options());
    auto& of_pass = of_passes_[pass];
    // Not by operators, which would be computed again, too.
    if (torch::autograd::get_current_graph_task_id() < 0) {
      const torch::Tensor values = drawn.detach().to(torch::kDouble);
      of_pass.assign(values.const_data_ptr<double>(),
                     values.const_data_ptr<double>() + values.numel());
    }
    const torch::Tensor noted = torch::from_blob(of_pass.data(), x.sizes(), torch::kDouble);
    return x * drawn / noted.to(x.scalar_type());
  }

 private:
  std::map<int, std::vector<double>> of_passes_;
};

// Each row by one of the list's, as its word says.
torch::Tensor by_words(nn::ModuleListImpl& list, const torch::Tensor& x,
                       const torch::Tensor& words) {
  torch::Tensor y = torch::zeros_like(x);
  for (size_t index = 0; index < list.size(); ++index) {
    const torch::Tensor rows = torch::nonzero(words.remainder(static_cast<int64_t>(list.size())) ==
                                              static_cast<int64_t>(index))
                                   .view(-1);
    if (rows.numel() == 0) continue;
    const torch::Tensor of_rows =
        list[index]->as<nn::LinearImpl>()->forward(x.index_select(0, rows));
    y = y.index_add(0, rows, of_rows.to(y.scalar_type()));
  }
  return y;
}

torch::Tensor flat(const torch::Tensor& x) {
  return x.reshape({x.size(0), kWidth});
}

// For heads of [batch, 1, 2, 8].
torch::Tensor angles_like(const torch::Tensor& x) {
  const auto wide = x.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat;
  return torch::arange(8, torch::TensorOptions(wide)).view({2, 4}) * 0.3;
}

torch::Tensor plainly_rotated(const torch::Tensor& x) {
  const torch::Tensor angles = angles_like(x);
  const auto halves = x.chunk(2, -1);
  const torch::Tensor cosines = angles.cos(), sines = angles.sin();
  return torch::cat(
      {halves[0] * cosines - halves[1] * sines, halves[1] * cosines + halves[0] * sines}, -1);
}

}  // namespace

Sample sample_of(uint64_t seed, int pass, int rank) {
  auto generator = generator_of(seed * 1000003 + static_cast<uint64_t>(pass) * 101 +
                                static_cast<uint64_t>(rank));
  Sample sample;
  sample.x = torch::randn({kBatch, kWidth}, generator, torch::kDouble);
  sample.words = torch::randint(kWords, {kBatch}, generator, torch::kLong);
  sample.target = torch::randn({kBatch, kWidth}, generator, torch::kDouble);
  return sample;
}

ComposedModule::Masks ComposedModule::masks_of(uint64_t seed, int ranks) {
  Masks masks;
  for (int rank = 0; rank < ranks; ++rank) {
    masks.push_back(generator_of(seed + 7 + static_cast<uint64_t>(rank)));
  }
  return masks;
}

ComposedModule::ComposedModule(const std::vector<Unit>& units, uint64_t seed, Masks masks)
    : kinds_(units), masks_(std::move(masks)) {
  for (size_t index = 0; index < units.size(); ++index) {
    linears_.emplace_back(nullptr);
    units_.push_back(made(units[index], "u" + std::to_string(index)));
  }
  auto generator = generator_of(seed + 1);
  const torch::NoGradGuard no_grad;
  for (const auto& item : named_parameters()) {
    torch::Tensor parameter = item.value();
    // A norm's weight too, whose values are about 1 otherwise.
    parameter.copy_(torch::randn(parameter.sizes(), generator) * 0.3 + 0.1);
  }
}

torch::Tensor ComposedModule::forward(const torch::Tensor& x, const torch::Tensor& words, int last,
                                      int pass, int rank) {
  const Given given{words, pass, rank};
  torch::Tensor y = packs_ ? packed(x, words, pass) : x;
  for (int index = 0; index < last; ++index) {
    y = packs_ ? forward_packed(index, y) : forward_unit(index, y, given);
    if (index == throws_behind_) {
      throws_behind_ = -1;
      throw std::runtime_error("thrown on purpose");
    }
  }
  return packs_ ? activations_of(y) : y;
}

torch::Tensor ComposedModule::forward_unit(int unit, const torch::Tensor& x, const Given& given) {
  const auto function = [this, unit, given](const torch::Tensor& x) {
    return x + 0.5 * torch::tanh(units_[static_cast<size_t>(unit)](x, given));
  };
  return wrap_ ? wrap_(function, x) : function(x);
}

torch::Tensor ComposedModule::auxiliary_loss() {
  torch::Tensor sum;
  for (const auto& unit : experts_) {
    const torch::Tensor loss = unit->auxiliary_loss(is_plain_);
    if (loss.defined()) sum = sum.defined() ? sum + loss : loss;
  }
  return sum;
}

torch::Tensor ComposedModule::packed(const torch::Tensor& x, const torch::Tensor& words, int pass) {
  const torch::Tensor odd = torch::full({x.size(0), 1}, pass % 2, x.options());
  return torch::cat({x, words.view({-1, 1}).to(x.scalar_type()), odd}, 1);
}

torch::Tensor ComposedModule::activations_of(const torch::Tensor& packed) {
  return packed.narrow(1, 0, kWidth).contiguous();
}

// Norms that stay fp32 give fp32.
torch::Tensor ComposedModule::forward_packed(int unit, const torch::Tensor& packed) {
  const torch::Tensor passed_on = packed.detach().narrow(1, kWidth, 2);
  const Given given{passed_on.select(1, 0).to(torch::kLong),
                    static_cast<int>(passed_on[0][1].item<double>()), /*rank=*/0};
  const torch::Tensor y = forward_unit(unit, activations_of(packed), given);
  return torch::cat({y.to(packed.scalar_type()), passed_on}, 1);
}

// "u3", "u3_up", but not "u31".
bool ComposedModule::is_of(const std::string& name, int unit) const {
  const std::string own = "u" + std::to_string(unit);
  if (name == own || name.rfind(own + "_", 0) == 0) return true;
  const Unit& kind = kinds_[static_cast<size_t>(unit)];
  return kind.kind == Kind::kShared && is_of(name, kind.of);
}

std::vector<std::shared_ptr<nn::Module>> ComposedModule::modules_of(int unit) const {
  std::vector<std::shared_ptr<nn::Module>> modules;
  for (const auto& item : named_children()) {
    if (is_of(item.key(), unit)) modules.push_back(item.value());
  }
  return modules;
}

std::vector<torch::Tensor> ComposedModule::tensors_of(int unit) const {
  std::vector<torch::Tensor> tensors;
  for (const auto& named : {named_parameters(/*recurse=*/false), named_buffers(false)}) {
    for (const auto& item : named) {
      if (is_of(item.key(), unit)) tensors.push_back(item.value());
    }
  }
  return tensors;
}

torch::Tensor ComposedModule::own(const std::string& name, torch::Tensor values) {
  return register_parameter(name, std::move(values));
}

ComposedModule::Function ComposedModule::made(const Unit& unit, const std::string& name) {
  if (unit.kind >= Kind::kShared) return made_by_hand(unit, name);
  return made_of_layers(unit.kind, name);
}

torch::Tensor ComposedModule::through_operators(const torch::Tensor& x, const FusedParameters& of,
                                                const torch::Tensor& words) const {
  const auto heads = [](const torch::Tensor& y) { return y.view({-1, 1, 2, 8}); };
  if (is_plain_) {
    const torch::Tensor sum = x + of.gate;
    const torch::Tensor normed = sum * (sum.square().mean(-1, true) + 1e-6).rsqrt() * of.norm;
    const torch::Tensor gated = torch::silu(of.gate) * normed;
    const torch::Tensor turned = flat(plainly_rotated(heads(torch::gelu(gated + of.bias))));
    return turned + sum * nn::functional::cross_entropy(torch::linear(normed, of.head), words);
  }
  const fused::Added added = fused::add_rms_norm(x, of.gate, of.norm);
  const torch::Tensor gated = fused::swiglu(of.gate, added.normed);
  const torch::Tensor angles = angles_like(x);
  const torch::Tensor turned =
      flat(fused::rotary(heads(fused::bias_gelu(gated, of.bias)), angles.cos(), angles.sin()));
  // Two tokens a tile.
  const auto tile = static_cast<int64_t>(2 * kWords * x.element_size());
  const torch::Tensor loss =
      fused::linear_cross_entropy(added.normed, of.head, words, {.tile_bytes = tile});
  return turned + added.sum * loss.to(x.scalar_type());
}

ComposedModule::Function ComposedModule::made_of_layers(Kind kind, const std::string& name) {
  const auto as_it_is = [](auto layer) -> Function {
    return [layer](const torch::Tensor& x, const Given&) mutable { return layer->forward(x); };
  };
  // [batch, 2, 8]
  const auto by_channels = [](auto layer) -> Function {
    return [layer](const torch::Tensor& x, const Given&) mutable {
      return flat(layer->forward(x.view({-1, 2, 8})));
    };
  };
  const auto recurrent = [](auto layer) -> Function {
    return [layer](const torch::Tensor& x, const Given&) mutable {
      return flat(std::get<0>(layer->forward(x.view({-1, 2, 8}))));
    };
  };
  const auto add = [&](auto layer) { return register_module(name, layer); };
  switch (kind) {
    case Kind::kLinear:
      linears_.back() = add(nn::Linear(kWidth, kWidth));
      return as_it_is(linears_.back());
    case Kind::kMlp: {
      auto up = register_module(name + "_up", nn::Linear(kWidth, 24));
      auto down = register_module(name + "_down", nn::Linear(24, kWidth));
      return [up, down](const torch::Tensor& x, const Given&) mutable {
        return down->forward(torch::tanh(up->forward(x)));
      };
    }
    case Kind::kWide: {
      // Weights of this size have states in 8 bits, and are larger than most pages.
      auto up = register_module(name + "_up", nn::Linear(kWidth, kHidden));
      auto down = register_module(name + "_down", nn::Linear(kHidden, kWidth));
      return [up, down](const torch::Tensor& x, const Given&) mutable {
        return down->forward(torch::tanh(up->forward(x)));
      };
    }
    case Kind::kBilinear: {
      auto layer = add(nn::Bilinear(kWidth, kWidth, kWidth));
      return [layer](const torch::Tensor& x, const Given&) mutable { return layer->forward(x, x); };
    }
    case Kind::kEmbedding: {
      auto layer = add(nn::Embedding(kWords, kWidth));
      return [layer](const torch::Tensor& x, const Given& given) mutable {
        return x * layer->forward(given.words);
      };
    }
    case Kind::kEmbeddingBag: {
      auto layer = add(nn::EmbeddingBag(nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kSum)));
      return [layer](const torch::Tensor& x, const Given& given) mutable {
        return x + layer->forward(given.words.view({-1, 1}));
      };
    }
    case Kind::kConv1d:
      return by_channels(add(nn::Conv1d(nn::Conv1dOptions(2, 2, 3).padding(1))));
    case Kind::kConv2d: {
      auto layer = add(nn::Conv2d(nn::Conv2dOptions(2, 2, 3).padding(1)));
      return [layer](const torch::Tensor& x, const Given&) mutable {
        return flat(layer->forward(x.view({-1, 2, 2, 4})));
      };
    }
    case Kind::kConvTranspose1d:
      return by_channels(add(nn::ConvTranspose1d(nn::ConvTranspose1dOptions(2, 2, 3).padding(1))));
    case Kind::kBatchNorm:
      return as_it_is(add(nn::BatchNorm1d(kWidth)));
    case Kind::kLayerNorm:
      return as_it_is(add(nn::LayerNorm(nn::LayerNormOptions({kWidth}))));
    case Kind::kGroupNorm:
      return as_it_is(add(nn::GroupNorm(2, kWidth)));
    case Kind::kInstanceNorm:
      return by_channels(add(nn::InstanceNorm1d(nn::InstanceNorm1dOptions(2).affine(true))));
    case Kind::kPReLU:
      return as_it_is(add(nn::PReLU(nn::PReLUOptions().num_parameters(kWidth))));
    case Kind::kLstm:
      return recurrent(add(nn::LSTM(nn::LSTMOptions(8, 8).batch_first(true))));
    case Kind::kGru:
      return recurrent(add(nn::GRU(nn::GRUOptions(8, 8).batch_first(true))));
    case Kind::kRnn:
      return recurrent(add(nn::RNN(nn::RNNOptions(8, 8).batch_first(true))));
    case Kind::kLstmCell: {
      auto layer = add(nn::LSTMCell(kWidth, kWidth));
      return [layer](const torch::Tensor& x, const Given&) mutable {
        return std::get<0>(layer->forward(x));
      };
    }
    case Kind::kAttention: {
      auto layer = add(nn::MultiheadAttention(8, 2));
      return [layer](const torch::Tensor& x, const Given&) mutable {
        const torch::Tensor steps = x.view({-1, 2, 8}).transpose(0, 1);
        return flat(std::get<0>(layer->forward(steps, steps, steps)).transpose(0, 1));
      };
    }
    case Kind::kEncoder:
      return by_channels(add(nn::TransformerEncoderLayer(
          nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(6).dropout(0))));
    default:
      throw std::logic_error("no layer of LibTorch");
  }
}

ComposedModule::Function ComposedModule::made_by_hand(const Unit& unit, const std::string& name) {
  const auto vector = [&] { return own(name, torch::zeros({kWidth})); };
  const auto matrix = [&] { return own(name, torch::zeros({kWidth, kWidth})); };
  const auto linear = [&](const char* suffix = "") {
    return register_module(name + suffix, nn::Linear(kWidth, kWidth));
  };
  switch (unit.kind) {
    case Kind::kShared:
      return units_.at(static_cast<size_t>(unit.of));
    case Kind::kTied: {
      // One tensor under two names.
      const auto weight = own(name, linears_.at(static_cast<size_t>(unit.of))->weight);
      return [weight](const torch::Tensor& x, const Given&) { return torch::matmul(x, weight); };
    }
    case Kind::kFrozen: {
      auto layer = linear();
      for (torch::Tensor parameter : layer->parameters()) parameter.requires_grad_(false);
      return [layer](const torch::Tensor& x, const Given&) mutable { return layer->forward(x); };
    }
    case Kind::kBuffer: {
      auto weight = vector();
      auto table = register_buffer(name + "_table", torch::arange(kWidth).to(torch::kFloat) * 0.1);
      auto count = register_buffer(name + "_count", torch::zeros({1}));
      // By name, as Module::to() gives buffers other tensors.
      return [this, weight, name](const torch::Tensor& x, const Given&) {
        auto buffers = named_buffers(/*recurse=*/false);
        if (is_training()) buffers[name + "_count"].add_(1);
        return x * weight + buffers[name + "_table"].to(x.scalar_type());
      };
    }
    case Kind::kFunction: {
      auto weight = vector();
      return [weight](const torch::Tensor& x, const Given&) { return Scale::apply(x, weight); };
    }
    case Kind::kView: {
      auto weight = own(name, torch::zeros({3, kWidth}));
      return [weight](const torch::Tensor& x, const Given&) {
        return x * weight.narrow(0, 1, 1) + weight.select(0, 2) * weight[0];
      };
    }
    case Kind::kInPlace: {
      auto weight = vector();
      return [weight](const torch::Tensor& x, const Given&) {
        torch::Tensor y = x + weight;
        y.tanh_();
        torch::Tensor z = y * 0.5;
        return z.add_(x);
      };
    }
    case Kind::kScalar: {
      auto weight = own(name, torch::zeros({}));
      return [weight](const torch::Tensor& x, const Given&) { return x * weight; };
    }
    case Kind::kUnused: {
      register_module(name, nn::Linear(3, 2));
      return [](const torch::Tensor& x, const Given&) { return x; };
    }
    case Kind::kEmpty: {
      auto weight = own(name, torch::zeros({0, 3}));
      return [weight](const torch::Tensor& x, const Given&) { return x + weight.sum(); };
    }
    case Kind::kDetached: {
      auto weight = vector();
      auto layer = linear("_layer");
      return [weight, layer](const torch::Tensor& x, const Given&) mutable {
        return layer->forward(x).detach() * weight;
      };
    }
    case Kind::kNoGrad: {
      auto layer = linear();
      return [layer](const torch::Tensor& x, const Given&) mutable {
        torch::Tensor mean;
        {
          const torch::NoGradGuard no_grad;
          mean = layer->forward(x).mean();
        }
        return layer->forward(x) - mean;
      };
    }
    case Kind::kBranch: {
      auto even = linear("_even");
      auto odd = linear("_odd");
      return [even, odd](const torch::Tensor& x, const Given& given) mutable {
        return given.pass % 2 == 0 ? even->forward(x) : odd->forward(x);
      };
    }
    case Kind::kWeightNorm: {
      auto direction = matrix();
      auto length = own(name + "_length", torch::zeros({kWidth, 1}));
      return [direction, length](const torch::Tensor& x, const Given&) {
        const torch::Tensor norm = direction.norm(2, /*dim=*/{1}, /*keepdim=*/true) + 0.1;
        return nn::functional::linear(x, direction * (length / norm));
      };
    }
    case Kind::kStrided: {
      auto weight = own(name, torch::zeros({kWidth, kWidth}).t());
      return [weight](const torch::Tensor& x, const Given&) { return torch::matmul(x, weight); };
    }
    case Kind::kFused: {
      auto norm = vector();
      auto bias = own(name + "_bias", torch::zeros({kWidth}));
      auto gate = linear("_gate");
      auto head = own(name + "_head", torch::zeros({kWords, kWidth}));
      return [this, norm, bias, gate, head](const torch::Tensor& x, const Given& given) mutable {
        return through_operators(x, {norm, bias, gate->forward(x), head}, given.words);
      };
    }
    case Kind::kMasked: {
      auto weight = vector();
      return [this, weight](const torch::Tensor& x, const Given& given) {
        if (!is_training()) return x * weight;
        const torch::Tensor drawn =
            torch::rand(x.sizes(), masks_.at(static_cast<size_t>(given.rank)));
        return x * weight * (drawn > 0.3);
      };
    }
    case Kind::kDrawn: {
      auto weight = vector();
      auto drawn = std::make_shared<DrawnOnce>();
      return [this, weight, drawn](const torch::Tensor& x, const Given& given) {
        return is_training() ? drawn->times_one(x * weight, given.pass) : x * weight;
      };
    }
    case Kind::kCausal: {
      // Rows are the tokens of one sample. Two heads of 8.
      auto parts = register_module(name, nn::Linear(kWidth, 3 * kWidth));
      return [parts](const torch::Tensor& x, const Given&) mutable {
        const auto heads =
            parts->forward(x).view({1, x.size(0), 3, 2, 8}).transpose(1, 3).unbind(2);
        return at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, /*dropout_p=*/0,
                                                /*is_causal=*/true)
            .transpose(1, 2)
            .reshape({x.size(0), kWidth});
      };
    }
    case Kind::kExperts:
    case Kind::kSigmoidExperts:
    case Kind::kTightExperts: {
      auto experts = experts_.emplace_back(std::make_shared<ExpertUnit>(unit.kind));
      register_module(name, experts->layer());
      return [this, experts](const torch::Tensor& x, const Given& given) {
        return experts->forward(x, given.pass, given.rank, is_plain_);
      };
    }
    case Kind::kTouched: {
      auto list = register_module(name, nn::ModuleList());
      for (int index = 0; index < 3; ++index) list->push_back(nn::Linear(kWidth, kWidth));
      return [this, list](const torch::Tensor& x, const Given& given) {
        const auto run = [&](const torch::Tensor& x) { return by_words(*list, x, given.words); };
        if (!is_plain_) return touch_all(*list, x, run);
        torch::Tensor y = run(x);
        // What no row has used gets zeros.
        for (const torch::Tensor& parameter : list->parameters()) y = y + 0 * parameter.sum();
        return y;
      };
    }
    case Kind::kTiled: {
      const nn::ModuleList layers(register_module(name + "_up", nn::Linear(kWidth, 24)),
                                  register_module(name + "_down", nn::Linear(24, kWidth)));
      const auto run = [layers](const torch::Tensor& x) {
        const auto forward = [&](size_t layer, const torch::Tensor& x) {
          return layers->ptr(layer)->as<nn::LinearImpl>()->forward(x);
        };
        return forward(1, torch::tanh(forward(0, x)));
      };
      return [this, layers, run](const torch::Tensor& x, const Given& given) {
        if (is_plain_) return run(x);
        // Ranks have other words, and so another number of tiles.
        return tiled(*layers, x, run, {.tokens = 1 + given.words[0].item<int64_t>() % 3});
      };
    }
    default:
      throw std::logic_error("no unit made by hand");
  }
}

}  // namespace zeropage::scripts
