// Updates in two passes over the elements (optim/update_rule.h), because an element's new value depends on the whole of its
// tensor: what becomes of the directions between the passes.
//
//   first pass                 states and a direction of each element, whichever part of the tensor is there
//   between                    kSums: a factor, from the squared norms of values and directions
//                              kMatrix: the whole tensor's directions become others, in one place
//   second pass                value = decay value - lr factor direction
//
// One form for each class; what it does depends on a group's options, which are of the class.
//
// Threads: any. Throws c10::Error.
#pragma once

#include <memory>
#include <string>

#include <ATen/core/TensorBody.h>
#include <torch/optim/optimizer.h>

#include "optim/exact_sum.h"
#include "zeropage/detail/update_reads.h"

namespace zeropage::optim {

class TensorForm {
 public:
  using Options = torch::optim::OptimizerOptions;
  virtual ~TensorForm() = default;
  TensorForm(const TensorForm&) = delete;
  TensorForm& operator=(const TensorForm&) = delete;

  // Elements of states for each element of a parameter of these sizes, in such a group.
  virtual double states(const Options& options, at::IntArrayRef sizes) const = 0;
  // Whether they belong to the whole of it, so that each rank with a part has all of them: sums over rows and columns, which the
  // first pass reads (optim/factored_moments.h).
  virtual bool has_whole_states(at::IntArrayRef /*sizes*/) const { return false; }
  // Whether states can be in a tier.
  virtual bool can_leave() const { return true; }

  // What a group with these options reads. Groups of kElement have one pass.
  virtual UpdateReads reads(const Options& options) const = 0;

  // What is wrong with a parameter of these sizes in such a group, and what to do; "" if nothing is.
  virtual std::string objection_to(const Options& /*options*/, at::IntArrayRef /*sizes*/) const {
    return "";
  }
  // Whether it takes embeddings and heads.
  virtual bool takes_embeddings(const Options& /*options*/) const { return true; }

  // kMatrix: how long transform() takes, in any unit; the dtype in which ranks send each other directions and what becomes of
  // them; and that itself, in place. directions: shaped as the parameter, fp32; the meta
  // device, of a simulation, too.
  virtual double cost(const Options& /*options*/, at::IntArrayRef /*sizes*/) const { return 0; }
  virtual at::ScalarType wire_dtype(const Options& /*options*/,
                                    const at::Device& /*device*/) const {
    return at::kFloat;
  }
  virtual void transform(const Options& /*options*/, const at::Tensor& /*directions*/) const {}

  // By which the second pass multiplies directions. The sums are of squares, for kSums.
  struct Sums {
    ExactSum values;
    ExactSum directions;
  };
  virtual double factor(const Options& options, at::IntArrayRef sizes, const Sums& sums) const = 0;

 protected:
  TensorForm() = default;
};

std::shared_ptr<const TensorForm> muon_form();
std::shared_ptr<const TensorForm> lamb_form();
std::shared_ptr<const TensorForm> adafactor_form();

}  // namespace zeropage::optim
