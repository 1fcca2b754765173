// `tensor_parallel()`: cuts the layers of a module over a tensor axis.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "zeropage/world.h"

// Tensor parallelism for a module that does not know of it (Shoeybi et al., "Megatron-LM", 2019).
//
//   zeropage::Mesh mesh(world, {{"data", 4}, {"tensor", 2}});
//   zeropage::tensor_parallel(gpt, mesh["tensor"],
//                             {{"blocks.*.attention_qkv", Cut::column().parts(3).unit(64)},
//                              {"blocks.*.attention_out", Cut::row().unit(64)},
//                              {"blocks.*.mlp_up", Cut::column()},
//                              {"blocks.*.mlp_down", Cut::row()},
//                              {"token_embedding", Cut::vocabulary()}});
//   zeropage::DistributedDataParallel<Gpt> model(gpt, mesh, options);
//
// The planned parameters keep their tensors and names, and are cut to this rank's slice. Each gets a mark, and
// the trap (paging/trap.h) runs the functions of parallel/ in place of the products and look-ups on it: a
// column's input is copied to the ranks, a row's output is added up over them. Everything else of the module
// is the same on all ranks and computed by each.
//
// What the module must do for it:
// * It uses planned weights by torch::nn::Linear and Embedding, by torch::nn::functional::linear and
//   embedding, or by what these are made of: matmul or addmm with weight.t(). Any other operator on one throws, except
//   what an optimizer or a log does without gradients (parallel/slice_mark.h).
// * It draws its first values before. An init function afterwards would draw for a slice, and is refused.
// * It counts heads by -1: view({batch, length, -1, head}) sees the heads that this rank has.
// * A column is followed by a row in the same units. Nothing between them mixes the slices: a norm over the
//   features there would be wrong, and no check could notice. Layers with parameters between them are in the plan too, as
//   Cut::between().
//
// Dropout between a column and its row may draw alike on all ranks. Elsewhere it must, so give all ranks of a
// tensor-parallel group the same seed. Where units are cut unevenly, dropout between the two needs a
// RandomOfRank (zeropage/parallel_layers.h).

namespace zeropage {

// How a planned layer is cut.
class Cut {
 public:
  enum class Kind : uint8_t { kColumn, kRow, kVocabulary, kBetween };

  // A Linear whose outputs are cut: rows of its weight, elements of its bias.
  static Cut column() { return Cut(Kind::kColumn); }
  // A Linear whose inputs are cut, after a column: columns of its weight. The bias stays whole.
  static Cut row() { return Cut(Kind::kRow); }
  // An Embedding whose rows are cut; their number need not be a multiple of the ranks. Where its weight is the
  // head's too, the logits are gathered.
  static Cut vocabulary() { return Cut(Kind::kVocabulary); }

  // Any layer that is used between a column and its row, and whose own parameters stay whole: a PReLU, a norm of each
  // head, or the Linear of keys that are too few to be cut. Each rank has a part of their gradients, which are added up
  // in backward: a message of a parameter's size, or, of a Linear, of its output's.
  static Cut between() { return Cut(Kind::kBetween); }

  // For a column: `count` equal stretches of the outputs, each cut for itself; 3 for queries, keys and values.
  Cut parts(int64_t count) const;
  // The same with stretches of other lengths, in units: {8, 2, 2} for 8 heads of queries and 2 of keys and values. They
  // are cut at the same places of each: the greatest number that divides all sizes is what ranks share, 2 here, so
  // each of two ranks has 4 heads of queries and the key and the value that these share.
  Cut parts(std::vector<int64_t> sizes) const;
  Cut parts(std::initializer_list<int64_t> sizes) const {
    return parts(std::vector<int64_t>(sizes));
  }
  // Elements that stay on one rank, such as those of a head. Default: 1.
  Cut unit(int64_t elements) const;
  // Some ranks may get a unit more than others. Set it for all layers between which slices pass, and only where
  // units of the same number belong together: with fewer heads of keys than of queries, a unit of the queries is
  // all heads that share a key. A vocabulary may always be cut unevenly.
  Cut uneven() const;

 private:
  friend struct CutForm;
  explicit Cut(Kind kind) : kind_(kind), may_be_uneven_(kind == Kind::kVocabulary) {}
  Kind kind_;
  std::vector<int64_t> parts_ = {1};  // one: how many; else their sizes
  int64_t unit_ = 1;
  bool may_be_uneven_;
};

// Layers by name, and how they are cut. In a name * is any characters, ? is one.
using TensorParallelPlan = std::vector<std::pair<std::string, Cut>>;

// Call it before wrapping and before making optimizers, on all ranks of the group. The module gets rank 0's
// values first. It holds the world from then on. Collective; so are the module's forward and backward.
// Throws on all ranks alike where a name fits no layer of its kind, fits one twice, or where a dimension cannot be
// cut, or not evenly.
void tensor_parallel(torch::nn::Module& module, const comm::World& world,
                     const TensorParallelPlan& plan);
template <typename Contained>
void tensor_parallel(const torch::nn::ModuleHolder<Contained>& holder, const comm::World& world,
                     const TensorParallelPlan& plan) {
  tensor_parallel(*holder.ptr(), world, plan);
}

// The values of a parameter that tensor_parallel() cut (zeropage/tensor_parallel.h), as tensors that any operator takes.
//
// Threads: the training thread.
// The whole parameter, of all ranks of the group, without gradients. Collective for a parameter that was cut; of
// another it is a copy. It may also be the gradient of one, p.grad(), and what detach() or an elementwise operator made
// of either. Both functions throw for an undefined tensor.
at::Tensor whole_of(const at::Tensor& parameter);

// A copy of what this rank has of it.
at::Tensor own_slice(const at::Tensor& parameter);

}  // namespace zeropage
