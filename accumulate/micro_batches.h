// Cuts a batch along dimension 0 into micro-batches:
//
//   for (auto micro : accumulate::micro_batches(batch, 4)) {
//     accumulator.backward(criterion(model(micro.data), micro.target));  // zero/accumulator.h
//   }
//   accumulator.step(optimizer);
//
// The accumulator makes the mean over the micro-batches. A loss that is divided by their number as well
// gives gradients that are smaller by that factor, and no check can notice. Without an accumulator the
// user divides: a loss that is a mean over its micro-batch is multiplied by
// samples_in(i) / samples() before loss.backward().
//
// A micro-batch has the batch's type and views of its tensors, made when the iterator is
// dereferenced; nothing is copied. Of n samples cut into k, the first n mod k micro-batches have
// one more than the others; the accumulator then takes samples_in(i) as the weight of each.
//
// What a batch is, and how a type of yours becomes one: operators/tensor_structure.h.
// Dimension 0 of every tensor counts samples, so all must agree on it. An undefined tensor stays undefined.
// Lifetime: a MicroBatches holds the batch, and so its tensors; iterators end with it,
// micro-batches do not. Threads: constant after construction, so any number may read.
// Throws c10::Error on fewer than 1 or more micro-batches than samples, and on tensors that do not
// agree, that have no dimensions, or that are not there, by name.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "accumulate/sample_cuts.h"
#include "operators/tensor_structure.h"

namespace zeropage::accumulate {

template <typename Batch>
class MicroBatches {
  static_assert(memory::kIsStructure<Batch>,
                "micro_batches: this type is not known as a batch; declare beside it "
                "`T map_parts(const T& batch, const auto& map)` (operators/tensor_structure.h)");

 public:
  class iterator;

  MicroBatches(Batch batch, int64_t count)
      : batch_(std::move(batch)), cuts_(cuts_of(batch_, count)) {}

  // How many micro-batches.
  int64_t size() const { return cuts_.count(); }
  // The batch's samples.
  int64_t samples() const { return cuts_.samples(); }
  // The samples of one micro-batch.
  int64_t samples_in(int64_t index) const { return cuts_.length(index); }

  Batch operator[](int64_t index) const {
    const int64_t start = cuts_.start(index);
    const int64_t length = cuts_.length(index);
    const auto cut = [&](const at::Tensor& tensor, const std::string&) {
      return tensor.defined() ? tensor.narrow(0, start, length) : tensor;
    };
    return memory::map_tensors(batch_, cut, "batch");
  }

  iterator begin() const { return iterator(this, 0); }
  iterator end() const { return iterator(this, size()); }

 private:
  static SampleCuts cuts_of(const Batch& batch, int64_t count) {
    SampleCount samples;
    const auto see = [&](const at::Tensor& tensor, const std::string& name) {
      samples.see(tensor, name);
      return tensor;
    };
    memory::map_tensors(batch, see, "batch");
    return SampleCuts(samples.count(), count);
  }

  Batch batch_;
  SampleCuts cuts_;
};

// A forward iterator that makes its element, which C++17's categories call an input iterator.
template <typename Batch>
class MicroBatches<Batch>::iterator {
 public:
  using value_type = Batch;
  using reference = Batch;
  using pointer = void;
  using difference_type = std::ptrdiff_t;
  using iterator_category = std::input_iterator_tag;
  using iterator_concept = std::forward_iterator_tag;

  iterator() = default;
  iterator(const MicroBatches* range, int64_t index) : range_(range), index_(index) {}

  Batch operator*() const { return (*range_)[index_]; }
  iterator& operator++() {
    ++index_;
    return *this;
  }
  iterator operator++(int) {
    const iterator before = *this;
    ++index_;
    return before;
  }
  bool operator==(const iterator& other) const = default;

 private:
  const MicroBatches* range_ = nullptr;
  int64_t index_ = 0;
};

// Checks the batch; cuts nothing yet.
template <typename Batch>
MicroBatches<Batch> micro_batches(Batch batch, int64_t count) {
  return MicroBatches<Batch>(std::move(batch), count);
}

}  // namespace zeropage::accumulate
