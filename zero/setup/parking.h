// Moves all memory that a model and its optimizers have on a rank's device to the host or to NVMe, and back
// (DistributedDataParallelBase::park()). What offload has put into a tier already stays there.
//
// Collective, and alike on all ranks of the model: where one rank cannot, all throw its words, and nothing has changed.
//
// Lifetime: shares what it is given. Parked memory is lost when it goes. Threads: the training thread.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <torch/nn/module.h>

#include "zero/pages/buffer_sync.h"
#include "zero/parking/parked_memory.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/ledger.h"
#include "zeropage/world.h"

namespace zeropage::zero {

class Parking {
 public:
  // all_ranks: of the model.
  Parking(comm::World all_ranks, const ShardedModel& sharded,
          std::shared_ptr<const torch::nn::Module> module, std::shared_ptr<BufferSync> buffers)
      : all_ranks_(std::move(all_ranks)),
        sharded_(sharded),
        module_(std::move(module)),
        buffers_(std::move(buffers)) {}
  ~Parking();
  Parking(const Parking&) = delete;
  Parking& operator=(const Parking&) = delete;

  // directory: for kNvme; "" for that of the options.
  void park(memory::Tier tier, const std::string& directory);
  void resume();
  bool is_parked() const { return parked_ != nullptr; }

 private:
  void check_alike(const char* who, const std::string& asked) const;
  void settle() const;
  std::unique_ptr<ParkedMemory> find_memory() const;

  const comm::World all_ranks_;
  const ShardedModel sharded_;
  const std::shared_ptr<const torch::nn::Module> module_;
  const std::shared_ptr<BufferSync> buffers_;
  std::unique_ptr<ParkedMemory> parked_;  // null: it is here
};

}  // namespace zeropage::zero
