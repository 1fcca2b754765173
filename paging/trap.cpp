#include "paging/trap.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "operators/dispatch_keys.h"
#include "operators/operator_interceptor.h"
#include "operators/operator_schema.h"
#include "operators/tensor_mark.h"
#include "paging/pins.h"
#include "zeropage/check.h"

namespace zeropage::paging {
namespace {

using c10::FunctionSchema;
using c10::IValue;

bool is_trapped(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(operators::kTrapKey) && tensor.has_storage();
}

bool is_paged(const at::Tensor& tensor) {
  return is_trapped(tensor) && paging::is_paged(*tensor.storage().unsafeGetStorageImpl());
}

PageAddress address_of(const at::Tensor& tensor, const FunctionSchema& schema) {
  PageAddress address = paging::address_of(*tensor.storage().unsafeGetStorageImpl());
  ZP_CHECK(address.pager, schema.name(), ": a sharded tensor of sizes ", tensor.sizes(),
           " outlived the DistributedDataParallel that held its values; keep that alive, or copy "
           "the values "
           "under GatheredParameters first");
  return address;
}

// Takes sizes or dtype from its argument, not values: zeros_like, new_zeros.
bool only_imitates(const FunctionSchema& schema) {
  const std::string_view name = schema.name();
  return name.ends_with("_like") || name.starts_with("aten::new_");
}

template <typename Visit>
void for_each_trapped(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (is_paged(value.toTensor())) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      if (is_paged(tensor)) visit(tensor);
    }
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) {
      if (element.isTensor() && is_paged(element.toTensor())) visit(element.toTensor());
    }
  }
}

// While it lives, views of the arguments may be made.
class Views {
 public:
  ~Views() {
    for (const Viewed& viewed : viewed_) viewed.in.pager->end_view(viewed.in.page, *viewed.storage);
  }
  void add(PageAddress in, c10::StorageImpl& storage) {
    in.pager->begin_view(in.page, storage);
    viewed_.push_back({std::move(in), &storage});
  }

 private:
  struct Viewed {
    PageAddress in;
    c10::StorageImpl* storage;  // lives as long as its pager
  };
  c10::SmallVector<Viewed, 2> viewed_;
};

// Operators of this thread that the trap has let through and that have not ended. What they call,
// they need: it is not for the user to change.
thread_local int operators_under_way = 0;

// Those of them that read or write, and were announced as a whole. One that only views may call some that read.
thread_local int uses_under_way = 0;

class CountScope {
 public:
  explicit CountScope(int& count) : count_(count) { ++count_; }
  ~CountScope() { --count_; }
  CountScope(const CountScope&) = delete;
  CountScope& operator=(const CountScope&) = delete;

 private:
  int& count_;
};

void redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                torch::jit::Stack* stack) {
  const CountScope under_way(operators_under_way);
  op.redispatchBoxed(below, stack);
}

// What would leave a page's storage behind.
void refuse_what_breaks_pages(const FunctionSchema& schema, at::ArrayRef<IValue> arguments) {
  const std::string_view name = schema.name();
  const bool sets = name == "aten::set_";
  const bool resizes = sets || name == "aten::resize_" || name == "aten::resize_as_";
  const bool sets_data = name == "aten::_has_compatible_shallow_copy_type";
  const bool clones = name == "aten::clone";
  if (!(resizes || sets_data || clones)) return;
  // A tensor that takes over a page's memory would read it untrapped.
  const auto changed = arguments.slice(0, std::min<size_t>(arguments.size(), sets ? 2 : 1));
  const auto paged = std::find_if(changed.begin(), changed.end(), [](const IValue& argument) {
    return argument.isTensor() && is_paged(argument.toTensor());
  });
  if (paged == changed.end()) return;
  const at::Tensor& tensor = paged->toTensor();
  // torch::load() gives a parameter other memory; the guard's end takes the values over.
  const auto may_be_replaced = [&] {
    const PageAddress address = address_of(tensor, schema);
    return paged == changed.begin() && address.pager->is_open_to_writes(address.page);
  };
  if (sets && may_be_replaced()) return;
  const auto who = [&] { return c10::str("a sharded parameter of sizes ", tensor.sizes()); };
  ZP_CHECK(
      !resizes, name, " of ", who(),
      ": its memory belongs to its page; change the module before wrapping it, or torch::load() "
      "into it under zeropage::GatheredParameters(model, Modified::on_every_rank())");
  if (sets_data && !arguments[1].toTensor().is_alias_of(tensor)) {
    ZP_CHECK(
        may_be_replaced(), "torch::load(), set_data() or ->to() on ", who(),
        ": its memory belongs to its page; load under zeropage::GatheredParameters(model, "
        "Modified::on_every_rank()), call ->to() on the module before wrapping it, or cast what "
        "goes in and out");
  }
  if (!clones || operators_under_way > 0 || !tensor.is_leaf() || !tensor.requires_grad()) return;
  const PageAddress address = address_of(tensor, schema);
  ZP_CHECK(address.pager->is_pinned(address.page), "clone() of ", who(),
           ": a copy of a sharded module would hold every parameter whole on every rank; if that "
           "is meant, clone under a GatheredParameters guard; to copy one parameter, use "
           "p.detach().clone()");
}

// What would take a marked tensor's keys away, and nobody would notice.
void refuse_what_drops_marks(const FunctionSchema& schema, at::ArrayRef<IValue> arguments) {
  if (std::string_view(schema.name()) != "aten::_has_compatible_shallow_copy_type") return;
  const operators::TensorMark* const mark = operators::mark_of(arguments[0].toTensor());
  ZP_CHECK(mark == nullptr || arguments[1].toTensor().is_alias_of(arguments[0].toTensor()),
           "->to() or set_data() on ", mark->who(),
           ": the tensor would lose its mark; call ->to() on the module before it is marked");
}

// Whether the operator takes a tensor of a page, or one that is marked, for more than to view it or to write to it.
bool reads_any(const FunctionSchema& schema, at::ArrayRef<IValue> arguments) {
  for (size_t index = 0; index < arguments.size(); ++index) {
    const at::AliasInfo* const alias = schema.arguments()[index].alias_info();
    if (alias != nullptr) continue;
    const std::vector<at::Tensor> tensors = operators::tensors_in(arguments[index]);
    const bool any = std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
      return is_paged(tensor) || operators::mark_of(tensor) != nullptr;
    });
    if (any) return true;
  }
  return false;
}

// Whether the mark of an argument has run something in the operator's place. Every marked argument is
// asked until one has.
bool run_by_mark(const c10::OperatorHandle& op, at::ArrayRef<IValue> arguments,
                 torch::jit::Stack& stack) {
  const auto has_run = [&](const at::Tensor& argument) {
    if (operators::mark_of(argument) == nullptr) return false;
    // The stack may hold the last reference, and what runs takes the arguments from it.
    const at::Tensor marked(argument.getIntrusivePtr());
    if (uses_under_way == 0)
      operators::mark_of(marked)->announce(op.operator_name(), reads_any(op.schema(), arguments));
    return operators::mark_of(marked)->run(op, marked, stack);
  };
  return std::any_of(arguments.begin(), arguments.end(), [&](const IValue& argument) {
    if (argument.isTensor()) return has_run(argument.toTensor());
    if (!argument.isTensorList()) return false;
    const std::vector<at::Tensor> tensors = argument.toTensorVector();
    return std::any_of(tensors.begin(), tensors.end(), has_run);
  });
}

void trap(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::DispatchKeySet below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, operators::kTrapKey);
  const FunctionSchema& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  refuse_what_breaks_pages(schema, arguments);
  refuse_what_drops_marks(schema, arguments);
  if (run_by_mark(op, arguments, *stack)) return;
  // The key is not excluded below: operators that this one calls are trapped again, and pin what
  // they need themselves.
  if (operators::only_views(op) || only_imitates(schema)) {
    Views views;
    for (const IValue& argument : arguments) {
      for_each_trapped(argument, [&](const at::Tensor& tensor) {
        views.add(address_of(tensor, schema), *tensor.storage().unsafeGetStorageImpl());
      });
    }
    redispatch(op, below, stack);
    return;
  }
  Pins pins;
  for (size_t index = 0; index < arguments.size(); ++index) {
    for_each_trapped(arguments[index], [&](const at::Tensor& tensor) {
      const at::AliasInfo* alias = schema.arguments()[index].alias_info();
      pins.add(address_of(tensor, schema), alias != nullptr && alias->isWrite());
    });
  }
  if (!pins.empty()) {
    // What brings a page is no part of the forward that somebody may be recording.
    const operators::InterceptorScope unseen(nullptr);
    if (uses_under_way == 0) pins.announce(op.operator_name(), reads_any(schema, arguments));
    pins.take(schema.name());
  }
  const CountScope use(uses_under_way);
  redispatch(op, below, stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  static_assert(operators::kTrapKey == c10::DispatchKey::TESTING_ONLY_GenericWrapper);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&trap>());
}

}  // namespace

void set_trap(const at::Tensor& tensor) {
  if (tensor.key_set().has(operators::kTrapKey)) return;
  TORCH_INTERNAL_ASSERT(!paging::is_paged(*tensor.storage().unsafeGetStorageImpl()),
                        "trap a tensor before its storage is paged");
  operators::add_trap_key(tensor);
}

}  // namespace zeropage::paging
