// Gives every rank rank 0's buffers (running statistics), a few coalesced broadcasts for the whole module.
//
// Only buffers that some rank may have written to since the last time are sent, so a table that nobody writes costs
// nothing. A write by an operator raises the version of the tensor, and another storage is seen by its address. A write
// through .data() or data_ptr(), or by a kernel past the dispatcher, raises none: on the host one line of the cache in 64
// is compared each time, other ones each time, and small buffers are compared as a whole. On an accelerator such a write
// is not seen. Kernels of batch norms write their statistics so, thus floating-point buffers of at most one dimension
// are always sent.
//
// Whether a buffer is sent is the same on all ranks: each tells what it saw in a message that travels anyway, and all
// send what any of them tells.
//
// What is neither always sent nor was written is alike on all ranks, and so are, where buffers are never sent, those that
// nobody has written since the module was wrapped. Their bits are hashed to be compared (zero/agreement/rank_agreement.h).
//
// Threads: the training thread, or the one that runs backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/pages/replicated_values.h"
#include "zeropage/world.h"

namespace zeropage::zero {

class BufferSync {
 public:
  BufferSync(comm::World world, const std::vector<std::pair<std::string, at::Tensor>>& buffers);
  BufferSync(const BufferSync&) = delete;
  BufferSync& operator=(const BufferSync&) = delete;

  size_t count() const { return buffers_.size(); }
  // A byte a buffer: whether it may have been written to on this rank since it was sent last.
  void tell_written(uint8_t* written);

  // Their version counters stay, so that a graph that saved them may still be run backward. written: of any rank, so
  // alike on all. Collective where one is; nothing for a world of one.
  void broadcast_from_rank_zero(const uint8_t* written);
  // The same of all buffers.
  void broadcast_all_from_rank_zero();
  // The same of those that some rank has written to, which the ranks tell each other first, unless there are none at all.
  void broadcast_written_from_rank_zero();

  // Around a move of the buffers' memory, which is no write to them.
  void begin_move();
  void end_move();

  // A hash of the buffers that nobody has written to, as far as this rank knows. Where it knows more than the others, hashes
  // differ, and what ranks then say in words leaves out what was written.
  uint64_t hash_unwritten() const;
  // where: whose buffers they are, where other ranks of the model have others; "" where none have.
  void describe_unwritten(const std::string& where, const TellValues& tell) const;

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;
    // When it was sent last.
    int64_t version = 0;
    const void* address = nullptr;
    std::vector<uint64_t>
        hashes;  // of the lines of each round; one of all where it is small; empty: not on the host
    bool is_where_it_was = false;  // when a move began
  };

  static bool is_always_sent(const at::Tensor& tensor);
  static bool has_trace_of_write(const Buffer& buffer);
  static bool is_compared(const Buffer& buffer);
  bool is_written(const Buffer& buffer) const;
  static void note_sent(Buffer& buffer);
  void broadcast_alike(const std::vector<Buffer*>& alike) const;

  const comm::World world_;
  const std::string of_model_;  // "" for the first of these ranks
  std::vector<Buffer> buffers_;
  uint64_t round_ = 0;  // of samples
};

}  // namespace zeropage::zero
