#include <mutex>

#include <ATen/ATen.h>
#include <torch/version.h>

#include "memory/check.h"
#include "paging/pins.h"
#include "paging/trap.h"

namespace zeropage::memory {
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

// What the dispatcher did wrong, or null.
const char* find_fault() {
  const c10::InferenceMode off(false);
  const at::AutoGradMode with_grad(true);
  const at::Tensor weight = at::full({kWidth, kWidth}, 2.0, at::kFloat).requires_grad_();
  set_trap(weight);
  const auto pager = Pager::make(std::make_unique<OnePage>(weight.detach().clone().view({-1})), {});
  const auto bytes = static_cast<int64_t>(weight.nbytes());
  pager->add_page("self-check", bytes, {{weight.storage(), 0}});
  const auto faults = [&] { return pager->statistics().faults; };

  if (weight.data_ptr() != nullptr) return "an evicted parameter still has memory";
  const at::Tensor view = weight.t();
  if (faults() != 0) return "a view operator read a parameter";
  if (view.device() != at::kCPU) return "a view of an evicted parameter is on another device";
  const at::Tensor input = at::ones({1, kWidth}, at::kFloat).requires_grad_();
  const at::Tensor output = at::matmul(input, view).sum();
  if (faults() != 1) return "an operator on a view of a parameter was not trapped";
  if (output.item<float>() != 2.0F * kWidth * kWidth) return "a trapped operator was wrong";
  pager->release_all("the self-check");
  output.backward();
  if (faults() != 2) return "an operator in backward was not trapped";
  if (!input.grad().eq(2.0 * kWidth).all().item<bool>()) return "a trapped backward was wrong";
  {
    const at::NoGradGuard no_grad;
    weight.fill_(3);
  }
  pager->release_all("the self-check");
  if (weight.sum().item<float>() != 3.0F * kWidth * kWidth) return "a write was lost";
  try {
    weight.set_data(at::zeros({1}, at::kFloat));
    return "set_data() on a parameter was not trapped";
  } catch (const c10::Error&) {
    return nullptr;
  }
}

}  // namespace

void check_dispatcher() {
  static const char* const fault = find_fault();
  ZP_CHECK(fault == nullptr, "this LibTorch (", TORCH_VERSION,
           ") treats the dispatch key for wrappers otherwise than Zeropage needs: ", fault,
           "; parameters cannot be sharded with it, use LibTorch 2.11.0, or stage 0 or 1");
}

}  // namespace zeropage::memory
