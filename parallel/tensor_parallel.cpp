#include "zeropage/tensor_parallel.h"

#include <algorithm>
#include <array>
#include <fnmatch.h>
#include <memory>
#include <numeric>
#include <optional>
#include <string_view>

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "operators/tensor_mark.h"
#include "paging/trap.h"
#include "parallel/between_mark.h"
#include "parallel/slice_gradient.h"
#include "parallel/slice_mark.h"
#include "parallel/whole_values.h"
#include "zeropage/check.h"
#include "zeropage/parallel_layers.h"

namespace zeropage {

// What a plan says of a layer.
struct CutForm {
  explicit CutForm(const Cut& cut)
      : kind(cut.kind_), parts(cut.parts_), unit(cut.unit_), may_be_uneven(cut.may_be_uneven_) {}
  Cut::Kind kind;
  std::vector<int64_t> parts;
  int64_t unit;
  bool may_be_uneven;
};

namespace {

using parallel::RanksPointer;
using parallel::SlicedDimension;

struct PlannedLayer {
  std::string name;
  CutForm cut;
  at::Tensor weight;
  at::Tensor bias;  // may be undefined
  bool is_linear = true;

  bool is_cut() const { return cut.kind != Cut::Kind::kBetween; }
};

// What the marks of a cut weight share.
struct CutWeight {
  std::string name;  // for collectives
  std::string who;   // for errors
  Cut::Kind kind;
  SlicedDimension cut;
  RanksPointer ranks;
};

// On a cut weight, and on what weight.t() gives: torch::nn::functional::linear() is no operator, but a product
// with that.
class CutMark final : public parallel::SliceMark {
 public:
  enum class Of : uint8_t { kWeight, kTransposed };

  CutMark(std::shared_ptr<const CutWeight> cut, Of of)
      : SliceMark(cut->who, cut->ranks, cut->cut), cut_(std::move(cut)), of_(of) {}

  bool replaces(const c10::OperatorHandle& handle) const override {
    return is_layer(handle) || (of_ == Of::kWeight && SliceMark::replaces(handle));
  }

  bool run(const c10::OperatorHandle& handle, const at::Tensor& marked,
           torch::jit::Stack& stack) override {
    if (!is_layer(handle)) {
      if (of_ == Of::kWeight || !parallel::slices_are_seen())
        return SliceMark::run(handle, marked, stack);
      if (parallel::slice_use_of(handle) == parallel::SliceUse::kSizes) return false;
      refuse(handle, at::GradMode::is_enabled());
    }
    parallel::watch_gradient(marked);
    const size_t arguments = handle.schema().arguments().size();
    at::Tensor result =
        in_place_of(handle.operator_name().name, torch::jit::last(stack, arguments));
    torch::jit::drop(stack, arguments);
    torch::jit::push(stack, std::move(result));
    return true;
  }

  c10::intrusive_ptr<parallel::KnownSlice> of_result() const override {
    return c10::make_intrusive<CutMark>(cut_, Of::kWeight);
  }

 protected:
  bool takes_slice(const c10::OperatorHandle& /*handle*/,
                   at::ArrayRef<c10::IValue> /*arguments*/) const override {
    return false;
  }
  bool may_be_spread() const override { return false; }

 private:
  bool is_layer(const c10::OperatorHandle& handle) const {
    if (!parallel::slices_are_seen()) return false;
    const std::string_view name = handle.operator_name().name;
    if (of_ == Of::kTransposed) return name == "aten::matmul" || name == "aten::addmm";
    return name == "aten::t" || name == "aten::linear" || name == "aten::embedding";
  }

  static at::Tensor transposed(const at::Tensor& marked) {
    const parallel::SlicesAsTheyAre scope;
    return marked.t();
  }

  at::Tensor in_place_of(std::string_view name, at::ArrayRef<c10::IValue> given) const {
    const auto tensor = [&](size_t index) {
      return given[index].isNone() ? at::Tensor() : given[index].toTensor();
    };
    if (name == "aten::embedding") return embedding(given);
    if (name == "aten::linear") {
      check_is_here(tensor(1));
      return linear(tensor(0), transposed(transposed(tensor(1))), tensor(2));
    }
    if (name == "aten::matmul") {
      check_is_here(tensor(1));
      return linear(tensor(0), transposed(tensor(1)), {});
    }
    if (name == "aten::addmm") {
      check_is_here(tensor(2));
      ZP_CHECK(given[3].toScalar().equal(1) && given[4].toScalar().equal(1), who(),
               ": expected torch::addmm without factors, got beta ", given[3].toScalar(),
               " and alpha ", given[4].toScalar(), "; leave the layer out of the plan");
      return linear(tensor(1), transposed(tensor(2)), tensor(0));
    }
    at::Tensor view = transposed(tensor(0));
    operators::set_mark(view, c10::make_intrusive<CutMark>(cut_, Of::kTransposed));
    return view;
  }

  void check_is_here(const at::Tensor& argument) const {
    ZP_CHECK(operators::mark_of(argument) == this, who(),
             ": expected it as the weight of a linear layer, got it as another argument; leave the "
             "layer out of the plan");
  }

  // weight: without a mark.
  at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                    const at::Tensor& bias) const {
    const auto& [name, who, kind, cut, ranks] = *cut_;
    if (kind == Cut::Kind::kRow) {
      ZP_CHECK(
          input.size(-1) == weight.size(1), who, ": expected this rank's ", weight.size(1), " of ",
          cut.total(), " features, got an input of sizes ", input.sizes(),
          "; plan the layer before it as a column in the same units, or this one not as a row");
      const at::Tensor sum = parallel::reduce_from_ranks(at::linear(input, weight), ranks, name);
      return bias.defined() ? sum + bias : sum;
    }
    const at::Tensor copied = parallel::copy_to_ranks(input, ranks, name);
    if (bias.defined()) parallel::watch_gradient(bias);
    const at::Tensor slice = [&] {
      const parallel::SlicesAsTheyAre scope;  // the bias is one
      return at::linear(copied, weight, bias);
    }();
    if (kind == Cut::Kind::kColumn) return slice;
    return parallel::gather_from_ranks(slice, cut.parts().front(), ranks, name);
  }

  at::Tensor embedding(at::ArrayRef<c10::IValue> given) const {
    ZP_CHECK(cut_->kind == Cut::Kind::kVocabulary, who(),
             ": expected a linear layer, got torch::embedding; plan it as Cut::vocabulary()");
    ZP_CHECK(
        given[2].toInt() < 0 && !given[3].toBool() && !given[4].toBool(), who(),
        ": expected an Embedding without padding_idx, scale_grad_by_freq and sparse, got one of "
        "them; leave the layer out of the plan");
    return parallel::embedding_over_ranks(transposed(transposed(given[0].toTensor())),
                                          given[1].toTensor(), cut_->cut.parts().front(),
                                          cut_->ranks, cut_->name);
  }

  const std::shared_ptr<const CutWeight> cut_;
  const Of of_;
};

c10::intrusive_ptr<CutMark> mark_for(const PlannedLayer& layer, const SlicedDimension& cut_of,
                                     const RanksPointer& ranks) {
  const std::string quoted = "\"" + layer.name + "\"";
  auto cut = std::make_shared<const CutWeight>(
      CutWeight{quoted, "the weight of " + quoted + ", which tensor_parallel() cut", layer.cut.kind,
                cut_of, ranks});
  return c10::make_intrusive<CutMark>(std::move(cut), CutMark::Of::kWeight);
}

// A parameter that stays whole is a layer with a weight of its own, but for those of a Linear.
std::vector<PlannedLayer> parameters_between(const std::string& name,
                                             const torch::nn::Module& module, const CutForm& cut) {
  std::vector<PlannedLayer> layers;
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    layers.push_back(
        {name.empty() ? item.key() : name + "." + item.key(), cut, item.value(), {}, false});
  }
  return layers;
}

std::optional<PlannedLayer> layer_of(const std::string& name, const torch::nn::Module& module,
                                     const CutForm& cut) {
  if (cut.kind == Cut::Kind::kVocabulary) {
    const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module);
    if (embedding == nullptr) return std::nullopt;
    return PlannedLayer{name, cut, embedding->weight, {}, false};
  }
  const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(&module);
  if (linear == nullptr) return std::nullopt;
  return PlannedLayer{name, cut, linear->weight, linear->bias};
}

// By kind.
constexpr std::array kNamesOfKind = {"column", "row", "vocabulary", "between"};
constexpr std::array kLayersOfKind = {"torch::nn::Linear", "torch::nn::Linear",
                                      "torch::nn::Embedding",
                                      "layer that has parameters of its own"};

std::vector<PlannedLayer> layers_of(const torch::nn::Module& module,
                                    const TensorParallelPlan& plan) {
  std::vector<PlannedLayer> layers;
  for (const auto& [pattern, planned] : plan) {
    const CutForm cut(planned);
    const size_t before = layers.size();
    for (const auto& item : module.named_modules()) {
      if (::fnmatch(pattern.c_str(), item.key().c_str(), 0) != 0) continue;
      auto layer = layer_of(item.key(), *item.value(), cut);
      if (layer) {
        layers.push_back(std::move(*layer));
      } else if (cut.kind == Cut::Kind::kBetween) {
        const auto own = parameters_between(item.key(), *item.value(), cut);
        layers.insert(layers.end(), own.begin(), own.end());
      }
    }
    ZP_CHECK(layers.size() > before, "tensor_parallel: the name \"", pattern, "\" fits no ",
             kLayersOfKind[static_cast<size_t>(cut.kind)],
             "; Module::named_modules() has the names");
  }
  return layers;
}

std::string words_of(const std::vector<int64_t>& parts) {
  return parts.size() == 1 ? c10::str(parts.front()) : c10::str(at::IntArrayRef(parts));
}

SlicedDimension cut_of(const PlannedLayer& layer, int ranks) {
  const int64_t dim = layer.cut.kind == Cut::Kind::kRow ? 1 : 0;
  const int64_t total = layer.weight.size(dim), unit = layer.cut.unit;
  const std::vector<int64_t>& parts = layer.cut.parts;
  const std::string who = "tensor_parallel: \"" + layer.name + "\"";
  std::vector<parallel::Slices> slices;
  if (parts.size() == 1) {
    ZP_CHECK(total % parts.front() == 0, who, ": expected a number of outputs that ", parts.front(),
             " parts divide, got ", total,
             "; change Cut::parts(), which takes a list of the parts' sizes, too");
    slices.assign(static_cast<size_t>(parts.front()),
                  parallel::Slices(total / parts.front(), unit, ranks, who));
  } else {
    const int64_t units = std::accumulate(parts.begin(), parts.end(), int64_t{0});
    ZP_CHECK(units * unit == total, who, ": expected parts that add up to ", total,
             " outputs, got ", at::IntArrayRef(parts), " units of ", unit, ", which are ",
             units * unit, "; change Cut::parts() or Cut::unit()");
    // What one rank has of a part goes with what it has of the others: a key with the queries that share it.
    int64_t together = 0;
    for (const int64_t part : parts) together = std::gcd(together, part);
    for (const int64_t part : parts) {
      slices.emplace_back(part * unit, part / together * unit, ranks, who);
    }
  }
  if (!layer.cut.may_be_uneven) parallel::check_is_even(slices.front(), who, "Cut::uneven()");
  return {std::move(slices), dim};
}

void check_can_be_cut(const PlannedLayer& layer, const std::vector<PlannedLayer>& all,
                      const comm::World& world) {
  ZP_CHECK(
      !layer.weight.is_meta() || world.device().is_meta(), "tensor_parallel: \"", layer.name,
      "\" has no values yet: slices are cut from values, except in a simulated world; construct "
      "the module itself, not as a DeferredModule");
  const auto uses = std::count_if(all.begin(), all.end(), [&](const PlannedLayer& other) {
    return other.weight.is_same(layer.weight);
  });
  ZP_CHECK(uses == 1 && operators::mark_of(layer.weight) == nullptr,
           "tensor_parallel: the weight of \"", layer.name, "\" is marked already, or ", uses,
           " layers of the plan have it; name each weight once");
  ZP_CHECK(!operators::may_be_paged(layer.weight), "tensor_parallel: \"", layer.name,
           "\" is sharded by a DistributedDataParallel; call tensor_parallel() before wrapping");
}

// The tensor stays the same one.
void cut_tensor(const at::Tensor& tensor, const SlicedDimension& cut, int rank) {
  tensor.set_data(cut.take(tensor, rank));
}

void cut_layer(const PlannedLayer& layer, const SlicedDimension& cut, const RanksPointer& ranks) {
  const int rank = ranks->world.rank();
  cut_tensor(layer.weight, cut, rank);
  operators::set_mark(layer.weight, mark_for(layer, cut, ranks));
  if (layer.cut.kind == Cut::Kind::kRow || !layer.bias.defined()) return;
  cut_tensor(layer.bias, cut, rank);
  operators::set_mark(
      layer.bias,
      c10::make_intrusive<parallel::SliceMark>(
          "the bias of \"" + layer.name + "\", which tensor_parallel() cut", ranks, cut));
}

void mark_between(const PlannedLayer& layer, const RanksPointer& ranks) {
  using parallel::BetweenMark;
  const std::string quoted = "\"" + layer.name + "\"";
  const auto of_layer = std::make_shared<const BetweenMark::Layer>(BetweenMark::Layer{
      quoted, quoted + ", which the plan of tensor_parallel() has between a column and its row",
      ranks});
  const auto of_weight = layer.is_linear ? BetweenMark::Of::kWeight : BetweenMark::Of::kParameter;
  operators::set_mark(layer.weight, c10::make_intrusive<BetweenMark>(of_layer, of_weight));
  if (!layer.bias.defined()) return;
  operators::set_mark(layer.bias,
                      c10::make_intrusive<BetweenMark>(of_layer, BetweenMark::Of::kBias));
}

void check_is_defined(const at::Tensor& tensor, const char* who) {
  ZP_CHECK(tensor.defined(), who,
           ": expected a tensor, got an undefined one, as p.grad() is before a backward; ask "
           "defined() first");
}

std::vector<std::string> lines_of(const std::vector<PlannedLayer>& layers) {
  std::vector<std::string> lines;
  for (const PlannedLayer& layer : layers) {
    const bool is_marked = operators::mark_of(layer.weight) != nullptr;
    lines.push_back(c10::str(layer.name, ": ", kNamesOfKind[static_cast<size_t>(layer.cut.kind)],
                             ", parts ", words_of(layer.cut.parts), ", unit ", layer.cut.unit,
                             layer.cut.may_be_uneven ? ", uneven" : "", ", weight ",
                             is_marked ? "marked" : c10::str(layer.weight.sizes())));
  }
  return lines;
}

}  // namespace

Cut Cut::parts(int64_t count) const {
  ZP_CHECK(kind_ == Kind::kColumn && count >= 1,
           "Cut::parts: expected 1 or more parts of a column, got ", count,
           " of another cut or below 1; leave it out");
  Cut cut = *this;
  cut.parts_ = {count};
  return cut;
}

Cut Cut::parts(std::vector<int64_t> sizes) const {
  const bool are_sizes =
      std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 1; });
  ZP_CHECK(kind_ == Kind::kColumn && sizes.size() >= 2 && are_sizes,
           "Cut::parts: expected the sizes of 2 or more parts of a column, each of 1 or more "
           "units, got ",
           at::IntArrayRef(sizes), kind_ == Kind::kColumn ? "" : " of another cut",
           "; leave it out where there is one part, and give a number for parts of one size");
  Cut cut = *this;
  cut.parts_ = std::move(sizes);
  return cut;
}

Cut Cut::unit(int64_t elements) const {
  ZP_CHECK(elements >= 1, "Cut::unit: expected 1 or more elements, got ", elements,
           "; give it the size of a head");
  Cut cut = *this;
  cut.unit_ = elements;
  return cut;
}

Cut Cut::uneven() const {
  Cut cut = *this;
  cut.may_be_uneven_ = true;
  return cut;
}

at::Tensor whole_of(const at::Tensor& parameter) {
  check_is_defined(parameter, "whole_of");
  const auto* const mark = parallel::slice_mark_of(parameter);
  return mark == nullptr ? own_slice(parameter) : mark->whole_of(parameter);
}

at::Tensor own_slice(const at::Tensor& parameter) {
  check_is_defined(parameter, "own_slice");
  const parallel::SlicesAsTheyAre scope;
  const at::NoGradGuard no_grad;
  return parameter.detach().clone();
}

void tensor_parallel(torch::nn::Module& module, const comm::World& world,
                     const TensorParallelPlan& plan) {
  paging::check_dispatcher();
  const std::vector<PlannedLayer> layers = layers_of(module, plan);
  world.check_agreement("tensor_parallel", lines_of(layers));
  std::vector<std::optional<SlicedDimension>> cuts;
  for (const PlannedLayer& layer : layers) {
    check_can_be_cut(layer, layers, world);
    cuts.push_back(layer.is_cut() ? std::optional(cut_of(layer, world.size())) : std::nullopt);
  }
  parallel::take_values_of_rank_zero(module, world, "tensor_parallel");
  const RanksPointer ranks = parallel::ranks_of(world);
  for (size_t index = 0; index < layers.size(); ++index) {
    if (cuts[index]) {
      cut_layer(layers[index], *cuts[index], ranks);
    } else {
      mark_between(layers[index], ranks);
    }
  }
}

}  // namespace zeropage
