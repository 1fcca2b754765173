// Tensors of pages on the host that have memory only while their values are needed: from begin_writing(page) to
// drop(page). So the gradients of a model whose step is made in backward take a few pages' memory, not all.
//
// Buffers of the largest page are made at the first use and are used again; there are kBuffers of them, or as many
// as pages. Where more pages are written at once, there are more until they are dropped.
// Tensors of one page, such as those of an optimizer and of the one that was made before it, share their memory, so
// they are of the same size and one of them is used. In a simulated world it lies on the meta device, as what makes the buffers does.
// Ledger: the buffers, as what makes them charges them.
// Threads: any, but for add().
// Throws: fetch() of a page that was dropped.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "zero/tiers/tier_storage.h"

namespace zeropage::zero {

class TransientStorage final : public TierStorage {
 public:
  // One page is updated, the next is ready for it, and the third is on its way.
  static constexpr size_t kBuffers = 3;

  // device: the host, or the meta device in a simulated world. memory: makes the buffers there.
  TransientStorage(c10::Device device, std::unique_ptr<TierStorage> memory)
      : device_(device), memory_(std::move(memory)) {}

  at::Tensor add(size_t page, int64_t numel, at::ScalarType dtype, double initial,
                 memory::Kind kind) override;
  void fetch(size_t page) override;
  void begin_writing(size_t page) override;
  void drop(size_t page) override;
  bool has_values(size_t page) const override;
  bool stays() const override { return false; }

 private:
  struct Entry {
    std::vector<c10::Storage> storages;
    int64_t bytes = 0;  // of each
    memory::Kind kind = memory::Kind::kGradient;
    at::Tensor buffer;  // undefined while it has no values
  };

  at::Tensor take_buffer();
  static void give_memory(const Entry& entry);

  const c10::Device device_;
  const std::unique_ptr<TierStorage> memory_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<size_t, Entry> entries_;  // by page
  int64_t buffer_bytes_ = 0;
  size_t buffers_ = 0;            // that there are
  std::vector<at::Tensor> idle_;  // of them
};

}  // namespace zeropage::zero
