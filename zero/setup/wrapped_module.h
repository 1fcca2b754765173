// What a DistributedDataParallel holds, whatever its module's type.
//
// Lifetime: shares the module. Threads: the training thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/nn/module.h>

#include "operators/operator_labels.h"
#include "parallel/context/split_attention.h"
#include "zero/pages/buffer_sync.h"
#include "zero/setup/parking.h"
#include "zero/setup/sharded_model.h"
#include "zeropage/options.h"
#include "zeropage/world.h"

namespace zeropage::zero {

// Whose module it is.
struct RanksOfModel {
  comm::World data;  // that get other samples
  comm::World all;   // that have a state on disk together
  // That get the same samples. Where the module has slices, it is the ranks that have the other ones.
  std::optional<comm::World> tensor = {};
  // Whether some of `data` have parts of the same samples, along a context axis.
  bool shares_samples = false;
};

class WrappedModule {
 public:
  // Collective. tape: of a module that was constructed without memory; null for others.
  WrappedModule(std::shared_ptr<torch::nn::Module> module, RanksOfModel ranks,
                const Options& options, const operators::ConstructionTape* tape);

  const comm::World& world() const { return ranks_.data; }
  const comm::World& all_ranks() const { return ranks_.all; }
  const Options& options() const { return options_; }
  const ShardedModel& sharded() const { return sharded_; }
  Parking& parking() { return parking_; }

  // Collective after parameters were unfrozen, and where buffers are broadcast.
  // samples: in dimension 0 of its first tensor; 0: not known.
  void before_forward(int64_t samples);
  // The forward has returned. Throws where attention was to run over a context axis and none did.
  void check_forward() const { forwards_.check(); }
  // It has ended, also by an exception.
  void after_forward() noexcept;

 private:
  void send_buffers_beside_gradients();
  void compare_buffers();
  void check_module() const;
  void tell_of_foreign_optimizer();

  const std::shared_ptr<torch::nn::Module> module_;
  const RanksOfModel ranks_;
  const Options options_;
  const ShardedModel sharded_;
  // After the parameters: a deferred module's buffers come with them.
  const std::shared_ptr<BufferSync> buffers_;
  Parking parking_;
  std::vector<int64_t> versions_;  // of the parameters, when the module was wrapped
  const std::shared_ptr<std::atomic<bool>> has_reduced_ =
      std::make_shared<std::atomic<bool>>(false);
  bool told_ = false;
  parallel::context::ModelForwards forwards_;
  std::unique_ptr<operators::OperatorLabels> labels_;  // null where memory is not limited
};

}  // namespace zeropage::zero
