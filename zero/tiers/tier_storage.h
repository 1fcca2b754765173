// Where tensors that belong to pages live between their uses: on the host or on NVMe.
//
// A tensor of a tier storage has memory from fetch(page) to release(page); on the host always. Its address
// may differ from use to use, the tensor is the same.
//
// Lifetime: tensors may outlive their storage, without memory then where it is not the host.
// Threads: add() the training thread, before the first fetch; then one thread at a time.
// Throws c10::Error where memory or a disk is not there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/TensorBody.h>

#include "device/topology.h"
#include "zeropage/ledger.h"

namespace zeropage::zero {

class TierStorage {
 public:
  enum class Use : uint8_t { kRead, kWrite };

  virtual ~TierStorage() = default;
  TierStorage(const TierStorage&) = delete;
  TierStorage& operator=(const TierStorage&) = delete;

  // [numel] on the host, every element `initial`.
  virtual at::Tensor add(size_t page, int64_t numel, at::ScalarType dtype, double initial,
                         memory::Kind kind) = 0;
  // Ahead of fetch(page), which then waits for less. May do nothing.
  virtual void start_fetch(size_t /*page*/) {}
  virtual void fetch(size_t /*page*/) {}
  // kWrite: what was written is to be there at the next fetch.
  virtual void release(size_t /*page*/, Use /*use*/) {}
  // Called with a page before its tensor is written to by who calls before_write(); empty: nobody.
  void set_before_write(std::function<void(size_t page)> call) { before_write_ = std::move(call); }
  bool has_before_write() const { return static_cast<bool>(before_write_); }
  void before_write(size_t page) const {
    if (before_write_) before_write_(page);
  }
  // The page's tensor is about to be written as a whole; what it had is not needed any more.
  virtual void begin_writing(size_t /*page*/) {}
  // The values of the page are not needed any more.
  virtual void drop(size_t /*page*/) {}
  // Whether they are there.
  virtual bool has_values(size_t /*page*/) const { return true; }
  // What a disk did; "" without one.
  virtual std::string describe() const { return ""; }
  // Whether tensors have memory after release() too.
  virtual bool stays() const { return true; }
  // On the host, through which tensors pass that have none there; 0 before the first use.
  virtual int64_t buffer_bytes() const { return 0; }
  // Gives back those that nobody uses, until there is a use. Waits for what is being written.
  virtual void release_buffers() {}

 protected:
  TierStorage() = default;

 private:
  std::function<void(size_t page)> before_write_;
};

// Page-locked memory where the device is an accelerator. On the ledger that is current when it is
// made.
class HostStorage final : public TierStorage {
 public:
  // cores: near whose memory it is to be.
  HostStorage(c10::Device device, device::CoreSet cores)
      : device_(device), cores_(std::move(cores)), ledger_(memory::Ledger::current()) {}

  at::Tensor add(size_t page, int64_t numel, at::ScalarType dtype, double initial,
                 memory::Kind kind) override;

 private:
  const c10::Device device_;
  const device::CoreSet cores_;
  const std::shared_ptr<memory::Ledger> ledger_;
};

}  // namespace zeropage::zero
