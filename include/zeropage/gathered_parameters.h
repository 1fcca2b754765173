// Whole values of what is sharded, for code that needs them all at once or reads memory itself.
//
// An operator on a sharded parameter gathers it by itself, so most scripts need none of this. What
// reads memory past the dispatcher does: data_ptr() in a kernel of yours, torch::save, Module::clone.
// Without a guard LibTorch throws errors that name no parameter: data_ptr<T>() by "The tensor has a
// non-zero number of elements, but its data is not allocated yet", torch::save by "Attempted to set
// the storage of a tensor on device "cpu" to a storage on different device "meta"". data_ptr()
// gives null.
//
//   {
//     zeropage::GatheredParameters guard(model);
//     if (world.rank() == 0) torch::save(model.module(), "weights.pt");
//   }
//
// A guard for code that writes says where it writes (Modified). Master weights and offloaded copies
// then take over what was written, and a backward over a graph from before the guard throws.
//
// Collective: construction, and the end of a guard that takes one rank's values. Works at every
// stage. Lifetime: within the model's, and within one forward, backward or the time between.
// Threads: the training thread. Throws if the budget does not hold all of it at once.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <torch/ordered_dict.h>

#include "zeropage/detail/model_ref.h"

namespace zeropage::paging {
class Pins;
}  // namespace zeropage::paging

namespace zeropage {

// Where parameters are written to under a guard: by operators, past the dispatcher, or by torch::load()
// into the module, whose values they take in the dtype and on the device that they have.
class Modified {
 public:
  static Modified nowhere() { return Modified(Where::kNowhere, 0); }
  // The same values on all ranks; each rank keeps its shards of its own.
  static Modified on_every_rank() { return Modified(Where::kEveryRank, 0); }
  // All ranks take that rank's values when the guard ends. Costs a broadcast of the pages.
  static Modified on_rank(int rank) { return Modified(Where::kOneRank, rank); }

  bool anywhere() const { return where_ != Where::kNowhere; }
  std::optional<int> only_rank() const;

 private:
  enum class Where : uint8_t { kNowhere, kEveryRank, kOneRank };
  Modified(Where where, int rank) : where_(where), rank_(rank) {}

  Where where_;
  int rank_;
};

class GatheredParameters {
 public:
  // All parameters of the model.
  explicit GatheredParameters(const ModelRef& model,
                              const Modified& modified = Modified::nowhere());
  // These, and what shares their pages.
  GatheredParameters(const ModelRef& model, const std::vector<at::Tensor>& parameters,
                     const Modified& modified = Modified::nowhere());
  // Throws what the broadcast throws, and if a parameter was given values of other sizes, unless an exception is
  // unwinding already.
  ~GatheredParameters() noexcept(false);
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;

 private:
  struct Held;

  Held* const held_;  // not a unique_ptr: its destructor may throw
};

// While it lives, p.grad() of these parameters is the whole mean gradient, also for code that reads memory itself.
// Use it after a backward that averages and before the step. At stage 0 gradients are whole anyway.
class GatheredGradients {
 public:
  explicit GatheredGradients(const ModelRef& model);
  GatheredGradients(const ModelRef& model, const std::vector<at::Tensor>& parameters);
  ~GatheredGradients() noexcept(false);
  GatheredGradients(const GatheredGradients&) = delete;
  GatheredGradients& operator=(const GatheredGradients&) = delete;

 private:
  paging::Pins* pins_;  // likewise
};

// Calls visit(name, values) for every parameter in named_parameters() order, a tied one under each
// of its names; values: whole, until visit returns; of a parameter that is cut over ranks, this rank's slice. Gathers a page at a time.
// Collective.
void visit_parameters(const DistributedDataParallelBase& model,
                      const std::function<void(const std::string&, const at::Tensor&)>& visit);

// Copies of all whole parameters, those that tensor_parallel() and expert_parallel() cut too, and of the buffers, on that rank;
// empty on the others. A tied parameter is one tensor under each of its names. Collective.
torch::OrderedDict<std::string, at::Tensor> full_state(const DistributedDataParallelBase& model,
                                                       int rank = 0);

}  // namespace zeropage
