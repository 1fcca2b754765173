#include <ATen/ATen.h>

#include "memory/self_check.h"
#include "operators/tensor_mark.h"
#include "paging/pins.h"
#include "paging/trap.h"

namespace zeropage::paging {
namespace {

constexpr int64_t kWidth = 4;

class OnePage final : public PageSource {
 public:
  explicit OnePage(at::Tensor values) : values_(std::move(values)) {}
  Fetch start_fetch(size_t) override { return {values_.clone(), {}}; }
  void write_back(size_t, const at::Tensor& buffer) override { values_.copy_(buffer); }

 private:
  const at::Tensor values_;
};

// Gives 7 in place of a sum.
class Seven final : public operators::TensorMark {
 public:
  Seven() : operators::TensorMark("the self-check", On::kParameter) {}
  bool replaces(const c10::OperatorHandle& handle) const override {
    return handle.operator_name().name == "aten::sum";
  }
  bool run(const c10::OperatorHandle& handle, const at::Tensor& /*marked*/,
           torch::jit::Stack& stack) override {
    if (!replaces(handle)) return false;
    torch::jit::drop(stack, handle.schema().arguments().size());
    torch::jit::push(stack, at::full({}, 7.0, at::kFloat));
    return true;
  }
};

void probe_marks() {
  const at::Tensor tensor = at::ones({kWidth}, at::kFloat);
  operators::set_mark(tensor, c10::make_intrusive<Seven>());
  memory::expect_of_libtorch("the sum of a marked tensor", 7.0F, tensor.sum().item<float>());
  memory::expect_of_libtorch("the sum of what detach() gives", 7.0F,
                             tensor.detach().sum().item<float>());
  memory::expect_of_libtorch("the sum of a copy", 1.0F * kWidth,
                             tensor.clone().sum().item<float>());
  tensor.set_(at::zeros({kWidth}, at::kFloat));
  memory::expect_of_libtorch("the sum of a marked tensor with other memory", 7.0F,
                             tensor.sum().item<float>());
}

}  // namespace

void probe_dispatcher() {
  const at::Tensor weight = at::full({kWidth, kWidth}, 2.0, at::kFloat).requires_grad_();
  set_trap(weight);
  const auto pager = Pager::make(std::make_unique<OnePage>(weight.detach().clone().view({-1})), {});
  const auto bytes = static_cast<int64_t>(weight.nbytes());
  pager->add_page("self-check", bytes, {{weight.storage(), 0}});
  const auto expect_faults = [&](const char* when, int64_t expected) {
    memory::expect_of_libtorch(when, expected, pager->statistics().faults);
  };

  memory::expect_of_libtorch("the memory of an evicted parameter", static_cast<void*>(nullptr),
                             weight.data_ptr());
  const at::Tensor view = weight.t();
  expect_faults("faults of a view operator on an evicted parameter", 0);
  memory::expect_of_libtorch("the device of a view of an evicted parameter", c10::Device(at::kCPU),
                             view.device());
  const at::Tensor input = at::ones({1, kWidth}, at::kFloat).requires_grad_();
  const at::Tensor output = at::matmul(input, view).sum();
  expect_faults("faults until an operator took a view of a parameter", 1);
  memory::expect_of_libtorch("what that operator computed", 2.0F * kWidth * kWidth,
                             output.item<float>());
  pager->release_all("the self-check");
  output.backward();
  expect_faults("faults until its backward took the parameter", 2);
  memory::expect_of_libtorch("the gradient from that backward", 2.0F * kWidth * kWidth,
                             input.grad().sum().item<float>());
  {
    const at::NoGradGuard no_grad;
    weight.fill_(3);
  }
  pager->release_all("the self-check");
  memory::expect_of_libtorch("a parameter's sum after a write and an eviction",
                             3.0F * kWidth * kWidth, weight.sum().item<float>());
  bool refused = false;
  try {
    weight.set_data(at::zeros({1}, at::kFloat));
  } catch (const c10::Error&) {
    refused = true;
  }
  memory::expect_of_libtorch("the trap refuses set_data() on a parameter", refused);
  probe_marks();
}

void check_dispatcher() {
  static memory::SelfCheck check("sharded parameters", "stage 0 or 1", &probe_dispatcher);
  check.require();
}

}  // namespace zeropage::paging
