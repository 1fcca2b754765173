// What a forward writes in place to memory that was there before it: running statistics, counters,
// its own inputs. A repeated forward must begin with what it found then, and leave what is there now.
//
// Lifetime: holds the tensors, and a copy of each storage as it was before the first write.
// Threads: one at a time.
#pragma once

#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

namespace zeropage::checkpointing::detail {

class OutsideWrites {
 public:
  // The forward has made that tensor.
  void made(const at::Tensor& tensor);
  // Whether it has. Constant time; of what has no storage: true.
  bool has_made(const at::Tensor& tensor) const;
  // The forward is about to write to that tensor.
  void before_write(const at::Tensor& tensor);
  // Whether the forward wrote to it, so that a repetition finds what it found.
  bool has_written(const at::Tensor& tensor) const;
  // The forward is through.
  void end_forward() { made_.clear(); }

  bool empty() const { return written_.empty(); }

 private:
  friend class OutsideWritesScope;
  struct Written {
    at::Tensor tensor;  // as the operator wrote it; has the version
    at::Tensor bytes;   // its whole storage
    at::Tensor before;  // a copy of that
  };

  std::unordered_set<const c10::StorageImpl*> made_;
  std::vector<Written> written_;
};

// While it lives, that memory is as the forward found it; then again as before the scope, and so
// are the tensors' versions.
class OutsideWritesScope {
 public:
  explicit OutsideWritesScope(const OutsideWrites& writes);
  ~OutsideWritesScope();
  OutsideWritesScope(const OutsideWritesScope&) = delete;
  OutsideWritesScope& operator=(const OutsideWritesScope&) = delete;

 private:
  const OutsideWrites& writes_;
  std::vector<at::Tensor> now_;
  std::vector<uint32_t> versions_;
};

}  // namespace zeropage::checkpointing::detail
