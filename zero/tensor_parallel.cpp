#include "zero/tensor_parallel.h"

#include <algorithm>
#include <fnmatch.h>
#include <memory>
#include <optional>
#include <string_view>

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "memory/check.h"
#include "operators/tensor_mark.h"
#include "paging/trap.h"
#include "parallel/rank_functions.h"
#include "parallel/slice_mark.h"
#include "parallel/vocabulary.h"
#include "parallel/whole_values.h"

namespace zeropage {
namespace {

using parallel::RanksPointer;
using parallel::SlicedDimension;

struct PlannedLayer {
  std::string name;
  Cut cut;
  at::Tensor weight;
  at::Tensor bias;  // may be undefined
};

// What the marks of a cut weight share.
struct CutWeight {
  std::string name;  // for collectives
  std::string who;   // for errors
  Cut::Kind kind;
  SlicedDimension cut;
  RanksPointer ranks;
  const c10::TensorImpl* tensor;  // to compare with
};

// Operators that give no values of the tensor to a forward.
bool passes(std::string_view name) {
  return name == "aten::detach" || name == "aten::_has_compatible_shallow_copy_type" ||
         name.ends_with("_like") || name.starts_with("aten::new_");
}

// On a cut weight, and on what weight.t() gives: torch::nn::functional::linear() is no operator, but a product
// with that.
class CutMark final : public parallel::SliceMark {
 public:
  enum class Of : uint8_t { kWeight, kTransposed };

  CutMark(std::shared_ptr<const CutWeight> cut, Of of)
      : SliceMark(cut->who, cut->ranks, cut->cut), cut_(std::move(cut)), of_(of) {}

  bool replaces(const c10::OperatorHandle& handle) const override {
    if (bare) return false;
    const std::string_view name = handle.operator_name().name;
    if (of_ == Of::kTransposed) return name == "aten::matmul" || name == "aten::addmm";
    return name == "aten::t" || name == "aten::linear" || name == "aten::embedding";
  }

  bool run(const c10::OperatorHandle& handle, const at::Tensor& marked,
           torch::jit::Stack& stack) override {
    if (bare) return false;
    if (!replaces(handle)) {
      refuse(handle, marked);
      return false;
    }
    const size_t arguments = handle.schema().arguments().size();
    at::Tensor result =
        in_place_of(handle.operator_name().name, torch::jit::last(stack, arguments));
    torch::jit::drop(stack, arguments);
    torch::jit::push(stack, std::move(result));
    return true;
  }

 private:
  // While it lives, marks of this thread see nothing: views are made of marked tensors that have no mark.
  struct Bare {
    Bare() { bare = true; }
    ~Bare() { bare = false; }
  };

  static at::Tensor transposed(const at::Tensor& marked) {
    const Bare scope;
    return marked.t();
  }

  void refuse(const c10::OperatorHandle& handle, const at::Tensor& marked) const {
    // What detach() made of the weight goes into averages and logs.
    const bool is_used = of_ == Of::kTransposed || marked.unsafeGetTensorImpl() == cut_->tensor;
    ZP_CHECK(
        !is_used || !at::GradMode::is_enabled() || passes(handle.operator_name().name), who(),
        ": expected a linear layer or an embedding, got ", handle.operator_name().name,
        ", which would see this rank's slice alone; call the layer's forward(), or leave it out of "
        "the plan, and convert the module before");
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
    memory::set_mark(view, c10::make_intrusive<CutMark>(cut_, Of::kTransposed));
    return view;
  }

  void check_is_here(const at::Tensor& argument) const {
    ZP_CHECK(memory::mark_of(argument) == this, who(),
             ": expected it as the weight of a linear layer, got it as another argument; leave the "
             "layer out of the plan");
  }

  // weight: without a mark.
  at::Tensor linear(const at::Tensor& input, const at::Tensor& weight,
                    const at::Tensor& bias) const {
    const auto& [name, who, kind, cut, ranks, impl] = *cut_;
    if (kind == Cut::Kind::kRow) {
      ZP_CHECK(
          input.size(-1) == weight.size(1), who, ": expected this rank's ", weight.size(1), " of ",
          cut.slices.total(), " features, got an input of sizes ", input.sizes(),
          "; plan the layer before it as a column in the same units, or this one not as a row");
      const at::Tensor sum = parallel::reduce_from_ranks(at::linear(input, weight), ranks, name);
      return bias.defined() ? sum + bias : sum;
    }
    at::Tensor slice = at::linear(parallel::copy_to_ranks(input, ranks, name), weight, bias);
    if (kind == Cut::Kind::kColumn) return slice;
    return parallel::gather_from_ranks(slice, cut.slices, ranks, name);
  }

  at::Tensor embedding(at::ArrayRef<c10::IValue> given) const {
    ZP_CHECK(cut_->kind == Cut::Kind::kVocabulary, who(),
             ": expected a linear layer, got torch::embedding; plan it as Cut::vocabulary()");
    ZP_CHECK(
        given[2].toInt() < 0 && !given[3].toBool() && !given[4].toBool(), who(),
        ": expected an Embedding without padding_idx, scale_grad_by_freq and sparse, got one of "
        "them; leave the layer out of the plan");
    return parallel::embedding_over_ranks(transposed(transposed(given[0].toTensor())),
                                          given[1].toTensor(), cut_->cut.slices, cut_->ranks,
                                          cut_->name);
  }

  static thread_local bool bare;

  const std::shared_ptr<const CutWeight> cut_;
  const Of of_;
};

thread_local bool CutMark::bare = false;

c10::intrusive_ptr<CutMark> mark_for(const PlannedLayer& layer, const SlicedDimension& cut_of,
                                     const RanksPointer& ranks) {
  const std::string quoted = "\"" + layer.name + "\"";
  auto cut = std::make_shared<const CutWeight>(
      CutWeight{quoted, "the weight of " + quoted + ", which tensor_parallel() cut",
                layer.cut.kind(), cut_of, ranks, layer.weight.unsafeGetTensorImpl()});
  return c10::make_intrusive<CutMark>(std::move(cut), CutMark::Of::kWeight);
}

std::optional<PlannedLayer> layer_of(const std::string& name, const torch::nn::Module& module,
                                     const Cut& cut) {
  if (cut.kind() == Cut::Kind::kVocabulary) {
    const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module);
    if (embedding == nullptr) return std::nullopt;
    return PlannedLayer{name, cut, embedding->weight, {}};
  }
  const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(&module);
  if (linear == nullptr) return std::nullopt;
  return PlannedLayer{name, cut, linear->weight, linear->bias};
}

std::vector<PlannedLayer> layers_of(const torch::nn::Module& module,
                                    const TensorParallelPlan& plan) {
  std::vector<PlannedLayer> layers;
  for (const auto& [pattern, cut] : plan) {
    const size_t before = layers.size();
    for (const auto& item : module.named_modules()) {
      if (::fnmatch(pattern.c_str(), item.key().c_str(), 0) != 0) continue;
      auto layer = layer_of(item.key(), *item.value(), cut);
      if (layer) layers.push_back(std::move(*layer));
    }
    ZP_CHECK(
        layers.size() > before, "tensor_parallel: the name \"", pattern,
        "\" fits no torch::nn::", cut.kind() == Cut::Kind::kVocabulary ? "Embedding" : "Linear",
        "; Module::named_modules() has the names");
  }
  return layers;
}

SlicedDimension cut_of(const PlannedLayer& layer, int ranks) {
  const int64_t dim = layer.cut.kind() == Cut::Kind::kRow ? 1 : 0;
  const int64_t parts = layer.cut.parts();
  ZP_CHECK(layer.weight.size(dim) % parts == 0, "tensor_parallel: \"", layer.name,
           "\": expected a number of outputs that ", parts, " parts divide, got ",
           layer.weight.size(dim), "; change Cut::parts()");
  return {{layer.weight.size(dim) / parts, layer.cut.unit(), ranks,
           "tensor_parallel: \"" + layer.name + "\""},
          dim,
          parts};
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
  ZP_CHECK(uses == 1 && memory::mark_of(layer.weight) == nullptr,
           "tensor_parallel: the weight of \"", layer.name, "\" is marked already, or ", uses,
           " layers of the plan have it; name each weight once");
  ZP_CHECK(!memory::may_be_paged(layer.weight), "tensor_parallel: \"", layer.name,
           "\" is sharded by a DistributedDataParallel; call tensor_parallel() before wrapping");
}

// The tensor stays the same one.
void cut_tensor(const at::Tensor& tensor, const SlicedDimension& cut, int rank) {
  tensor.set_data(cut.take(tensor, rank));
}

std::vector<std::string> lines_of(const std::vector<PlannedLayer>& layers) {
  constexpr const char* kKinds[] = {"column", "row", "vocabulary"};
  std::vector<std::string> lines;
  for (const PlannedLayer& layer : layers) {
    const bool is_marked = memory::mark_of(layer.weight) != nullptr;
    lines.push_back(c10::str(layer.name, ": ", kKinds[static_cast<int>(layer.cut.kind())],
                             ", parts ", layer.cut.parts(), ", unit ", layer.cut.unit(),
                             ", weight ", is_marked ? "marked" : c10::str(layer.weight.sizes())));
  }
  return lines;
}

}  // namespace

Cut Cut::parts(int64_t count) const {
  ZP_CHECK(kind_ == Kind::kColumn && count >= 1,
           "Cut::parts: expected 1 or more parts of a column, got ", count,
           " of another cut or below 1; leave it out");
  Cut cut = *this;
  cut.parts_ = count;
  return cut;
}

Cut Cut::unit(int64_t elements) const {
  ZP_CHECK(elements >= 1, "Cut::unit: expected 1 or more elements, got ", elements,
           "; give it the size of a head");
  Cut cut = *this;
  cut.unit_ = elements;
  return cut;
}

void tensor_parallel(torch::nn::Module& module, const comm::World& world,
                     const TensorParallelPlan& plan) {
  memory::check_dispatcher();
  const std::vector<PlannedLayer> layers = layers_of(module, plan);
  world.check_agreement("tensor_parallel", lines_of(layers));
  std::vector<SlicedDimension> cuts;
  for (const PlannedLayer& layer : layers) {
    check_can_be_cut(layer, layers, world);
    cuts.push_back(cut_of(layer, world.size()));
  }
  parallel::take_values_of_rank_zero(module, world, "tensor_parallel");
  const RanksPointer ranks = parallel::ranks_of(world);
  for (size_t index = 0; index < layers.size(); ++index) {
    const PlannedLayer& layer = layers[index];
    const bool is_row = layer.cut.kind() == Cut::Kind::kRow;
    cut_tensor(layer.weight, cuts[index], world.rank());
    memory::set_mark(layer.weight, mark_for(layer, cuts[index], ranks));
    if (is_row || !layer.bias.defined()) continue;
    cut_tensor(layer.bias, cuts[index], world.rank());
    memory::set_mark(
        layer.bias,
        c10::make_intrusive<parallel::SliceMark>(
            "the bias of \"" + layer.name + "\", which tensor_parallel() cut", ranks, cuts[index]));
  }
}

}  // namespace zeropage
