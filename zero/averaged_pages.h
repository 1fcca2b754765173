// What a WeightAverage holds: of each page the average of what this rank owns, and the model's own values while it has the average.
//
// Lifetime: shares the pages. Threads: the training thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/memory_holders.h"
#include "zeropage/detail/range.h"
#include "zeropage/owned_shards.h"

namespace zeropage::zero {

class ParameterPages;

class AveragedPages {
 public:
  AveragedPages(const ModelRef& model, double decay);

  void update();
  void swap_in();
  void swap_out();
  bool is_swapped_in() const { return is_swapped_in_; }

  // Whether it is of the model that has these pages.
  bool averages(const ParameterPages& pages) const;
  // The page's average: [owned numel] fp32, which a load writes to.
  const at::Tensor& average(size_t page);

 private:
  void check_is_out(const char* who) const;
  // A page that was frozen trains now, and this rank owns less of it.
  void fit(size_t page);
  // The parameter's part of what is laid out as the page's owned part.
  at::Tensor part_of(const OwnedShard& shard, const std::vector<at::Tensor>& by_page) const;

  const ModelRef model_;
  const double decay_;
  std::unordered_map<std::string, size_t> parameters_;  // by name: their indices
  std::vector<Range> owned_;                            // by page
  std::vector<at::Tensor> average_;                     // by page: [owned numel] fp32
  std::vector<at::Tensor> own_;  // the model's, while swapped in; as average_, in the exact dtype
  bool is_swapped_in_ = false;
  const std::shared_ptr<const MemoryHolder> holder_;
};

}  // namespace zeropage::zero
