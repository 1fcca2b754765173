#include "parallel/slice_mark.h"

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>

#include "memory/self_check.h"
#include "operators/operator_schema.h"
#include "parallel/rank_operators.h"
#include "parallel/slice_arguments.h"
#include "parallel/slice_gradient.h"
#include "zeropage/check.h"

namespace zeropage::parallel {
namespace {

thread_local bool slices_are_unseen = false;
thread_local bool saving_was_seen = false;

bool needs_gradient(at::ArrayRef<c10::IValue> arguments) {
  return at::GradMode::is_enabled() &&
         std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
           const std::vector<at::Tensor> tensors = operators::tensors_in(argument);
           return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
             return tensor.defined() && tensor.requires_grad();
           });
         });
}

// What the operator gives that is no argument, one by one. sources: the tensors that results came from, where they are
// a list.
template <typename Visit>
void for_each_new_result(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                         const std::vector<at::Tensor>& sources, const Visit& visit) {
  const auto& returns = op.schema().returns();
  const auto results = torch::jit::last(stack, returns.size());
  for (size_t index = 0; index < returns.size(); ++index) {
    if (operators::is_written(returns[index])) continue;
    if (results[index].isTensor()) {
      visit(results[index].toTensor(), nullptr);
    } else if (results[index].isTensorList()) {
      const std::vector<at::Tensor> list = results[index].toTensorVector();
      for (size_t at = 0; at < list.size() && at < sources.size(); ++at) {
        visit(list[at], &sources[at]);
      }
    }
  }
}

bool has_other_mark(at::ArrayRef<c10::IValue> arguments, const SliceMark& own) {
  return std::any_of(arguments.begin(), arguments.end(), [&own](const c10::IValue& argument) {
    const auto* const mark =
        argument.isTensor() ? operators::mark_of(argument.toTensor()) : nullptr;
    return mark != nullptr && mark != &own;
  });
}

// Another tensor's conversion to what a slice is of.
bool reads_type_alone(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  const std::string_view name = op.operator_name().name;
  const bool converts = name == "aten::to" || name == "aten::type_as";
  return converts && arguments[0].isTensor() && slice_mark_of(arguments[0].toTensor()) == nullptr;
}

void refuse_to_save(const at::Tensor& tensor) {
  const SliceMark* const mark = slice_mark_of(tensor);
  ZP_CHECK(mark == nullptr || mark->ranks().size() == 1, "torch::save() of ",
           mark == nullptr ? "" : mark->who(),
           ", or of a tensor that was made of it, as an optimizer's states are: expected a whole "
           "tensor, got this rank's slice of ",
           tensor.sizes(), " of ",
           mark == nullptr ? at::IntArrayRef() : mark->cut().whole_sizes(tensor.sizes()),
           "; zeropage::save_weights() and save_state() of a model that is wrapped over the whole "
           "mesh, with a zeropage::Optimizer, write whole parameters and states, "
           "zeropage::whole_of(tensor) returns the whole one, and zeropage::own_slice(tensor) this "
           "rank's slice as a tensor that may be saved");
}

// LibTorch's pickler calls no operator on a host tensor, but asks for what it does not know of tensors of a device.
void watch_saving() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const c10::DeviceType device : {c10::kCPU, c10::kCUDA}) {
      torch::jit::GetBackendMetaAllowlist().insert(device);
      auto& known = torch::jit::GetBackendMetaSerialization()[static_cast<size_t>(device)];
      const auto others = known;
      known = {[others](const at::Tensor& tensor, std::unordered_map<std::string, bool>& metadata) {
                 saving_was_seen = true;
                 refuse_to_save(tensor);
                 if (others) others->first(tensor, metadata);
               },
               [others](const at::Tensor& tensor, std::unordered_map<std::string, bool>& metadata) {
                 if (others) others->second(tensor, metadata);
               }};
    }
  });
}

void probe_saving() {
  saving_was_seen = false;
  torch::jit::pickle_save(at::zeros({1}, at::kFloat));
  memory::expect_of_libtorch("the pickler asks about the metadata of a host tensor",
                             saving_was_seen);
}

void check_saving() {
  static memory::SelfCheck check("tensor_parallel()", "layers of zeropage/parallel_layers.h",
                                 &probe_saving);
  watch_saving();
  check.require();
}

// No layer takes it.
class GradientMark final : public SliceMark {
 public:
  GradientMark(std::string who, const SliceMark& like)
      : SliceMark(std::move(who), like.group(), like.cut()) {}

  c10::intrusive_ptr<KnownSlice> of_result() const override {
    return c10::make_intrusive<GradientMark>(who(), *this);
  }

 protected:
  bool takes_slice(const c10::OperatorHandle& /*handle*/,
                   at::ArrayRef<c10::IValue> /*arguments*/) const override {
    return false;
  }
  bool may_be_spread() const override { return false; }
  const char* way_out() const override {
    return "; take all slices by zeropage::whole_of(parameter.grad()), this rank's as it is by "
           "zeropage::own_slice(parameter.grad()) (zeropage/tensor_parallel.h), or the norm of all "
           "gradients by zeropage::gradient_norm(model)";
  }
};

}  // namespace

SlicesAsTheyAre::SlicesAsTheyAre() : before_(std::exchange(slices_are_unseen, true)) {}

SlicesAsTheyAre::~SlicesAsTheyAre() {
  slices_are_unseen = before_;
}

bool slices_are_seen() {
  return !slices_are_unseen;
}

const SliceMark* slice_mark_of(const at::Tensor& tensor) {
  return dynamic_cast<const SliceMark*>(operators::mark_of(tensor));
}

SliceMark::SliceMark(std::string who, RanksPointer ranks, SlicedDimension cut)
    : KnownSlice(std::move(who), std::move(ranks), std::move(cut)) {
  check_saving();
}

// With a collective, or with draws for other sizes: nobody may replay one of them.
bool SliceMark::replaces(const c10::OperatorHandle& handle) const {
  if (slices_are_unseen) return false;
  const SliceUse use = slice_use_of(handle);
  return use == SliceUse::kFigures || use == SliceUse::kDrawsLike;
}

bool SliceMark::run(const c10::OperatorHandle& handle, const at::Tensor& marked,
                    torch::jit::Stack& stack) {
  if (slices_are_unseen) return false;
  watch_gradient(marked);
  const auto arguments = torch::jit::last(stack, handle.schema().arguments().size());
  if (takes_slice(handle, arguments)) return run_on_slice(handle, arguments, stack);
  if (reads_type_alone(handle, arguments)) return false;
  const SliceUse use = slice_use_of(handle);
  if (use == SliceUse::kSizes) {
    const bool imitates = std::string_view(handle.operator_name().name).ends_with("_like");
    if (imitates) run_like(handle, marked, stack);
    return imitates;
  }
  if (use == SliceUse::kDrawsLike) {
    draw_whole(handle, marked, stack);
    return true;
  }
  const bool gradients = needs_gradient(arguments);
  // A copy of a bias would be no activation.
  const bool copies = std::string_view(handle.operator_name().name) == "aten::copy_";
  if (gradients && use == SliceUse::kElements && !copies && meets_no_slice(arguments)) {
    return run_on_slice(handle, arguments, stack);
  }
  if (gradients || use == SliceUse::kDraws || use == SliceUse::kOther) refuse(handle, gradients);
  if (use == SliceUse::kFigures) {
    run_on_whole(handle, marked, stack);
  } else {
    run_on_elements(handle, marked, stack);
  }
  return true;
}

bool SliceMark::run_on_slice(const c10::OperatorHandle& handle, at::ArrayRef<c10::IValue> arguments,
                             torch::jit::Stack& stack) const {
  // A layer is for the weight's mark to run.
  if (has_other_mark(arguments, *this)) return false;
  const SlicesAsTheyAre scope;
  handle.callBoxed(&stack);
  return true;
}

c10::intrusive_ptr<KnownSlice> SliceMark::of_result() const {
  return c10::make_intrusive<SliceMark>(who(), group(), cut());
}

c10::intrusive_ptr<KnownSlice> SliceMark::of_gradient() const {
  return c10::make_intrusive<GradientMark>("the gradient of " + who(), *this);
}

// A bias goes with the weight, whose mark is asked too; without one sizes must fit, or LibTorch throws. And it may be
// given dimensions to be added to an activation.
bool SliceMark::takes_slice(const c10::OperatorHandle& handle,
                            at::ArrayRef<c10::IValue> arguments) const {
  const std::string_view name = handle.operator_name().name;
  if (name == "aten::linear" || name == "aten::addmm" || name == "aten::unsqueeze") return true;
  const bool views = name == "aten::view" || name == "aten::reshape" || name == "aten::expand";
  return views && arguments[1].isIntList() && arguments[1].toIntList().size() > 1;
}

bool SliceMark::meets_no_slice(at::ArrayRef<c10::IValue> arguments) const {
  return may_be_spread() &&
         std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
           if (!argument.isTensor() || !argument.toTensor().defined()) return false;
           const at::Tensor& tensor = argument.toTensor();
           return slice_mark_of(tensor) == nullptr &&
                  !tensor.unsafeGetTensorImpl()->is_wrapped_number();
         });
}

void SliceMark::refuse(const c10::OperatorHandle& handle, bool gradients) const {
  const auto& name = handle.operator_name().name;
  ZP_CHECK(slice_use_of(handle) != SliceUse::kDraws, who(), ": expected no random numbers, got ",
           name, ", which would draw for this rank's slice alone; initialise the module before ",
           cut_by(), ", which gives all ranks rank 0's values and cuts them");
  ZP_CHECK(!gradients, who(), ": expected ", expected_layer(), ", got ", name,
           ", which would see this rank's slice alone; ", way_out_of_layer());
  ZP_CHECK(
      false, who(),
      ": expected the layer's forward(), or an operator that does the same to each element, got ",
      name, ", which would see this rank's slice alone", way_out());
}

const char* SliceMark::way_out() const {
  return "; call the layer's forward(), or take all slices by zeropage::whole_of(parameter), or "
         "this rank's as it is by zeropage::own_slice(parameter) (zeropage/tensor_parallel.h)";
}

void SliceMark::take_slice_of_source(const c10::OperatorHandle& handle, const at::Tensor& marked,
                                     torch::jit::Stack& stack) const {
  if (std::string_view(handle.operator_name().name) != "aten::set_") return;
  const size_t count = handle.schema().arguments().size();
  const auto arguments = torch::jit::last(stack, count);
  if (!arguments[0].isTensor() || !arguments[0].toTensor().is_same(marked)) return;
  ZP_CHECK(count > 1 && arguments[1].isTensor(), who(),
           ": expected a tensor with values, got set_() without one; use copy_()");
  const at::Tensor& source = arguments[1].toTensor();
  const std::vector<int64_t> whole = cut().whole_sizes(marked.sizes());
  if (source.sizes() == whole && slice_mark_of(source) == nullptr) {
    torch::jit::peek(stack, 1, count) = cut().take(source, ranks().rank());
    return;
  }
  ZP_CHECK(source.sizes() == marked.sizes(), who(), ": expected values of sizes ",
           at::IntArrayRef(whole), ", or this rank's of ", marked.sizes(), ", got ", source.sizes(),
           "; load the file of the same module");
}

void SliceMark::run_on_elements(const c10::OperatorHandle& handle, const at::Tensor& marked,
                                torch::jit::Stack& stack) const {
  const size_t count = handle.schema().arguments().size();
  check_are_cut_alike(handle, marked, torch::jit::last(stack, count));
  take_slice_of_source(handle, marked, stack);
  const bool is_conversion = std::string_view(handle.operator_name().name) == "aten::to";
  if (!is_conversion) take_slices_beside(handle, marked, stack);
  const BecomingSlices written(handle, marked, torch::jit::last(stack, count));
  // What _foreach_mul() gives comes from its first list.
  std::vector<at::Tensor> sources;
  const c10::IValue& first = torch::jit::peek(stack, 0, count);
  if (first.isTensorList()) sources = first.toTensorVector();
  const SlicesAsTheyAre scope;
  handle.callBoxed(&stack);
  written.mark();
  for_each_new_result(handle, stack, sources,
                      [&](const at::Tensor& result, const at::Tensor* source) {
                        const at::Tensor& from = source == nullptr ? marked : *source;
                        const SliceMark* const mark = slice_mark_of(from);
                        if (!result.defined() || mark == nullptr) return;
                        const bool is_alike = result.sizes() == from.sizes();
                        ZP_CHECK(mark->may_be_spread() || is_alike, mark->who(),
                                 ": expected an operator that does the same to each element, got ",
                                 handle.operator_name().name, " that gives ", result.sizes(),
                                 " of ", from.sizes(), "; call the layer's forward()");
                        if (is_alike && !result.requires_grad()) mark_as_slice(result, *mark);
                      });
}

void SliceMark::run_like(const c10::OperatorHandle& handle, const at::Tensor& marked,
                         torch::jit::Stack& stack) const {
  const SlicesAsTheyAre scope;
  handle.callBoxed(&stack);
  const at::Tensor result = torch::jit::peek(stack, 0, 1).toTensor();
  if (result.sizes() == marked.sizes()) mark_as_slice(result, *this);
}

at::Tensor SliceMark::whole_of(const at::Tensor& slice) const {
  const SlicesAsTheyAre scope;
  const at::NoGradGuard no_grad;
  const bool is_bool = slice.scalar_type() == c10::kBool;
  const at::Tensor values = slice.detach().to(is_bool ? c10::kByte : slice.scalar_type(),
                                              /*non_blocking=*/false, /*copy=*/true);
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const Slices& part : cut().parts()) {
    const int64_t numel = part.size(ranks().rank());
    const at::Tensor own = values.narrow(cut().dim(), begin, numel).contiguous();
    parts.push_back(all_gather(own, part.sizes(), cut().dim(), group(), who()));
    begin += numel;
  }
  const at::Tensor whole = at::cat(parts, cut().dim());
  return is_bool ? whole.to(c10::kBool) : whole;
}

void SliceMark::run_on_whole(const c10::OperatorHandle& handle, const at::Tensor& marked,
                             torch::jit::Stack& stack) const {
  const size_t count = handle.schema().arguments().size();
  const std::vector<int64_t> whole_sizes = cut().whole_sizes(marked.sizes());
  const auto whole = [&](const at::Tensor& tensor) {
    const SliceMark* const mark = slice_mark_of(tensor);
    if (mark != nullptr) return mark->whole_of(tensor);
    ZP_CHECK(!tensor.defined() || tensor.sizes() != marked.sizes() || tensor.sizes() == whole_sizes,
             who(), ": expected whole tensors beside it, got ", handle.operator_name().name,
             " with a tensor of this rank's ", tensor.sizes(),
             "; to compare with a slice take zeropage::own_slice(parameter)");
    return tensor;
  };
  for (size_t index = 0; index < count; ++index) {
    c10::IValue& argument = torch::jit::peek(stack, index, count);
    if (operators::is_written(handle.schema().arguments()[index])) {
      ZP_CHECK(!argument.isTensor() || slice_mark_of(argument.toTensor()) == nullptr, who(),
               ": expected a tensor that is no slice for what ", handle.operator_name().name,
               " writes, which are figures of the whole; write to torch::empty({0})");
      continue;
    }
    if (argument.isTensor()) {
      argument = whole(argument.toTensor());
    } else if (argument.isTensorList()) {
      std::vector<at::Tensor> tensors = argument.toTensorVector();
      std::transform(tensors.begin(), tensors.end(), tensors.begin(), whole);
      argument = tensors;
    }
  }
  handle.callBoxed(&stack);
}

// All ranks of the group draw alike, so their slices are those of one whole tensor.
void SliceMark::draw_whole(const c10::OperatorHandle& handle, const at::Tensor& marked,
                           torch::jit::Stack& stack) const {
  const size_t count = handle.schema().arguments().size();
  torch::jit::peek(stack, 0, count) =
      at::empty(cut().whole_sizes(marked.sizes()), marked.options().requires_grad(false));
  handle.callBoxed(&stack);
  at::Tensor own = cut().take(torch::jit::peek(stack, 0, 1).toTensor(), ranks().rank());
  mark_as_slice(own, *this);
  torch::jit::peek(stack, 0, 1) = std::move(own);
}

}  // namespace zeropage::parallel
