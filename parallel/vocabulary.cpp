#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/embedding.h>

#include "parallel/detail/kernels.h"
#include "parallel/detail/sequence_linear.h"
#include "parallel/rank_operators.h"
#include "parallel/whole_values.h"
#include "zeropage/check.h"
#include "zeropage/parallel_layers.h"

namespace zeropage::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kCrossEntropy = "vocabulary_parallel_cross_entropy";

// Ids counted from this rank's first one; 0 for those of other ranks, which `elsewhere` marks.
struct OwnIds {
  OwnIds(const at::Tensor& ids, const Slices& slices, int rank)
      : elsewhere((ids < slices.begin(rank)).bitwise_or_(ids >= slices.end(rank))),
        local((ids - slices.begin(rank)).masked_fill_(elsewhere, 0)) {}
  const at::Tensor elsewhere;
  const at::Tensor local;
};

// What each target costs. logits: [targets, slice] in at least fp32.
class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, const Slices& slices,
                            const RanksPointer& ranks) {
    const OwnIds own(targets, slices, ranks->world.rank());
    const at::Tensor largest =
        all_reduce(logits.amax(1), comm::ReduceOp::kMax, ranks, kCrossEntropy);
    at::Tensor exponents = logits - largest.unsqueeze(1);
    const at::Tensor of_target =
        exponents.gather(1, own.local.unsqueeze(1)).squeeze(1).masked_fill(own.elsewhere, 0);
    exponents = exponents.exp_();
    const at::Tensor sums = all_reduce(at::stack({exponents.sum(1), of_target}),
                                       comm::ReduceOp::kSum, ranks, kCrossEntropy);
    context->save_for_backward({exponents.div_(sums[0].unsqueeze(1)), own.local, own.elsewhere});
    return sums[0].log() - sums[1];
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    detail::refuse_second_derivative("a loss", kCrossEntropy);
    const auto saved = context->get_saved_variables();
    const at::Tensor &probabilities = saved[0], &local = saved[1], &elsewhere = saved[2];
    at::Tensor of_logits = probabilities.clone();
    of_logits.scatter_add_(1, local.unsqueeze(1),
                           elsewhere.bitwise_not().to(of_logits.dtype()).neg_().unsqueeze(1));
    of_logits.mul_(gradients[0].unsqueeze(1));
    return {of_logits, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor embedding_over_ranks(const at::Tensor& slice, const at::Tensor& ids,
                                const Slices& slices, const RanksPointer& ranks,
                                const std::string& name, std::optional<int64_t> sequence_dim) {
  if (ids.numel() > 0 && ids.is_cpu()) {
    const auto [least, most] = at::aminmax(ids);
    ZP_CHECK(least.item<int64_t>() >= 0 && most.item<int64_t>() < slices.total(), name,
             ": expected ids from 0 to ", slices.total() - 1, ", got some from ",
             least.item<int64_t>(), " to ", most.item<int64_t>(),
             "; make the vocabulary larger, or look at the tokens");
  }
  const OwnIds own(ids, slices, ranks->world.rank());
  const at::Tensor rows =
      at::embedding(slice, own.local).masked_fill(own.elsewhere.unsqueeze(-1), 0);
  if (!sequence_dim) return reduce_from_ranks(rows, ranks, name);
  return detail::scattered_sum(rows, {}, *sequence_dim, ranks, name);
}

VocabularyParallelEmbeddingImpl::VocabularyParallelEmbeddingImpl(
    int64_t num_embeddings, int64_t embedding_dim, const comm::World& world,
    std::optional<int64_t> sequence_dim)
    : num_embeddings_(num_embeddings),
      embedding_dim_(embedding_dim),
      ranks_(ranks_of(world)),
      sequence_dim_(sequence_dim) {
  reset();
}

std::string VocabularyParallelEmbeddingImpl::name() const {
  return c10::str("VocabularyParallelEmbedding(", num_embeddings_, ", ", embedding_dim_, ")");
}

Slices VocabularyParallelEmbeddingImpl::slices() const {
  return {num_embeddings_, /*unit=*/1, ranks_->world.size(), name()};
}

void VocabularyParallelEmbeddingImpl::reset() {
  const torch::nn::Embedding whole(num_embeddings_, embedding_dim_);
  take_values_of_rank_zero(*whole, ranks_->world, name());
  weight = register_parameter("weight",
                              SlicedDimension(slices()).take(whole->weight, ranks_->world.rank()));
}

torch::Tensor VocabularyParallelEmbeddingImpl::forward(const torch::Tensor& ids) {
  return embedding_over_ranks(weight, ids, slices(), ranks_, name(), sequence_dim_);
}

void VocabularyParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "zeropage::" << name();
}

at::Tensor vocabulary_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                                             int64_t vocabulary, const comm::World& world,
                                             int64_t ignore_index) {
  const Slices slices(vocabulary, /*unit=*/1, world.size(), kCrossEntropy);
  const int64_t own = slices.size(world.rank());
  ZP_CHECK(logits.dim() >= 1 && logits.size(-1) == own, kCrossEntropy, ": expected ", own, " of ",
           vocabulary, " classes in the last dimension of the logits, got sizes ", logits.sizes(),
           "; give it the output of a ColumnParallelLinear of the vocabulary that is not gathered");
  ZP_CHECK(targets.numel() * own == logits.numel(), kCrossEntropy,
           ": expected a target for each row of logits of sizes ", logits.sizes(), ", got targets ",
           targets.sizes(), "; shape them alike");
  const at::Tensor flat = targets.reshape({-1});
  const at::Tensor counts = flat != ignore_index;
  if (flat.is_cpu()) {
    const at::Tensor wrong = ((flat < 0).logical_or_(flat >= vocabulary)).logical_and_(counts);
    ZP_CHECK(!wrong.any().item<bool>(), kCrossEntropy, ": expected targets from 0 to ",
             vocabulary - 1, " or ", ignore_index, ", got ",
             flat.masked_select(wrong)[0].item<int64_t>(), "; look at the targets");
  }
  const auto dtype = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor losses =
      CrossEntropy::apply(logits.reshape({-1, own}).to(dtype), flat, slices, ranks_of(world));
  return losses.masked_fill(counts.bitwise_not(), 0).sum() / counts.sum();
}

}  // namespace zeropage::parallel
