// Where copies of activations lie from forward to backward, if not in host memory: an interface, so
// that this folder knows no device that keeps bytes. zero/tiers/nvme_activations.h is one.
//
// Lifetime: the hooks of an ActivationOffload share the store, and what graphs hold of it outlives
// the ActivationOffload.
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "device/pending.h"

namespace zeropage::checkpointing {

// One copy in a store, which gives up its place when it goes.
class StoredActivation {
 public:
  virtual ~StoredActivation() = default;
  // bytes: as they were put: as many, and aligned alike. May be called more than once. The Pending
  // throws what went wrong with the copy; it never gives other bytes.
  virtual memory::Pending start_get(const at::Tensor& bytes) = 0;
};

class ActivationStore {
 public:
  virtual ~ActivationStore() = default;
  // What the addresses and sizes of tensors that it is given must be multiples of.
  virtual int64_t alignment() const = 0;
  // bytes: uint8 on the host, which nobody writes any more, kept alive for as long as need be. May
  // block, so that what is on its way stays bounded.
  virtual std::unique_ptr<StoredActivation> put(const at::Tensor& bytes) = 0;
  // For statistics: "in /mnt/nvme/rank-3.activations".
  virtual std::string describe() const = 0;
};

}  // namespace zeropage::checkpointing
