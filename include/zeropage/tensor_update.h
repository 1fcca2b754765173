// `TensorUpdate`: an optimizer of your own whose update of an element reads more of its tensor than that element.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/optim/optimizer.h>

#include "zeropage/detail/optimizer_traits.h"

namespace zeropage {

// An update in two passes over the elements of a parameter, of which each rank makes its part, with something of the whole
// parameter between them.
//
//   struct Lars : zeropage::TensorUpdate<LarsOptions> {
//     static constexpr auto kReads = zeropage::UpdateReads::kSums;
//     ...
//   };
//   zeropage::Optimizer<Lars> optimizer(model, LarsOptions(0.1));
//
// The options are derived from torch::optim::OptimizerCloneableOptions, with get_lr(), set_lr() and serialize(), as those of
// torch::optim are. An optimizer that reads elements alone is a class of torch::optim (zeropage/optimizer.h).
//
// A parameter's part may begin and end anywhere. So what treats a part does the same to each element, as add_() and mul_()
// do, and the bits do not depend on the parts. Values and states are fp32 and on the device; low precision needs master
// weights.
// Threads: the training thread, without gradients.
class TensorUpdateBase {
 public:
  using AnyOptions = torch::optim::OptimizerOptions;

  // A parameter's part: flat, all of the same size, fp32.
  struct Elements {
    int64_t step = 1;  // the parameter's, counted from 1
    at::Tensor values;
    at::Tensor gradient;             // clipped, and without a loss scale
    std::vector<at::Tensor> states;  // as states() names them; to be written to
    at::Tensor directions;           // to be written to; what is in them has no meaning
  };

  virtual ~TensorUpdateBase() = default;

  // Names of a parameter's states, which begin as zeros.
  virtual std::vector<std::string> states_of(const AnyOptions& options) const = 0;
  virtual void direct_any(const AnyOptions& options, const Elements& elements) const = 0;
  virtual void transform_any(const AnyOptions& options, const at::Tensor& directions) const = 0;
  virtual double factor_any(const AnyOptions& options, at::IntArrayRef sizes, double norm_of_values,
                            double norm_of_directions) const = 0;
  virtual void descend_any(const AnyOptions& options, const at::Tensor& values,
                           const at::Tensor& directions) const = 0;
  virtual std::string objection_to(at::IntArrayRef sizes) const = 0;
};

template <typename O>
class TensorUpdate : public TensorUpdateBase {
 public:
  using Options = O;

  // The first pass: writes states and directions.
  virtual void direct(const O& options, const Elements& elements) const = 0;
  // The second pass: writes values, along directions that are multiplied by factor().
  virtual void descend(const O& options, const at::Tensor& values,
                       const at::Tensor& directions) const = 0;
  virtual std::vector<std::string> states(const O& options) const = 0;

  // Between the passes of kMatrix: changes the directions of a parameter, in its sizes, in place. One rank does it.
  virtual void transform(const O& /*options*/, const at::Tensor& /*directions*/) const {}
  // By which directions are multiplied. The norms are of kSums, over the whole parameter, and exact; otherwise 0.
  virtual double factor(const O& /*options*/, at::IntArrayRef /*sizes*/, double /*norm_of_values*/,
                        double /*norm_of_directions*/) const {
    return 1;
  }
  // Why it cannot update a parameter of these sizes, as the end of a sentence that begins with the parameter, and what to do:
  // ": is no matrix; ...". "": it can.
  std::string objection_to(at::IntArrayRef /*sizes*/) const override { return ""; }

 private:
  static const O& of(const AnyOptions& options) { return static_cast<const O&>(options); }

  std::vector<std::string> states_of(const AnyOptions& options) const final {
    return states(of(options));
  }
  void direct_any(const AnyOptions& options, const Elements& elements) const final {
    direct(of(options), elements);
  }
  void transform_any(const AnyOptions& options, const at::Tensor& directions) const final {
    transform(of(options), directions);
  }
  double factor_any(const AnyOptions& options, at::IntArrayRef sizes, double norm_of_values,
                    double norm_of_directions) const final {
    return factor(of(options), sizes, norm_of_values, norm_of_directions);
  }
  void descend_any(const AnyOptions& options, const at::Tensor& values,
                   const at::Tensor& directions) const final {
    descend(of(options), values, directions);
  }
};

template <std::derived_from<TensorUpdateBase> A>
struct OptimizerTraits<A> {
  using Options = typename A::Options;
  static constexpr UpdateReads kReads = A::kReads;
};

}  // namespace zeropage
