// What an update reads of a whole parameter where it reads sums (optim/tensor_form.h): the squares of its values and of its
// directions, added exactly, over this rank's part and then over the ranks.
//
// Lifetime: within that of the pages. Threads: the training thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "optim/norm_table.h"
#include "optim/tensor_form.h"
#include "zero/pages/parameter_pages.h"
#include "zeropage/detail/pending.h"

namespace zeropage::zero {

class TensorSums {
 public:
  using Sums = optim::TensorForm::Sums;

  // What a page's are of: those of parameters[i] are sums i of the table.
  struct OfPage {
    std::vector<size_t> parameters = {};
    std::optional<optim::NormTable> table = {};  // none: this rank has no part of any
  };
  // On their way over the ranks; no parameter where none needs that.
  struct UnderWay {
    std::vector<size_t> parameters = {};
    at::Tensor words = {};  // on the communicator's device
    memory::Pending pending = {};
  };

  explicit TensorSums(const ParameterPages& pages)
      : pages_(pages), sums_(pages.parameters().size()) {}

  // with_sums: those of the page that have any. device: of the tensors that will be added.
  OfPage of_page(size_t page, const std::vector<size_t>& with_sums,
                 const c10::Device& device) const;

  void begin(size_t parameter) { sums_[parameter] = {}; }
  // flat: [owned numel] of the page.
  void add_squares(const OfPage& of_page, const at::Tensor& flat, optim::ExactSum Sums::*to);
  // Collective over the ranks that share the pages, as is take().
  UnderWay start(std::vector<size_t> parameters) const;
  void take(const UnderWay& under_way);

  const Sums& of(size_t parameter) const { return sums_[parameter]; }

 private:
  const ParameterPages& pages_;
  std::vector<Sums> sums_;  // by parameter
};

}  // namespace zeropage::zero
