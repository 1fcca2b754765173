#include <string>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "memory/self_check.h"
#include "operators/generator_state.h"
#include "operators/operator_interceptor.h"
#include "operators/operator_schema.h"

namespace zeropage::operators {
namespace {

using Run = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack&);

// Writes down what it sees, behind "v" what only views, and runs it.
class Names final : public OperatorInterceptor {
 public:
  explicit Names(Run run) : run_(run) {}
  void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
           torch::jit::Stack& stack) override {
    seen += (only_views(handle) ? " view:" : " ") + handle.schema().name();
    run_(handle, keys, stack);
  }
  std::string seen;

 private:
  const Run run_;
};

void probe_interceptor() {
  const at::Tensor x = at::full({2, 3}, 2.0, at::kFloat).requires_grad_();
  Names whole(&run_operator), parts(&run_operator_from_outside);
  at::Tensor y;
  {
    const InterceptorScope scope(&whole);
    const InterceptorScope none(nullptr);
    y = at::mul(x, x);
  }
  memory::expect_of_libtorch("operators that a scope without an interceptor shows", std::string(),
                             whole.seen);
  {
    const InterceptorScope scope(&whole);
    y = at::matmul(x, x.t());
    const InterceptorScope inner(&parts);
    y = at::matmul(y, y);
  }
  y = y.sum();
  memory::expect_of_libtorch("operators that an interceptor sees",
                             std::string(" view:aten::t aten::matmul"), whole.seen);
  const std::string begin = " aten::matmul aten::mm";
  memory::expect_of_libtorch("the first two operators that it sees where it runs them from outside",
                             begin, parts.seen.substr(0, begin.size()));
  memory::expect_of_libtorch("what intercepted operators computed", 1152.0F, y.item<float>());
  memory::expect_of_libtorch("intercepted operators are differentiable", y.requires_grad());
  y.backward();
  memory::expect_of_libtorch("the gradient of intercepted operators", 2304.0F,
                             x.grad().sum().item<float>());

  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{7});
  const at::Generator before = copy_of(generator);
  const at::Tensor drawn = at::randn({20}, generator, at::TensorOptions(at::kFloat));
  assign_state(generator, before);
  memory::expect_of_libtorch(
      "a generator draws the same from the same state",
      at::equal(drawn, at::randn({20}, generator, at::TensorOptions(at::kFloat))));
}

}  // namespace

void check_interceptor() {
  static memory::SelfCheck check("deferred modules and recomputed activations",
                                 "modules constructed plainly and all activations kept",
                                 &probe_interceptor);
  check.require();
}

}  // namespace zeropage::operators
