#include "zero/touch_all.h"

#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/custom_class.h>

#include "paging/page_storages.h"
#include "paging/pins.h"
#include "zero/layout/module_parameters.h"
#include "zeropage/check.h"
#include "zeropage/recompute.h"
#include "zeropage/touch_all.h"

namespace zeropage {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using zero::Within;

// The pages of some parameters, kept while a forward or a backward is among them.
class KeptPages : public torch::CustomClassHolder {
 public:
  KeptPages(const char* who, const torch::nn::Module& modules, Within within)
      : who_(who), within_(within) {
    for (const zero::NamedParameter& parameter : zero::parameters_of(modules)) {
      parameters_.push_back(parameter.tensor);
    }
  }

  const variable_list& parameters() const { return parameters_; }

  // One touch in the trace, by which ranks decide what else to gather, and by which these pages are gathered ahead. What is done
  // with them meanwhile leaves none, since they are kept outside the trace.
  void keep() {
    paging::Pins touch;
    auto kept = std::make_unique<paging::Pins>();
    for (const Tensor& parameter : parameters_) {
      const c10::StorageImpl& storage = *parameter.storage().unsafeGetStorageImpl();
      if (!paging::is_paged(storage)) continue;
      paging::PageAddress address = paging::address_of(storage);
      ZP_CHECK(address.pager, who_, ": a sharded parameter of sizes ", parameter.sizes(),
               " outlived the DistributedDataParallel that held its values; keep that alive");
      touch.add(address, /*writes=*/false);
      kept->add(address, /*writes=*/false);
    }
    if (kept->empty()) return;
    ZP_CHECK(
        within_ == Within::kRegions || !checkpointing::Recompute::runs_forward(), who_,
        ": expected no Recompute around a forward whose parameters are sharded, since ranks that "
        "run different modules would repeat different operators; put checkpoint() around the "
        "part, or leave the Recompute out");
    touch.take(who_);
    kept->take_outside_trace(who_);
    pins_ = std::move(kept);
  }
  void release() { pins_.reset(); }

 private:
  const char* const who_;
  const Within within_;
  variable_list parameters_;
  std::unique_ptr<paging::Pins> pins_;  // its destructor may throw, and this one may not
};
using Pages = c10::intrusive_ptr<KeptPages>;

void give(AutogradContext* context, const Pages& pages) {
  context->saved_data["pages"] = c10::IValue::make_capsule(pages);
}

Pages pages_of(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<KeptPages>(context->saved_data.at("pages").toCapsule());
}

// The way in. Its backward comes when all gradients within are there.
class Entrance : public torch::autograd::Function<Entrance> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& input,
                        at::TensorList /*parameters*/, const Pages& pages) {
    give(context, pages);
    return input;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Pages pages = pages_of(context);
    pages->release();
    variable_list all = {gradients[0]};
    for (const Tensor& parameter : pages->parameters()) {
      const Tensor zero = at::zeros({}, parameter.options().requires_grad(false));
      all.push_back(parameter.requires_grad() ? zero.expand(parameter.sizes()) : Tensor());
    }
    all.emplace_back();
    return all;
  }
};

// The way out, whose backward is the first.
class Exit : public torch::autograd::Function<Exit> {
 public:
  // entered: so that backward comes to the entrance where the output depends on nothing.
  static Tensor forward(AutogradContext* context, const Tensor& output, const Tensor& /*entered*/,
                        const Pages& pages) {
    give(context, pages);
    context->save_for_backward({at::empty({0}, output.options())});
    return output.detach();
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    // A checkpointed region is repeated where a saved tensor is first asked for: here, on all ranks.
    context->get_saved_variables();
    const Pages pages = pages_of(context);
    // A backward that is asked for gradients within alone does not come to the entrance.
    torch::autograd::Engine::get_default_engine().queue_callback([pages] { pages->release(); });
    pages->keep();
    return {gradients[0], Tensor(), Tensor()};
  }
};

}  // namespace

namespace zero {

Tensor run_among_pages(const char* who, const torch::nn::Module& modules, const Tensor& input,
                       const std::function<Tensor(const Tensor&)>& run, Within within) {
  const auto pages = c10::make_intrusive<KeptPages>(who, modules, within);
  const Tensor entered = Entrance::apply(input, at::TensorList(pages->parameters()), pages);
  pages->keep();
  const auto release = c10::make_scope_exit([&] { pages->release(); });
  const Tensor output = run(entered);
  ZP_CHECK(
      output.defined(), who,
      ": expected the function to return a tensor, got an undefined one; return zeros where this "
      "rank has no token");
  return Exit::apply(output, entered, pages);
}

}  // namespace zero

Tensor touch_all(const torch::nn::Module& modules, const Tensor& input,
                 const std::function<Tensor(const Tensor&)>& run) {
  return zero::run_among_pages("touch_all()", modules, input, run, Within::kAnything);
}

}  // namespace zeropage
