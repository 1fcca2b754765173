#include "parallel/slice_arguments.h"

#include <utility>

#include "operators/operator_schema.h"
#include "parallel/known_slice.h"
#include "zeropage/check.h"

namespace zeropage::parallel {
namespace {

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && known_slice_of(tensor) == nullptr;
}

// The slices in lists, by their place; undefined where there is none.
std::vector<at::Tensor> slices_in_lists(at::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> slices;
  for (const c10::IValue& argument : arguments) {
    if (!argument.isTensorList()) continue;
    const std::vector<at::Tensor> list = argument.toTensorVector();
    if (list.size() > slices.size()) slices.resize(list.size());
    for (size_t at = 0; at < list.size(); ++at) {
      if (!slices[at].defined() && known_slice_of(list[at]) != nullptr) slices[at] = list[at];
    }
  }
  return slices;
}

// Which dimension of a tensor lies beside the one that the slice is cut in, as operators broadcast; negative: none.
int64_t cut_dimension_of(const at::Tensor& tensor, const at::Tensor& slice) {
  return known_slice_of(slice)->cut().dim() + tensor.dim() - slice.dim();
}

// Whether the tensor has the whole dimension where the slice has a part of it.
bool is_whole_beside(const at::Tensor& tensor, const at::Tensor& slice) {
  const SlicedDimension& cut = known_slice_of(slice)->cut();
  const int64_t dim = cut_dimension_of(tensor, slice);
  return dim >= 0 && tensor.size(dim) == cut.total() && slice.size(cut.dim()) != cut.total();
}

bool is_broadcast_to(const at::Tensor& tensor, const at::Tensor& slice) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t beside = slice.size(dim + slice.dim() - tensor.dim());
    if (tensor.size(dim) != 1 && beside != 1 && tensor.size(dim) != beside) return false;
  }
  return true;
}

at::Tensor slice_beside(const c10::OperatorHandle& handle, const at::Tensor& tensor,
                        const at::Tensor& slice) {
  if (!slice.defined() || !is_plain(tensor) || tensor.dim() > slice.dim()) return tensor;
  const KnownSlice& mark = *known_slice_of(slice);
  at::Tensor own = tensor;
  if (is_whole_beside(tensor, slice)) {
    own = mark.cut().take(tensor, cut_dimension_of(tensor, slice), mark.ranks().rank());
  }
  // LibTorch would name the sizes of the slice, which are not the script's.
  ZP_CHECK(is_broadcast_to(own, slice), mark.who(),
           ": expected a tensor beside it that fits the whole one of ",
           at::IntArrayRef(mark.cut().whole_sizes(slice.sizes())), ", or this rank's slice of ",
           slice.sizes(), ", got ", handle.operator_name().name, " with one of ", tensor.sizes(),
           "; give it the sizes of either, or 1 where it is the same along a dimension");
  return own;
}

void check_pair_is_cut_alike(const c10::OperatorHandle& handle, const at::Tensor& marked,
                             const at::Tensor& beside) {
  const KnownSlice* const mark = known_slice_of(marked);
  const KnownSlice* const other = known_slice_of(beside);
  if (mark == nullptr || other == nullptr || beside.dim() != marked.dim()) return;
  ZP_CHECK(&mark->ranks().communicator() == &other->ranks().communicator() &&
               mark->cut().is_cut_as(other->cut()),
           mark->who(), ": expected tensors that are cut alike, got ", handle.operator_name().name,
           " of it and of ", other->who(),
           ", which are slices of other dimensions; take the whole ones by "
           "zeropage::whole_of(parameter)");
}

}  // namespace

void check_are_cut_alike(const c10::OperatorHandle& handle, const at::Tensor& marked,
                         at::ArrayRef<c10::IValue> arguments) {
  const std::vector<at::Tensor> in_lists = slices_in_lists(arguments);
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      check_pair_is_cut_alike(handle, marked, argument.toTensor());
    } else if (argument.isTensorList()) {
      const std::vector<at::Tensor> list = argument.toTensorVector();
      for (size_t at = 0; at < list.size(); ++at) {
        check_pair_is_cut_alike(handle, in_lists[at], list[at]);
      }
    }
  }
}

void take_slices_beside(const c10::OperatorHandle& handle, const at::Tensor& marked,
                        torch::jit::Stack& stack) {
  const auto& arguments = handle.schema().arguments();
  const std::vector<at::Tensor> in_lists =
      slices_in_lists(torch::jit::last(stack, arguments.size()));
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (operators::is_written(arguments[index])) continue;
    c10::IValue& argument = torch::jit::peek(stack, index, arguments.size());
    if (argument.isTensor()) {
      if (in_lists.empty()) argument = slice_beside(handle, argument.toTensor(), marked);
    } else if (argument.isTensorList()) {
      std::vector<at::Tensor> list = argument.toTensorVector();
      bool has_changed = false;
      for (size_t at = 0; at < list.size(); ++at) {
        at::Tensor own = slice_beside(handle, list[at], in_lists[at]);
        has_changed |= !own.is_same(list[at]);
        list[at] = std::move(own);
      }
      if (has_changed) argument = list;
    }
  }
}

BecomingSlices::BecomingSlices(const c10::OperatorHandle& handle, const at::Tensor& marked,
                               at::ArrayRef<c10::IValue> arguments) {
  const std::vector<at::Tensor> in_lists = slices_in_lists(arguments);
  for (size_t index = 0; index < arguments.size(); ++index) {
    if (!operators::is_written(handle.schema().arguments()[index])) continue;
    if (arguments[index].isTensor()) {
      if (in_lists.empty()) add(handle, arguments[index].toTensor(), marked);
    } else if (arguments[index].isTensorList()) {
      const std::vector<at::Tensor> list = arguments[index].toTensorVector();
      for (size_t at = 0; at < list.size(); ++at) add(handle, list[at], in_lists[at]);
    }
  }
}

void BecomingSlices::add(const c10::OperatorHandle& handle, const at::Tensor& tensor,
                         const at::Tensor& from) {
  if (!from.defined() || !is_plain(tensor)) return;
  const std::string& who = known_slice_of(from)->who();
  const auto& name = handle.operator_name().name;
  ZP_CHECK(!is_whole_beside(tensor, from), who, ": expected ", name,
           " to write to a tensor of this rank's ", from.sizes(), ", got one of ", tensor.sizes(),
           "; take all slices by zeropage::whole_of(parameter)");
  // An operator that writes a new result gives an empty tensor its sizes.
  if (tensor.sizes() != from.sizes() && tensor.numel() != 0) return;
  const bool is_shared = tensor.has_storage() && tensor.storage().use_count() > 1;
  ZP_CHECK(!is_shared && !tensor.requires_grad() && operators::mark_of(tensor) == nullptr &&
               !operators::may_be_paged(tensor),
           who, ": expected ", name,
           " to write to a tensor with memory of its own and without gradients, which becomes this "
           "rank's slice too, got one ",
           is_shared ? "that shares its memory with another, such as a view"
                     : "that is a parameter, or a wrapped module's",
           "; write zeropage::own_slice(parameter), which any tensor takes, copy it by "
           "parameter.detach().clone(), and let autograd make p.grad()");
  written_.push_back({tensor, from});
}

void BecomingSlices::mark() const {
  for (const Written& written : written_) {
    if (written.tensor.sizes() == written.from.sizes()) {
      mark_as_slice(written.tensor, *known_slice_of(written.from));
    }
  }
}

}  // namespace zeropage::parallel
