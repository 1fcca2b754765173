// Memory for many small objects, one behind the other, of which each is deleted by itself.
//
// A pass over 10,000 objects that malloc() put wherever there was room waits for each of them, and for the page tables on the way. In
// a row the processor reads ahead.
//
// Lifetime: a row frees itself when its maker and all that took a place there are gone. Threads: take() one; objects may be
// deleted on any.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <new>

#include "zeropage/check.h"

namespace zeropage::zero {

class EntryRow {
 public:
  struct LetGo {
    void operator()(EntryRow* row) const { row->drop(); }
  };
  using Handle = std::unique_ptr<EntryRow, LetGo>;

  // bytes: of one object.
  static Handle make(size_t count, size_t bytes) { return Handle(new EntryRow(count, bytes)); }
  EntryRow(const EntryRow&) = delete;
  EntryRow& operator=(const EntryRow&) = delete;

  // For one object of no more than those bytes. REQUIRES: fewer than `count` were taken.
  void* take() {
    TORCH_INTERNAL_ASSERT(taken_ < count_);
    std::byte* const place = memory_.get() + taken_++ * place_bytes_;
    new (place) EntryRow*(this);
    ++holders_;
    return place + kHeaderBytes;
  }
  // The object that lay there is gone.
  static void give_back(void* object) {
    std::byte* const place = static_cast<std::byte*>(object) - kHeaderBytes;
    (*std::launder(reinterpret_cast<EntryRow**>(place)))->drop();
  }

 private:
  // The row's address, before each object.
  static constexpr size_t kHeaderBytes = alignof(std::max_align_t);
  static_assert(sizeof(void*) <= kHeaderBytes);

  EntryRow(size_t count, size_t bytes)
      : count_(count),
        place_bytes_(kHeaderBytes + (bytes + kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes),
        memory_(new std::byte[count * place_bytes_]) {}
  ~EntryRow() = default;

  void drop() {
    if (--holders_ == 0) delete this;
  }

  const size_t count_;
  const size_t place_bytes_;
  const std::unique_ptr<std::byte[]> memory_;
  size_t taken_ = 0;
  std::atomic<size_t> holders_ = 1;
};

}  // namespace zeropage::zero
