// Batches: their arithmetic, cut into micro-batches, and ranks with unequal numbers of them.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include "zeropage/check.h"
#include "zeropage/detail/tensor_structure.h"
#include "zeropage/world.h"

// Solves global_batch = micro_batch * accumulation * ranks for the sizes that are not given.
//
//   auto sizes = accumulate::solve_batch({.global_batch = 1024, .micro_batch = 8, .ranks = 4});
//   sizes.accumulation;  // 32
//
// Pure functions of integers.

namespace zeropage::accumulate {

// What is given, in samples, micro-steps and ranks; each at least 1.
struct BatchSizes {
  std::optional<int64_t> global_batch = {};  // samples of one optimizer step, on all ranks
  std::optional<int64_t> micro_batch = {};   // samples of one forward and backward on one rank
  std::optional<int64_t> accumulation = {};  // micro-steps of one optimizer step
  std::optional<int64_t> ranks = {};
};

struct SolvedBatch {
  int64_t global_batch = 0;
  int64_t micro_batch = 0;
  int64_t accumulation = 0;
  int64_t ranks = 0;

  bool operator==(const SolvedBatch&) const = default;
};

// Fills in what is not given. What the rest does not determine is 1: ranks first, then
// accumulation, then micro_batch.
// Throws c10::Error on fewer than two sizes, on a size below 1, on a product past int64, and on
// sizes that do not fit together, then with the nearest that do. (Where global_batch is past 2^40
// only the nearest global batches are named.)
SolvedBatch solve_batch(const BatchSizes& given);

// How many samples a batch has, and where it is cut.
// The size of dimension 0 on which all tensors of a batch agree. Throws c10::Error, by name, on one
// that does not.
class SampleCount {
 public:
  // Undefined tensors have no say.
  void see(const at::Tensor& tensor, const std::string& name);
  // Throws where no tensor was seen.
  int64_t count() const;

 private:
  int64_t count_ = -1;
  std::string counted_in_;
};

// `samples` samples in `count` stretches whose lengths differ by at most one, the longer ones
// first. Throws c10::Error unless 1 <= count <= samples, and on an index that is none.
class SampleCuts {
 public:
  SampleCuts(int64_t samples, int64_t count);

  int64_t samples() const { return samples_; }
  int64_t count() const { return count_; }
  int64_t start(int64_t index) const;
  int64_t length(int64_t index) const;

 private:
  void check_index(int64_t index) const;

  int64_t samples_;
  int64_t count_;
};

// Cuts a batch along dimension 0 into micro-batches:
//
//   for (auto micro : accumulate::micro_batches(batch, 4)) {
//     accumulator.backward(criterion(model(micro.data), micro.target));  // zeropage/accumulator.h
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
// What a batch is, and how a type of yours becomes one: zeropage/detail/tensor_structure.h.
// Dimension 0 of every tensor counts samples, so all must agree on it. An undefined tensor stays undefined.
// Lifetime: a MicroBatches holds the batch, and so its tensors; iterators end with it,
// micro-batches do not. Threads: constant after construction, so any number may read.
// Throws c10::Error on fewer than 1 or more micro-batches than samples, and on tensors that do not
// agree, that have no dimensions, or that are not there, by name.
template <typename Batch>
class MicroBatches {
  static_assert(
      memory::kIsStructure<Batch>,
      "micro_batches: this type is not known as a batch; declare beside it "
      "`T map_parts(const T& batch, const auto& map)` (zeropage/detail/tensor_structure.h)");

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

// The batches of ranks that have different numbers of them, so that none waits for another that has
// ended (the Join of PyTorch's DDP).
//
//   for (const auto& [batch, weight] : zeropage::joined(*loader, world)) {
//     accumulator.backward(criterion(model(batch.data), batch.target), weight);
//     accumulator.step(optimizer);
//   }
//
// It goes on until no rank has a batch. A rank that has none left repeats its last one with weight 0,
// so it takes part in what is collective and adds nothing to the mean. Costs a message of a byte to
// each rank a batch.
//
// Batches are copied (tensors are not). Throws, on all ranks, if a rank has no batch at all while
// others have. Collective: each step of the loop; so leave it on all ranks alike.

namespace zeropage {

template <typename Batch>
struct JoinedBatch {
  Batch batch;
  double weight = 1;  // 0: a repeated one
};

template <typename Batches>
class JoinedBatches {
 public:
  using Inner = decltype(std::declval<Batches&>().begin());
  using Batch = std::remove_cvref_t<decltype(*std::declval<Inner&>())>;

  JoinedBatches(Batches& batches, comm::World world)
      : batches_(batches), world_(std::move(world)) {}

  class Iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = JoinedBatch<Batch>;
    using difference_type = std::ptrdiff_t;
    using pointer = const value_type*;
    using reference = const value_type&;

    reference operator*() const { return *current_; }
    pointer operator->() const { return &*current_; }
    Iterator& operator++() {
      if (*next_ != end_) ++*next_;
      take();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t) {
      return !iterator.current_;
    }

   private:
    friend JoinedBatches;
    Iterator(Inner begin, Inner end, const comm::World& world)
        : next_(std::move(begin)), end_(std::move(end)), world_(world) {
      take();
    }

    void take() {
      const bool has_own = *next_ != end_;
      const bool is_first = !current_;
      if (!exists_on_any_rank(has_own)) {
        current_.reset();
        return;
      }
      // All ranks hear of it, so none is left waiting.
      ZP_CHECK(
          !is_first || !exists_on_any_rank(!has_own),
          "joined(): a rank has no batch at all, and nothing to repeat while the others train; "
          "give every rank at least one batch");
      if (has_own) {
        current_ = value_type{**next_, 1};
      } else {
        current_->weight = 0;
      }
    }

    bool exists_on_any_rank(bool here) const {
      const at::Tensor any = at::full({1}, here ? 1 : 0, at::kByte);
      world_.communicator().all_reduce(any, comm::ReduceOp::kMax, "who has a batch").wait();
      return any.template item<uint8_t>() != 0;
    }

    std::optional<Inner> next_;
    Inner end_;
    comm::World world_;
    std::optional<value_type> current_;
  };

  Iterator begin() { return Iterator(batches_.begin(), batches_.end(), world_); }
  std::default_sentinel_t end() const { return std::default_sentinel; }

 private:
  Batches& batches_;
  const comm::World world_;
};

// batches: anything with begin() and end(), such as a LibTorch data loader; alive as long as the loop.
template <typename Batches>
JoinedBatches<Batches> joined(Batches& batches, const comm::World& world) {
  return JoinedBatches<Batches>(batches, world);
}

}  // namespace zeropage
