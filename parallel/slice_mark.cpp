#include "parallel/slice_mark.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>

#include "memory/check.h"
#include "memory/self_check.h"
#include "operators/operator_schema.h"
#include "parallel/rank_operators.h"

namespace zeropage::parallel {
namespace {

thread_local bool slices_are_unseen = false;
thread_local bool saving_was_seen = false;

bool needs_gradient(at::ArrayRef<c10::IValue> arguments) {
  return at::GradMode::is_enabled() &&
         std::any_of(arguments.begin(), arguments.end(), [](const c10::IValue& argument) {
           const std::vector<at::Tensor> tensors = memory::tensors_in(argument);
           return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
             return tensor.defined() && tensor.requires_grad();
           });
         });
}

// What the operator gives, one by one. sources: the tensors that results came from, where they are a list.
template <typename Visit>
void for_each_result(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                     const std::vector<at::Tensor>& sources, const Visit& visit) {
  const auto& returns = op.schema().returns();
  const auto results = torch::jit::last(stack, returns.size());
  for (size_t index = 0; index < returns.size(); ++index) {
    const bool is_argument = memory::is_written(returns[index]);
    if (results[index].isTensor()) {
      visit(results[index].toTensor(), nullptr, is_argument);
    } else if (results[index].isTensorList()) {
      const std::vector<at::Tensor> list = results[index].toTensorVector();
      for (size_t at = 0; at < list.size() && at < sources.size(); ++at) {
        visit(list[at], &sources[at], is_argument);
      }
    }
  }
}

bool has_other_mark(at::ArrayRef<c10::IValue> arguments, const SliceMark& own) {
  return std::any_of(arguments.begin(), arguments.end(), [&own](const c10::IValue& argument) {
    const auto* const mark = argument.isTensor() ? memory::mark_of(argument.toTensor()) : nullptr;
    return mark != nullptr && mark != &own;
  });
}

bool are_cut_alike(const SliceMark& a, const SliceMark& b) {
  return &a.ranks().communicator() == &b.ranks().communicator() && a.cut().is_cut_as(b.cut());
}

void refuse_to_save(const at::Tensor& tensor) {
  const SliceMark* const mark = slice_mark_of(tensor);
  ZP_CHECK(mark == nullptr || mark->ranks().size() == 1, "torch::save() of ",
           mark == nullptr ? "" : mark->who(),
           ": expected a whole tensor, got this rank's slice of ", tensor.sizes(), " of ",
           mark == nullptr ? at::IntArrayRef() : mark->cut().whole_sizes(tensor.sizes()),
           "; zeropage::save_weights() and save_state() of a model that is wrapped over the whole "
           "mesh write whole "
           "parameters, zeropage::whole_of(parameter) returns one, and "
           "zeropage::own_slice(parameter) this rank's "
           "slice as a tensor that may be saved");
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
  static memory::SelfCheck check("tensor_parallel()", "layers of parallel/linear.h", &probe_saving);
  watch_saving();
  check.require();
}

}  // namespace

SlicesAsTheyAre::SlicesAsTheyAre() : before_(std::exchange(slices_are_unseen, true)) {}

SlicesAsTheyAre::~SlicesAsTheyAre() {
  slices_are_unseen = before_;
}

bool slices_are_seen() {
  return !slices_are_unseen;
}

const SliceMark* slice_mark_of(const at::Tensor& tensor) {
  return dynamic_cast<const SliceMark*>(memory::mark_of(tensor));
}

SliceMark::SliceMark(std::string who, RanksPointer ranks, SlicedDimension cut)
    : TensorMark(std::move(who), On::kParameter), ranks_(std::move(ranks)), cut_(std::move(cut)) {
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
  const auto arguments = torch::jit::last(stack, handle.schema().arguments().size());
  if (takes_slice(handle, arguments)) return run_on_slice(handle, arguments, stack);
  const SliceUse use = slice_use_of(handle);
  if (use == SliceUse::kSizes) return false;
  if (use == SliceUse::kDrawsLike) {
    draw_whole(handle, marked, stack);
    return true;
  }
  const bool gradients = needs_gradient(arguments);
  if (gradients && use == SliceUse::kElements && meets_no_slice(arguments)) {
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

c10::intrusive_ptr<SliceMark> SliceMark::of_result() const {
  return c10::make_intrusive<SliceMark>(who(), ranks_, cut_);
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
           name,
           ", which would draw for this rank's slice alone; initialise the module before "
           "tensor_parallel(), "
           "which gives all ranks rank 0's values and cuts them");
  ZP_CHECK(
      !gradients, who(), ": expected a linear layer or an embedding, got ", name,
      ", which would see this rank's slice alone; call the layer's forward(), or leave it out of "
      "the plan, and convert the module before");
  ZP_CHECK(
      false, who(),
      ": expected the layer's forward(), or an operator that does the same to each element, got ",
      name,
      ", which would see this rank's slice alone; call the layer's forward(), or take all "
      "slices by zeropage::whole_of(parameter), or this rank's as it is by "
      "zeropage::own_slice(parameter) (zero/slice_values.h)");
}

void SliceMark::check_is_cut_alike(const c10::OperatorHandle& handle, const at::Tensor& marked,
                                   at::ArrayRef<c10::IValue> arguments) const {
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensor()) continue;
    const SliceMark* const other = slice_mark_of(argument.toTensor());
    ZP_CHECK(other == nullptr || argument.toTensor().dim() != marked.dim() ||
                 are_cut_alike(*this, *other),
             who(), ": expected tensors that are cut alike, got ", handle.operator_name().name,
             " of it and of ", other == nullptr ? "" : other->who(),
             ", which are slices of other dimensions; take the whole ones by "
             "zeropage::whole_of(parameter)");
  }
}

void SliceMark::take_slice_of_source(const c10::OperatorHandle& handle, const at::Tensor& marked,
                                     torch::jit::Stack& stack) const {
  const std::string_view name = handle.operator_name().name;
  if (name != "aten::copy_" && name != "aten::set_") return;
  const size_t count = handle.schema().arguments().size();
  const auto arguments = torch::jit::last(stack, count);
  if (!arguments[0].isTensor() || !arguments[0].toTensor().is_same(marked)) return;
  if (count > 1 && arguments[1].isTensor()) {
    const at::Tensor& source = arguments[1].toTensor();
    const std::vector<int64_t> whole = cut_.whole_sizes(marked.sizes());
    if (source.sizes() == whole && slice_mark_of(source) == nullptr) {
      torch::jit::peek(stack, 1, count) = cut_.take(source, ranks().rank());
      return;
    }
    if (name == "aten::copy_" || source.sizes() == marked.sizes()) return;
    ZP_CHECK(false, who(), ": expected values of sizes ", at::IntArrayRef(whole),
             ", or this rank's of ", marked.sizes(), ", got ", source.sizes(),
             "; load the file of the same module");
  }
  ZP_CHECK(false, who(), ": expected a tensor with values, got set_() without one; use copy_()");
}

void SliceMark::run_on_elements(const c10::OperatorHandle& handle, const at::Tensor& marked,
                                torch::jit::Stack& stack) const {
  const size_t count = handle.schema().arguments().size();
  check_is_cut_alike(handle, marked, torch::jit::last(stack, count));
  take_slice_of_source(handle, marked, stack);
  // What _foreach_mul() gives comes from its first list.
  std::vector<at::Tensor> sources;
  const c10::IValue& first = torch::jit::peek(stack, 0, count);
  if (first.isTensorList()) sources = first.toTensorVector();
  const SlicesAsTheyAre scope;
  handle.callBoxed(&stack);
  for_each_result(handle, stack, sources,
                  [&](const at::Tensor& result, const at::Tensor* source, bool is_argument) {
                    const at::Tensor& from = source == nullptr ? marked : *source;
                    const SliceMark* const mark = slice_mark_of(from);
                    if (!result.defined() || mark == nullptr) return;
                    ZP_CHECK(mark->may_be_spread() || result.sizes() == from.sizes(), mark->who(),
                             ": expected an operator that does the same to each element, got ",
                             handle.operator_name().name, " that gives ", result.sizes(), " of ",
                             from.sizes(), "; call the layer's forward()");
                    const bool is_new = !is_argument && memory::mark_of(result) == nullptr;
                    if (!is_new || result.requires_grad() || result.sizes() != from.sizes()) return;
                    memory::set_mark(result, mark->of_result());
                  });
}

at::Tensor SliceMark::whole_of(const at::Tensor& slice) const {
  const SlicesAsTheyAre scope;
  const at::NoGradGuard no_grad;
  const bool is_bool = slice.scalar_type() == c10::kBool;
  const at::Tensor values = slice.detach().to(is_bool ? c10::kByte : slice.scalar_type(),
                                              /*non_blocking=*/false, /*copy=*/true);
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const Slices& part : cut_.parts()) {
    const int64_t numel = part.size(ranks().rank());
    const at::Tensor own = values.narrow(cut_.dim(), begin, numel).contiguous();
    parts.push_back(all_gather(own, part.sizes(), cut_.dim(), ranks_, who()));
    begin += numel;
  }
  const at::Tensor whole = at::cat(parts, cut_.dim());
  return is_bool ? whole.to(c10::kBool) : whole;
}

void SliceMark::run_on_whole(const c10::OperatorHandle& handle, const at::Tensor& marked,
                             torch::jit::Stack& stack) const {
  const size_t count = handle.schema().arguments().size();
  const std::vector<int64_t> whole_sizes = cut_.whole_sizes(marked.sizes());
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
      at::empty(cut_.whole_sizes(marked.sizes()), marked.options().requires_grad(false));
  handle.callBoxed(&stack);
  torch::jit::peek(stack, 0, 1) =
      cut_.take(torch::jit::peek(stack, 0, 1).toTensor(), ranks().rank());
}

}  // namespace zeropage::parallel
