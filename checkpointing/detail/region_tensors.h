// The tensors that autograd saved in a region's first run, by number: who still wants them, and
// whether a repetition saves the same.
//
// Threads: guarded by the region's mutex.
// Throws: c10::Error, where a repetition saves another tensor than the first run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "zeropage/checkpoint.h"

namespace zeropage::checkpointing::detail {

class RegionTensors {
 public:
  // who: begins errors. options: outlive it.
  RegionTensors(std::string who, const RegionOptions& options)
      : who_(std::move(who)), options_(options) {}

  size_t size() const { return tensors_.size(); }

  // The first run saves that tensor. has_values: or an operator is about to write them. Returns its number.
  size_t add(const at::Tensor& tensor, bool has_values);
  // No node of the graph has it any more.
  void forget(size_t index);

  // A repetition saves that tensor; true if it was the last that is wanted.
  bool compare_and_keep(size_t index, const at::Tensor& tensor);
  // What the last repetition gave, which then is the caller's; undefined without.
  at::Tensor take(size_t index) { return std::exchange(tensors_[index].recomputed, at::Tensor()); }
  void drop_recomputed();

 private:
  struct Saved {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    c10::Device device;
    std::optional<uint64_t> hash;  // none: values are not compared
    bool wanted = true;
    at::Tensor recomputed;  // until it is used
  };

  const std::string who_;
  const RegionOptions& options_;
  std::vector<Saved> tensors_;
};

}  // namespace zeropage::checkpointing::detail
