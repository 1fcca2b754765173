// Memory of saved tensors that has left, shared by all that were saved of it.
//
// Tensors that are saved often lie in one storage: a view and its base, or q, k and v as parts of
// one buffer. What leaves is therefore a span of a storage, once, and each saved tensor is rebuilt
// in its own geometry upon the span that came back.
//
// What comes back stays until each tensor saved of it was asked for once, and comes back anew if one
// is asked for again (a second backward over a retained graph).
//
// Lifetime: a PackedTensor shares its SavedStorage; a SavedSpans knows them without owning them.
// Threads: any. One storage comes back on one thread at a time.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "checkpointing/detail/unchanged.h"
#include "device/stream.h"
#include "zeropage/saved_tensors.h"

namespace zeropage::checkpointing::detail {

// Elements [first, first + numel) of a storage.
struct Span {
  int64_t first = 0;
  int64_t numel = 0;

  int64_t end() const { return first + numel; }
  bool contains(const Span& other) const { return first <= other.first && other.end() <= end(); }
};

// What must leave for the tensor to leave: its own extent if it fills that, the whole storage if it
// has holes there but covers an eighth of it or more (others will be saved of it), else nothing.
// REQUIRES: a strided tensor with elements.
std::optional<Span> span_of(const at::Tensor& tensor);

// Whether it is a leaf that requires a gradient, or a view of one.
bool is_of_parameter(const at::Tensor& tensor);

// The span as a vector, without a graph: [numel]
at::Tensor flat_of(const at::Tensor& tensor, const Span& span);

class SavedStorage {
 public:
  SavedStorage(const at::Tensor& tensor, const Span& span);
  virtual ~SavedStorage() = default;
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;

  const Span& span() const { return span_; }
  int64_t bytes() const;  // of the span

 protected:
  // Brings the span back, [numel]; what is enqueued to stream() from here on finds it there.
  // Called under mutex_.
  virtual at::Tensor fetch() = 0;
  // After a tensor was given to who asked, outside of mutex_.
  virtual void after_unpack() {}

  const at::TensorOptions& options() const { return options_; }  // dtype and device
  // The stream on which the operator that saved the first tensor ran. Memory that comes back is allocated for it.
  const device::Stream& stream() const { return stream_; }
  bool is_back() const { return fetched_.defined(); }  // under mutex_

  std::mutex mutex_;

 private:
  friend class SavedSpans;
  friend class SpanPack;

  // Constant after construction.
  const Span span_;
  const at::TensorOptions options_;
  const device::Stream stream_;
  const c10::VariableVersion counter_;
  const uint32_t version_;

  // Guarded by mutex_.
  at::Tensor fetched_;  // [numel]
  int64_t round_ = 0;   // how often it came back
  int packs_ = 0;
  int served_ = 0;  // of them, those that were asked for in this round
};

// Stands for a tensor in a span. who: begins the error if the tensor was changed in place since.
std::unique_ptr<PackedTensor> pack_in(std::shared_ptr<SavedStorage> storage,
                                      const at::Tensor& tensor, std::string who);

// Which spans of which storages have left, and which storages never do: those of leaves that require
// a gradient, of their views, and of what stay_here() was told.
class SavedSpans {
 public:
  // Whether hooks may drop the tensor's memory and rebuild it: a plain strided tensor with values.
  bool may_leave(const at::Tensor& tensor);
  void stay_here(const at::Tensor& tensor);

  // One that holds the tensor's present values, or null.
  std::shared_ptr<SavedStorage> find(const at::Tensor& tensor, const Span& span);
  void add(const at::Tensor& tensor, const std::shared_ptr<SavedStorage>& storage);

 private:
  struct Known {
    // Keeps the StorageImpl's address from being used again, not its memory.
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool stays = false;
    std::vector<std::weak_ptr<SavedStorage>> left = {};
  };
  Known& known(const at::Tensor& tensor);
  void forget_the_dead();

  std::mutex mutex_;
  // Guarded by mutex_.
  std::unordered_map<const c10::StorageImpl*, Known> storages_;
  size_t forget_at_ = 64;
};

}  // namespace zeropage::checkpointing::detail
