// The memory of a value: here, or where the hooks around the scope have taken it, such as the host.
//
// Lifetime: shares the storage, or owns what the hooks made of it.
// Threads: the tape that records guards it.
// Throws: what the hooks throw.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::detail {

// Bytes that the values of one forward keep.
struct KeptBytes {
  std::atomic<int64_t> all{0};
  std::atomic<int64_t> here{0};  // of all, those that no hooks have taken
};

class ValueMemory {
 public:
  // counts: where its bytes count while it is kept; null: nowhere.
  ValueMemory(int64_t bytes, std::shared_ptr<KeptBytes> counts)
      : bytes_(bytes), counts_(std::move(counts)) {}
  ~ValueMemory() { let_go(); }
  ValueMemory(const ValueMemory&) = delete;
  ValueMemory& operator=(const ValueMemory&) = delete;

  // Whether it is kept at all, and whether it is kept here.
  bool is_kept() const { return is_here() || elsewhere_; }
  bool is_here() const { return static_cast<bool>(here_); }

  void keep_here(c10::Storage storage);
  // tensor: one in the storage. onward: takes the storage as a whole; null: it stays here.
  void keep(const at::Tensor& tensor, const std::shared_ptr<SavedTensorHooks>& onward);
  // Its storage is about to be overwritten: a copy takes its place, where it was kept.
  void keep_copy_of(const c10::Storage& storage);
  void let_go();

  // Fetches it from where it is, unless somebody still has what was fetched last. REQUIRES: is_kept().
  c10::Storage get();

 private:
  void hand_on(const at::Tensor& flat);

  const int64_t bytes_;
  const std::shared_ptr<KeptBytes> counts_;
  std::shared_ptr<SavedTensorHooks> onward_;  // of the last keep()
  c10::Storage here_;
  std::unique_ptr<PackedTensor> elsewhere_;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> fetched_;
};

}  // namespace zeropage::checkpointing::detail
