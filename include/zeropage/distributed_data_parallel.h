// `DistributedDataParallel`: the wrapper of a module; `DeferredModule`.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "zeropage/detail/paging_statistics.h"
#include "zeropage/ledger.h"
#include "zeropage/mesh.h"
#include "zeropage/options.h"

namespace zeropage::operators {
class ConstructionTape;
}  // namespace zeropage::operators

namespace zeropage::zero {
class GradientReducer;
struct ShardedModel;
class WrappedModule;
}  // namespace zeropage::zero

// While it lives, backward adds up gradients on this rank and does not average them: the first backward after it does, for
// all of them together. Made by DistributedDataParallel::no_sync() and ShardedOptimizer::no_sync(). Guards may nest, and
// end in any order.
//
//   std::optional<zeropage::NoSync> guard;
//   if (!is_last) guard = model.no_sync();
//
// Lifetime: shares the reducer. Threads: the training thread.

namespace zeropage {

class NoSync {
 public:
  // Throws where world_invariant, which adds up the ranks first.
  explicit NoSync(const zero::ShardedModel& sharded);
  ~NoSync() { end(); }
  // What was moved from is no guard any more.
  NoSync(NoSync&& other) noexcept = default;
  NoSync& operator=(NoSync&& other) noexcept;

 private:
  void end();

  std::shared_ptr<zero::GradientReducer> reducer_;  // null: moved from
};

// A module that is constructed without memory for its parameters.
//
//   zeropage::DeferredModule<Gpt> deferred([&] { return Gpt(config); });
//   zeropage::DistributedDataParallel<Gpt> model(std::move(deferred), world, options);
//
// The constructor runs on every rank and makes no parameter; wrapping then computes one parameter after the other,
// keeps this rank's shard of it, and frees the rest. So a module larger than a rank's
// memory can be built, and its parameters are not sent: ranks compare a hash of what they computed. Where that differs, as with
// another seed on a rank, rank 0 says so on stderr and sends its own. The values, and the random numbers drawn afterwards, are the plain
// constructor's bits (operators/construction_tape, which says what a constructor may not do: read
// values, keep tensors that are neither parameter nor buffer). Works at every stage.
//
// Lifetime: until it is wrapped, the module's tensors lie on the meta device and have no values.

namespace detail {
std::shared_ptr<const operators::ConstructionTape> record_construction(
    const std::function<void()>& construct);
}

// M: a module holder (TORCH_MODULE) or a std::shared_ptr to a module.
template <typename M>
class DeferredModule {
 public:
  // Throws what `construct` throws, and for a constructor that needs values.
  explicit DeferredModule(const std::function<M()>& construct)
      : tape_(detail::record_construction([&] { module_ = construct(); })) {}
  DeferredModule(DeferredModule&&) noexcept = default;
  DeferredModule& operator=(DeferredModule&&) noexcept = default;

  M& module() { return module_; }
  const operators::ConstructionTape& tape() const { return *tape_; }

 private:
  template <typename Wrapped>
  friend class DistributedDataParallel;

  M module_{nullptr};
  std::shared_ptr<const operators::ConstructionTape> tape_;  // after the module, which it records
};

template <typename F>
DeferredModule(F) -> DeferredModule<std::invoke_result_t<F>>;

// A module trained by several ranks, each on its own part of the batch; reads like PyTorch's
// DistributedDataParallel.
//
//   zeropage::DistributedDataParallel<Gpt> model(Gpt(config), world, options);
//   auto loss = criterion(model(batch.data), batch.target);
//   loss.backward();  // gradients are averaged over ranks as it runs
//
// Where several ranks compute one sample together (zeropage/tensor_parallel.h), it takes the whole mesh:
//
//   zeropage::Mesh mesh(world, {{"data", 4}, {"tensor", 2}});
//   zeropage::tensor_parallel(gpt, mesh["tensor"], plan);
//   zeropage::DistributedDataParallel<Gpt> model(gpt, mesh, options);
//
// The module stays itself: it may be called directly, and `model->` reaches it. Wrapping moves the
// memory of its parameters into pages, and gives every rank rank 0's parameters and buffers.
//
// Wrap after the module is on its device and in its dtype; make optimizers after wrapping. Parameters may
// be frozen and unfrozen between two steps, on all ranks alike.
// What forward allocates is Kind::kActivation on the ledger, or kRecompute where it is repeated.
// Lifetime: shares the module.
// Buffers (running statistics) become rank 0's at the end of each backward that averages, and before a
// forward in training mode without gradients (Options::broadcast_buffers).
// Collective: construction, backward, a forward after parameters were unfrozen; at stage 3 every use of a
// parameter.
// Threads: the training thread.

class ModelRef;

// What does not depend on the module's type.
class DistributedDataParallelBase {
 public:
  // The ranks that get different samples, over which everything is sharded.
  const comm::World& world() const;
  // The ranks of world(), or all ranks of the mesh that the module was wrapped over. A state on disk is saved and
  // loaded by all of them.
  const comm::World& all_ranks() const;

  // Gradients accumulate on this rank until the first backward outside the guard. Call it alike on all ranks. At
  // stages 2 and 3 the rank holds whole gradients meanwhile; an Accumulator can also reduce each micro-step.
  // Refused with world_invariant, which adds up the ranks first.
  [[nodiscard]] NoSync no_sync();

  // Moves all that the model and its optimizers have on the device to another tier, for a program that uses the device
  // meanwhile: parameters, master weights, optimizer states, buffers, what a WeightAverage keeps. Nothing of it is left on the
  // device's ledger, and what is free goes back to the device and the operating system. What was offloaded stays where
  // it is. resume() brings the same bits back: training goes on as if neither had been called.
  //
  // tier: kHost, where the device is not the host, or kNvme. nvme_directory: a folder on a local disk, for a scratch file of each
  // rank, which goes with resume() or the model; "" for options.offload.nvme_directory.
  //
  // Between two steps, with gradients zeroed. Until resume() whatever reads or writes a parameter, a buffer or a state throws.
  // Where a rank has no room, all ranks throw and nothing has changed; if resume() throws, the model is parked still.
  // Both are collective over all_ranks(). Cost: a copy of these bytes each, and two buffers of 16 MiB while it is made.
  void park(memory::Tier tier, const std::string& nvme_directory = "");
  void resume();
  bool is_parked() const;

  // What gathers of sharded parameters have cost since wrapping; all zero if no parameter is sharded.
  memory::PagingStatistics paging() const;

  // The wrapped module, whatever its type.
  const torch::nn::Module& untyped_module() const { return *base_; }
  std::vector<at::Tensor> parameters() const { return base_->parameters(); }
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;
  std::vector<at::Tensor> buffers() const { return base_->buffers(); }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const;
  void train(bool on = true) { base_->train(on); }
  void eval() { base_->eval(); }
  bool is_training() const { return base_->is_training(); }
  void zero_grad(bool set_to_none = true) { base_->zero_grad(set_to_none); }

 protected:
  // tape: of a module that was constructed without memory; null for others.
  DistributedDataParallelBase(const std::shared_ptr<torch::nn::Module>& module, comm::World world,
                              const Options& options, const operators::ConstructionTape* tape);
  DistributedDataParallelBase(const std::shared_ptr<torch::nn::Module>& module,
                              const comm::Mesh& mesh, const Options& options,
                              const operators::ConstructionTape* tape);

  // samples: in dimension 0 of each argument of forward, 0 where it has none. The first that is not 0 counts.
  void before_forward(std::initializer_list<int64_t> samples);
  // Tells the model of the end of its forward, which it has to outlive.
  [[nodiscard]] std::shared_ptr<void> until_forward_ends();
  void check_forward() const;
  static memory::Kind kind_of_forward();
  // While it lives, the thread is in a forward, as an event sink sees it (zeropage/event_sink.h).
  static std::shared_ptr<void> range_of_forward();

  static int64_t samples_of(const at::Tensor& argument) {
    return argument.defined() && argument.dim() > 0 ? argument.size(0) : 0;
  }
  template <typename Argument>
  static int64_t samples_of(const Argument& /*argument*/) {
    return 0;
  }

  // Tensors of floating point in options.compute_dtype; all else as it is.
  template <typename Argument>
  decltype(auto) input(Argument&& argument) const {
    if constexpr (std::is_same_v<std::remove_cvref_t<Argument>, at::Tensor>) {
      return cast_input(argument);
    } else {
      return std::forward<Argument>(argument);
    }
  }
  at::Tensor cast_input(const at::Tensor& tensor) const;
  // Adds to LibTorch's error about tensors of two dtypes, in a forward under compute_dtype, which buffers keep
  // their own dtype.
  void explain(c10::Error& error) const;

 private:
  friend class ModelRef;
  friend const zero::ShardedModel& sharded_parameters_of(const DistributedDataParallelBase& model);

  const std::shared_ptr<torch::nn::Module> base_;
  std::shared_ptr<zero::WrappedModule> wrapped_;
};

// M: a module holder (TORCH_MODULE) or a std::shared_ptr to a module.
template <typename M>
class DistributedDataParallel final : public DistributedDataParallelBase {
 public:
  DistributedDataParallel(M module, comm::World world, const Options& options = {})
      : DistributedDataParallelBase(pointer_to(module), std::move(world), options,
                                    /*tape=*/nullptr),
        module_(std::move(module)) {}

  // Gives the module its values.
  DistributedDataParallel(DeferredModule<M> deferred, comm::World world,
                          const Options& options = {})
      : DistributedDataParallelBase(pointer_to(deferred.module()), std::move(world), options,
                                    deferred.tape_.get()),
        module_(std::move(deferred.module())) {}

  // Shards over the axis "data". An axis "tensor" is the one over which the module's parameters are slices.
  // Throws where the mesh has other axes of several ranks, and where the module's slices are over other ranks.
  DistributedDataParallel(M module, const comm::Mesh& mesh, const Options& options = {})
      : DistributedDataParallelBase(pointer_to(module), mesh, options, /*tape=*/nullptr),
        module_(std::move(module)) {}
  DistributedDataParallel(DeferredModule<M> deferred, const comm::Mesh& mesh,
                          const Options& options = {})
      : DistributedDataParallelBase(pointer_to(deferred.module()), mesh, options,
                                    deferred.tape_.get()),
        module_(std::move(deferred.module())) {}

  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    before_forward({samples_of(arguments)...});
    const auto until_end = until_forward_ends();
    const memory::KindScope kind(kind_of_forward());
    const auto range = range_of_forward();
    try {
      if constexpr (std::is_void_v<decltype(module_->forward(
                        input(std::forward<Arguments>(arguments))...))>) {
        module_->forward(input(std::forward<Arguments>(arguments))...);
        check_forward();
      } else {
        auto output = module_->forward(input(std::forward<Arguments>(arguments))...);
        check_forward();
        return output;
      }
    } catch (c10::Error& error) {
      explain(error);
      throw;
    }
  }

  M& module() { return module_; }
  const M& module() const { return module_; }
  auto* operator->() { return &*module_; }
  const auto* operator->() const { return &*module_; }

 private:
  template <typename Impl>
  static std::shared_ptr<torch::nn::Module> pointer_to(const std::shared_ptr<Impl>& module) {
    return module;
  }
  template <typename Impl>
  static std::shared_ptr<torch::nn::Module> pointer_to(
      const torch::nn::ModuleHolder<Impl>& module) {
    return module.ptr();
  }

  M module_;
};

template <typename M>
DistributedDataParallel(M, comm::World, Options = {}) -> DistributedDataParallel<M>;
template <typename M>
DistributedDataParallel(M, comm::Mesh, Options = {}) -> DistributedDataParallel<M>;
template <typename M>
DistributedDataParallel(DeferredModule<M>, comm::World, Options = {}) -> DistributedDataParallel<M>;
template <typename M>
DistributedDataParallel(DeferredModule<M>, comm::Mesh, Options = {}) -> DistributedDataParallel<M>;

}  // namespace zeropage
