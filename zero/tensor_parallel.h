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
//   embedding, or by what these are made of: matmul or addmm with weight.t(). With gradients on, any other
//   operator on one is refused in words, because it would see a slice.
// * It counts heads by -1: view({batch, length, -1, head}) sees the heads that this rank has.
// * A column is followed by a row in the same units. Nothing between them mixes the slices: a norm over the
//   features there would be wrong, and nobody could notice.
//
// Dropout between a column and its row may draw alike on all ranks; outside it must, so give all ranks of a
// tensor-parallel group the same seed. Where units are cut unevenly, dropout between the two needs a
// RandomOfRank (parallel/random_of_rank.h).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "comm/world.h"

namespace zeropage {

// How a planned layer is cut.
class Cut {
 public:
  enum class Kind : uint8_t { kColumn, kRow, kVocabulary };

  // A Linear whose outputs are cut: rows of its weight, elements of its bias.
  static Cut column() { return Cut(Kind::kColumn); }
  // A Linear whose inputs are cut, after a column: columns of its weight. The bias stays whole.
  static Cut row() { return Cut(Kind::kRow); }
  // An Embedding whose rows are cut; their number need not be a multiple of the ranks. Where its weight is the
  // head's too, the logits are gathered.
  static Cut vocabulary() { return Cut(Kind::kVocabulary); }

  // Of a column: equal stretches of the outputs, each cut for itself; 3 for queries, keys and values.
  Cut parts(int64_t count) const;
  // Elements that stay on one rank, such as those of a head. Default: 1.
  Cut unit(int64_t elements) const;

  Kind kind() const { return kind_; }
  int64_t parts() const { return parts_; }
  int64_t unit() const { return unit_; }

 private:
  explicit Cut(Kind kind) : kind_(kind) {}
  Kind kind_;
  int64_t parts_ = 1;
  int64_t unit_ = 1;
};

// Layers by name, and how they are cut. In a name * is any characters, ? is one.
using TensorParallelPlan = std::vector<std::pair<std::string, Cut>>;

// Call it before wrapping and before making optimizers, on all ranks of the group. The module gets rank 0's
// values first. It holds the world from then on. Collective; so are the module's forward and backward.
// Throws on all ranks alike where a name fits no Linear or Embedding of its kind, fits one twice, or where a
// dimension cannot be cut.
void tensor_parallel(torch::nn::Module& module, const comm::World& world,
                     const TensorParallelPlan& plan);
template <typename Contained>
void tensor_parallel(const torch::nn::ModuleHolder<Contained>& holder, const comm::World& world,
                     const TensorParallelPlan& plan) {
  tensor_parallel(*holder.ptr(), world, plan);
}

}  // namespace zeropage
