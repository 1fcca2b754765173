#include "zeropage/saved_tensors.h"

#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include "checkpointing/detail/unchanged.h"
#include "memory/self_check.h"
#include "zeropage/check.h"

namespace zeropage::checkpointing {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

// The hooks travel with what LibTorch carries over to autograd's own threads. Of its kinds this one
// is left to who runs LibTorch; LibTorch itself uses it in its tests only.
c10::DebugInfoKind carrier() {
  return c10::DebugInfoKind::TEST_INFO_2;
}

struct CarriedHooks final : c10::DebugInfoBase {
  explicit CarriedHooks(std::shared_ptr<SavedTensorHooks> hooks) : hooks(std::move(hooks)) {}
  const std::shared_ptr<SavedTensorHooks> hooks;
};

const std::shared_ptr<SavedTensorHooks>* carried() {
  const auto* info = dynamic_cast<CarriedHooks*>(c10::ThreadLocalDebugInfo::get(carrier()));
  return info != nullptr && info->hooks ? &info->hooks : nullptr;
}

class ForwardToHooks final : public SavedVariableHooks {
 public:
  explicit ForwardToHooks(std::shared_ptr<SavedTensorHooks> hooks) : hooks_(std::move(hooks)) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    packed_ = hooks_->pack(tensor);
    hooks_.reset();
  }
  at::Tensor call_unpack_hook() override { return packed_->unpack(); }

 private:
  std::shared_ptr<SavedTensorHooks> hooks_;
  std::unique_ptr<PackedTensor> packed_;
};

class HookEngine final : public Engine {
 public:
  ~HookEngine() override { stop(); }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto* hooks = carried();
    return hooks != nullptr ? std::make_unique<ForwardToHooks>(*hooks) : nullptr;
  }
};

Engine& hook_engine() {
  static HookEngine engine;
  return engine;
}

class KeptTensor final : public PackedTensor {
 public:
  KeptTensor(const at::Tensor& tensor, std::string who)
      : tensor_(tensor.detach()), unchanged_(tensor, std::move(who)) {}
  at::Tensor unpack() override {
    unchanged_.check();
    return tensor_;
  }

 private:
  const at::Tensor tensor_;
  const detail::Unchanged unchanged_;
};

// Counts, and lets through.
class CountingHooks final : public SavedTensorHooks {
 public:
  struct Packed final : PackedTensor {
    Packed(CountingHooks& hooks, const at::Tensor& tensor)
        : hooks(hooks), tensor(tensor.detach()) {}
    at::Tensor unpack() override {
      ++hooks.unpacked;
      return tensor;
    }
    CountingHooks& hooks;
    const at::Tensor tensor;
  };
  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    ++packed;
    return std::make_unique<Packed>(*this, tensor);
  }
  int packed = 0;
  int unpacked = 0;
};

void probe_saved_tensors() {
  const auto outer = std::make_shared<CountingHooks>(), inner = std::make_shared<CountingHooks>();
  const at::Tensor x = at::full({2}, 3.0, at::kFloat).requires_grad_();
  at::Tensor y;
  {
    const SavedTensorScope scope(outer);
    y = x * x;
    {
      const SavedTensorScope nested(inner);
      y = y.exp();
      const SavedTensorScope none(nullptr);
      y = y.sum() * 2;
    }
  }
  memory::expect_of_libtorch("saved inputs that came to the hooks", 2, outer->packed);
  memory::expect_of_libtorch("saved outputs that came to the innermost hooks", 1, inner->packed);
  y.backward();
  memory::expect_of_libtorch("tensors that backward took from the hooks", 3,
                             outer->unpacked + inner->unpacked);
  const at::Tensor expected = x.detach().square().exp() * x.detach() * 4;
  memory::expect_of_libtorch("the gradient through hooks is right", x.grad().allclose(expected));
}

// Before main(): LibTorch starts autograd's threads of accelerators once a process, for the engine
// that runs the first backward there. Python's engine, with hooks of its own, is left in place.
const bool engine_is_offered = [] {
  if (&Engine::get_default_engine() == &Engine::get_base_engine()) {
    torch::autograd::set_default_engine_stub(hook_engine);
  }
  return true;
}();

void check_engine() {
  ZP_CHECK(engine_is_offered && &Engine::get_default_engine() == &hook_engine(),
           "saved tensors: expected our subclass of LibTorch's autograd engine, but another engine "
           "has taken its place, such as Python's; hooks of C++ need a process without it");
  static memory::SelfCheck check("recomputed and offloaded activations", "all activations kept",
                                 &probe_saved_tensors);
  check.require();
}

}  // namespace

SavedTensorScope::SavedTensorScope(std::shared_ptr<SavedTensorHooks> hooks)
    : carried_(carrier(), (check_engine(), std::make_shared<CarriedHooks>(std::move(hooks)))) {}

std::shared_ptr<SavedTensorHooks> SavedTensorScope::current() {
  const auto* hooks = carried();
  return hooks != nullptr ? *hooks : nullptr;
}

std::unique_ptr<PackedTensor> keep(const at::Tensor& tensor, std::string who) {
  return std::make_unique<KeptTensor>(tensor, std::move(who));
}

std::unique_ptr<PackedTensor> pack_with(const std::shared_ptr<SavedTensorHooks>& hooks,
                                        const at::Tensor& tensor, std::string who) {
  return hooks ? hooks->pack(tensor) : keep(tensor, std::move(who));
}

}  // namespace zeropage::checkpointing
