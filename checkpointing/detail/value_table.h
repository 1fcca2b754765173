// Which value each storage of a forward holds now.
//
// Threads: the tape that records guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include "checkpointing/detail/recorded_forward.h"

namespace zeropage::checkpointing::detail {

class ValueTable {
 public:
  // Null: nobody has shown it.
  std::shared_ptr<Value> find(const at::Tensor& tensor) const;
  // The tensor's storage holds a value that is new. producer: null if it is no operator's.
  std::shared_ptr<Value> add(const at::Tensor& tensor, Value::Source source,
                             std::shared_ptr<Operation> producer);
  // Its storage is about to hold another one.
  void remove(const at::Tensor& tensor);
  void clear() { values_.clear(); }

  const KeptBytes& kept_bytes() const { return *kept_; }
  // The largest value so far.
  int64_t largest_bytes() const { return largest_bytes_; }

 private:
  void forget_dead_storages();

  const std::shared_ptr<KeptBytes> kept_ = std::make_shared<KeptBytes>();
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<Value>> values_;
  size_t forget_at_ = 256;
  size_t next_ = 0;
  int64_t largest_bytes_ = 0;
};

}  // namespace zeropage::checkpointing::detail
