#include "operators/detail/operator_recorder.h"

#include <functional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "zeropage/check.h"

namespace zeropage::operators::detail {
namespace {

using Operand = OperatorCall::Operand;

// "deferred construction: aten::mm.out" begins the errors.
std::string who(const OperatorCall& call) {
  return "deferred construction: " + name_of(call.handle);
}

void refuse_other_devices(const OperatorCall& call) {
  const auto index = call.device_argument();
  if (!index || !call.argument(*index).isDevice()) return;
  const c10::Device device = call.argument(*index).toDevice();
  ZP_CHECK(device.is_cpu() || device.is_meta(), who(call), ": expected a tensor on cpu, got ",
           device, "; leave the device out and move the module after its construction");
}

void refuse_values_in_real_tensors(const OperatorCall& call) {
  for (const Operand& operand : call.operands) {
    ZP_CHECK(!operand.written || operand.tensor.is_meta(), who(call),
             ": writes values that do not exist yet into a tensor that has memory already (",
             describe(operand.tensor),
             "); make that tensor by a factory such as torch::empty in the constructor, or "
             "construct the module plainly");
  }
}

// Tensors that operators without a meta kernel would give; nothing for those that we do not know.
std::optional<at::Tensor> result_without_kernel(const OperatorCall& call) {
  const bool has_out = !call.operands.empty() && call.operands.back().is_out;
  if (call.name == "aten::randperm" && !has_out) {
    auto options = at::TensorOptions(at::kMeta);
    const auto dtype = call.dtype_argument();
    if (dtype && !call.argument(*dtype).isNone()) {
      options = options.dtype(call.argument(*dtype).toScalarType());
    }
    return at::empty({call.argument(0).toInt()}, options);
  }
  if (call.name == "aten::bernoulli" && !has_out) return at::empty_like(call.operands[0].tensor);
  return std::nullopt;
}

[[noreturn]] void refuse(const OperatorCall& call, const std::string& reason) {
  const bool inner_reads = reason.find("aten::_local_scalar_dense") != std::string::npos ||
                           reason.find("aten::nonzero") != std::string::npos;
  ZP_CHECK(!inner_reads && !call.reads_values(), who(call),
           ": the constructor reads values, but a tensor has none before the construction is "
           "replayed; construct the module plainly, or compute what is read without tensors");
  ZP_THROW(who(call), ": expected an operator with a kernel for the meta device, got \"",
           reason.substr(0, reason.find(". ")),
           "\"; construct the module plainly, or use another operator in its constructor");
}

void call_on_meta(const OperatorCall& call) {
  try {
    if (const auto result = result_without_kernel(call)) {
      call.stack.resize(call.first);
      call.stack.emplace_back(*result);
      return;
    }
    call.handle.callBoxed(&call.stack);
  } catch (const c10::NotImplementedError& error) {
    refuse(call, memory::message_of(error));
  } catch (c10::Error& error) {
    error.add_context(who(call) + " on the meta device");
    throw;
  }
}

// An operator with an argument left open means the default dtype of its time.
void note_default_dtype(const OperatorCall& call, RecordedOperator& recorded) {
  const auto dtype = call.dtype_argument();
  if (!dtype || !call.operands.empty() || recorded.results.size() != 1) return;
  if (!recorded.arguments[*dtype].value().isNone() || recorded.results[0].size() != 1) return;
  if (const auto& view = recorded.results[0][0]) {
    recorded.arguments[*dtype].set_value(static_cast<int64_t>(view->dtype));
  }
}

}  // namespace

bool OperatorRecorder::records() {
  return dynamic_cast<const OperatorRecorder*>(OperatorInterceptor::current()) != nullptr;
}

void OperatorRecorder::run(const c10::OperatorHandle& handle, c10::DispatchKeySet /*keys*/,
                           torch::jit::Stack& stack) {
  const OperatorCall call(handle, stack);
  refuse_other_devices(call);
  if (call.has_values()) {
    const auto device = call.device_argument();
    if (device && call.argument(*device).isDevice()) call.argument(*device) = at::Device(at::kCPU);
    handle.callBoxed(&stack);
    return;
  }
  refuse_values_in_real_tensors(call);
  const auto argument = generator_argument(call.handle);
  const bool given = argument && call.argument(*argument).isGenerator();
  const at::Generator generator =
      given ? call.argument(*argument).toGenerator() : at::detail::getDefaultCPUGenerator();
  RecordedOperator recorded = describe_call(call);
  if (draws(call.handle)) recorded.draw = Draw{random_.state_of(generator), 0, argument};
  move_to_meta(call);
  call_on_meta(call);
  if (recorded.draw) recorded.draw->after = random_.after_draw(generator, recorded.draw->before);
  note_results(call, recorded);
  note_effects(call, recorded);
  if (recorded.draw || !recorded.makes.empty() || !recorded.writes.empty()) {
    tape_.operators.push_back(std::move(recorded));
  }
}

RecordedOperator OperatorRecorder::describe_call(const OperatorCall& call) {
  RecordedOperator recorded{.handle = call.handle};
  for (size_t index = 0; index < call.argument_count(); ++index) {
    const c10::IValue& value = call.argument(index);
    Argument& argument = recorded.arguments.emplace_back(value, [&](const at::Tensor& tensor) {
      return tensor.defined() ? std::optional(view_of(tensor, storage_of(tensor, call)))
                              : std::nullopt;
    });
    if (value.isDevice()) argument.set_value(at::Device(at::kCPU));
    if (value.isGenerator()) argument.set_value({});
  }
  return recorded;
}

void OperatorRecorder::move_to_meta(const OperatorCall& call) {
  const auto stand_in = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_meta()) return tensor;
    const size_t storage = storage_of(tensor, call);
    return tensor_of(view_of(tensor, storage), tape_.storages[storage].meta);
  };
  for (size_t index = 0; index < call.argument_count(); ++index) {
    c10::IValue& value = call.argument(index);
    if (value.isGenerator()) {
      value = c10::IValue();
    } else {
      value = RecordedArgument<at::Tensor>(value, stand_in).with(std::identity());
    }
  }
  const auto device = call.device_argument();
  if (!device) return;
  if (call.operands.empty() || call.argument(*device).isDevice()) {
    call.argument(*device) = at::Device(at::kMeta);
  }
}

void OperatorRecorder::note_results(const OperatorCall& call, RecordedOperator& recorded) {
  const size_t first = call.stack.size() - call.schema().returns().size();
  for (size_t index = first; index < call.stack.size(); ++index) {
    auto& views = recorded.results.emplace_back();
    for (const at::Tensor& tensor : tensors_in(call.stack[index])) {
      auto& view = views.emplace_back();
      if (!tensor.defined()) continue;
      if (!tensor.is_meta() && call.operands.empty() && !recorded.draw) continue;
      ZP_CHECK(tensor.is_meta() && tensor.has_storage() && tensor.layout() == at::kStrided,
               who(call), ": expected a strided result on the meta device, got ", tensor.layout(),
               " ", describe(tensor), "; construct the module plainly");
      auto storage = tape_.find(tensor);
      if (!storage) {
        storage = tape_.add({.meta = tensor.storage(),
                             .made_by = name_of(call.handle),
                             .sizes = tensor.sizes().vec()});
        recorded.makes.push_back(*storage);
      }
      if (contains(recorded.makes, *storage)) view = view_of(tensor, *storage);
    }
  }
  note_default_dtype(call, recorded);
}

void OperatorRecorder::note_effects(const OperatorCall& call, RecordedOperator& recorded) const {
  bool grew = false;
  auto operand = call.operands.begin();
  for (const Argument& argument : recorded.arguments) {
    for (const auto& view : argument.tensors()) {
      if (!view) continue;
      const auto bytes = tape_.storages[view->storage].meta.nbytes();
      if (operand->written) {
        insert(recorded.writes, view->storage);
        grew |= bytes != static_cast<size_t>(view->storage_bytes);
      }
      insert(call.overwrites(*operand) ? recorded.overwrites : recorded.reads, view->storage);
      ++operand;
    }
  }
  if (call.changes_geometry_only() && !grew) recorded.writes.clear();
}

size_t OperatorRecorder::storage_of(const at::Tensor& tensor, const OperatorCall& call) {
  ZP_CHECK(tensor.layout() == at::kStrided && tensor.has_storage(), who(call),
           ": expected strided tensors, got ", tensor.layout(), " ", tensor.sizes(),
           "; construct the module plainly");
  if (!tensor.is_meta()) {
    ZP_CHECK(tensor.is_cpu(), who(call), ": expected tensors on cpu, got ", describe(tensor),
             "; move it to the host before the construction");
    ZP_CHECK(!tensor.requires_grad() || !at::GradMode::is_enabled(), who(call),
             ": expected a tensor without a gradient, got a ", describe(tensor),
             " with values that requires one; compute initial values under torch::NoGradGuard");
    return capture(tensor);
  }
  const auto storage = tape_.find(tensor);
  ZP_CHECK(storage.has_value(), who(call), ": expected tensors of this construction, got a ",
           describe(tensor),
           " that was made before it and has no values; make it in the "
           "constructor, or give it values");
  return *storage;
}

size_t OperatorRecorder::capture(const at::Tensor& real) {
  const c10::StorageImpl* key = real.storage().unsafeGetStorageImpl();
  if (const auto found = captured_.find(key); found != captured_.end()) return found->second;
  const auto bytes = static_cast<int64_t>(real.storage().nbytes());
  const at::Tensor meta = at::empty({bytes}, at::dtype(at::kByte).device(at::kMeta));
  RecordedStorage storage{.meta = meta.storage(),
                          .made_by = "a tensor that has memory",
                          .sizes = real.sizes().vec(),
                          .captured = real.detach()};
  if (!real.is_inference()) storage.captured_version = real._version();
  const size_t number = tape_.add(std::move(storage));
  captured_.emplace(key, number);
  return number;
}

}  // namespace zeropage::operators::detail
