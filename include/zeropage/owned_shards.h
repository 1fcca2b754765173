// What this rank owns of each parameter: its values, fp32 master values, gradient and optimizer state.
//
//   zeropage::visit_owned_shards(model, [&](const zeropage::OwnedShard& shard) {
//     average.at(shard.name).lerp_(shard.exact, 0.001);  // costs P / N elements a rank
//   });
//
// At stages 1 to 3 the ranks' shards of a parameter together are the parameter, each element once; at stage 0
// every rank owns all of it. A rank may own nothing of a parameter: its tensors are then empty.
//
// Reading sends nothing. Between backward and step() a read frees gradients that an operator on p.grad() has
// gathered, so either all ranks read then, or none does. It throws within a guard that says where it writes
// (Modified).
// What is read are copies, and writing to them throws: they are LibTorch's inference tensors ("Inplace update to
// inference tensor outside InferenceMode is not allowed"). New values come by assign_owned_shards().
// Throws in a simulated world, whose parameters have no values, with StepWhen::kOneStepLate, and with
// StepWhen::kInBackward between backward and step(). Threads: the training thread.
#pragma once

#include <functional>
#include <map>
#include <string>

#include <ATen/core/TensorBody.h>

#include "zeropage/detail/model_ref.h"
#include "zeropage/detail/range.h"
#include "zeropage/optimizer.h"

namespace zeropage {

struct OwnedShard {
  std::string name = {};  // of the parameter: its first, where it is tied
  // Whether the ranks of a tensor-parallel group have parts of it: `range` is in this rank's part.
  bool is_slice = false;
  // Which of the parameter's elements, counted as they lie in memory: row-major where it is contiguous; of
  // one with other strides, gaps are counted too.
  Range range = {};
  at::Tensor values = {};  // [range.numel()]: as operators see them
  // [range.numel()]: in fp32 where the optimizer keeps more digits than `values` have (fp32 master weights of
  // bf16 or fp16, wherever they live), else `values`.
  at::Tensor exact = {};
  // [range.numel()], in the dtype in which gradients are kept: the mean over ranks, from a backward that
  // averages until step() or zero_grad(). Undefined: there is none.
  at::Tensor gradient = {};
  // [range.numel()] each, by LibTorch's names ("exp_avg"); 8-bit states in fp32. Empty where no optimizer was
  // given, and where its class has made none yet. Adafactor's moments of rows and columns have no part here.
  std::map<std::string, at::Tensor> states = {};
  int64_t steps = 0;  // of the optimizer on this parameter; 0 where none was given
};

// parameter: of the wrapped module, itself, not a view. optimizer: of this model. Costs copies of what the
// result has, and where the page is on NVMe the reading of it. It looks at all parameters, so visit_owned_shards()
// is the way to many of them.
OwnedShard owned_shard(const ModelRef& model, const at::Tensor& parameter);
OwnedShard owned_shard(const ModelRef& model, ShardedOptimizer& optimizer,
                       const at::Tensor& parameter);

// Calls visit for every parameter of the model, each once, page by page: the same ones in the same order on
// all ranks, without gradients (NoGradGuard). Costs the copies of one parameter at a time.
using VisitOwnedShard = std::function<void(const OwnedShard& shard)>;
void visit_owned_shards(const ModelRef& model, const VisitOwnedShard& visit);
void visit_owned_shards(const ModelRef& model, ShardedOptimizer& optimizer,
                        const VisitOwnedShard& visit);

// Gives parameters new values: new_values returns [range.numel()] of floating point for what this rank owns
// of one, or an undefined tensor for one that stays as it is. Master weights take them as they are, parameters
// rounded to their dtype; the optimizer's states stay. At stage 0 all ranks return the same, as do ranks that have
// the same shard of hybrid sharding, or the same whole parameter over a tensor-parallel group.
// Collective: whole pages take over the other ranks' shards. Where new_values throws on a rank, or returns
// something else, or other values than another rank that owns the same, or one rank alone has written to a parameter,
// all ranks throw and nothing is changed. A backward over a graph from before is refused.
using NewShardValues = std::function<at::Tensor(const OwnedShard& shard)>;
void assign_owned_shards(const ModelRef& model, const NewShardValues& new_values);

}  // namespace zeropage
