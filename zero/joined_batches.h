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
#pragma once

#include <iterator>
#include <optional>
#include <utility>

#include <ATen/ops/full.h>

#include "comm/world.h"
#include "memory/check.h"

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
