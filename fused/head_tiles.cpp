#include "fused/head_tiles.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <ATen/ATen.h>

#include "fused/cuda/rows.h"
#include "fused/operators.h"
#include "optim/parallel.h"
#include "parallel/rank_operators.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/ledger.h"

namespace zeropage::fused {
namespace {

using at::Tensor;
using memory::operator""_MiB;

constexpr const char* kWho = "zeropage::fused::linear_cross_entropy()";

bool is_low(const Tensor& tensor) {
  return tensor.scalar_type() != wide_type(tensor);
}

// The same on all ranks of a tensor axis, whose shares of the classes may differ: each tile is a collective there.
int64_t rows_of_tile(const HeadArguments& head) {
  const bool on_device = !head.hidden.is_cpu() && !head.hidden.is_meta();
  const int64_t ranks = head.ranks == nullptr ? 1 : head.ranks->world.size();
  const int64_t columns = std::max<int64_t>(1, (head.classes + ranks - 1) / ranks);
  // What is composed has an fp32 tile beside one of low precision.
  const bool has_two = on_device && is_low(head.hidden) && !kernel_stream(head.hidden);
  const int64_t row_bytes = columns * (head.hidden.element_size() + (has_two ? 4 : 0));
  const int64_t tokens = std::max<int64_t>(1, head.hidden.size(0));
  int64_t most = std::max<int64_t>(1, head.tile_bytes / row_bytes);
  if (head.tile_bytes == 0) {
    most = on_device ? std::max<int64_t>(1024, 256_MiB / row_bytes)
                     : std::max<int64_t>(512, 64_MiB / row_bytes);
  }
  const int64_t tiles = (tokens + most - 1) / most;
  return (tokens + tiles - 1) / tiles;
}

// Sums over tiles. What is added in low precision is rounded once for each tile and adds up in fp32.
class WeightGradient {
 public:
  WeightGradient(const Tensor& weight, bool single_tile)
      : is_wide_(!is_low(weight)),
        sum_(empty_gradient(weight, is_wide_ || (single_tile && weight.scalar_type() != at::kHalf)
                                        ? weight.scalar_type()
                                        : at::kFloat)) {}

  // of_logits: [rows, classes]; hidden: [rows, width]
  void add(const Tensor& of_logits, const Tensor& hidden) {
    if (sum_.scalar_type() == hidden.scalar_type()) {
      at::addmm_out(sum_, sum_, of_logits.t(), hidden, /*beta=*/is_empty_ ? 0 : 1);
    } else {
      add_blocks(of_logits, hidden);
    }
    is_empty_ = false;
  }

  // dtype: the weight's, or fp32.
  Tensor result(at::ScalarType dtype) {
    const memory::KindScope kind(memory::Kind::kGradient);
    if (is_empty_) sum_.zero_();
    return sum_.to(dtype);
  }

 private:
  static Tensor empty_gradient(const Tensor& weight, at::ScalarType dtype) {
    const memory::KindScope kind(memory::Kind::kGradient);
    return at::empty(weight.sizes(), weight.options().dtype(dtype));
  }

  void add_blocks(const Tensor& of_logits, const Tensor& hidden) {
    // A sum over tokens that no loss scale and no mean has divided yet may be beyond fp16.
    const bool is_half = hidden.scalar_type() == at::kHalf;
    const Tensor factor = is_half ? hidden.to(at::kFloat) : hidden;
    constexpr int64_t kBlockBytes = 8_MiB;
    const int64_t rows = std::max<int64_t>(
        1, kBlockBytes / std::max<int64_t>(1, hidden.size(1) * hidden.element_size()));
    for (int64_t first = 0; first < sum_.size(0); first += rows) {
      const int64_t numel = std::min(rows, sum_.size(0) - first);
      const Tensor of_block = of_logits.narrow(1, first, numel).t();
      const Tensor product = at::mm(is_half ? of_block.to(at::kFloat) : of_block, factor);
      Tensor block = sum_.narrow(0, first, numel);
      if (is_empty_) {
        block.copy_(product);
      } else {
        block.add_(product);
      }
    }
  }

  const bool is_wide_;
  Tensor sum_;
  bool is_empty_ = true;
};

// A tile's tokens: for each the largest logit, the sum of e^(logit - largest), and the target's logit less the largest, which is
// -infinity where the target is none of this rank's classes. [3, rows], fp64 from loops.
using Figures = Tensor;

// What they are over the classes of all ranks of a tensor axis.
Figures over_ranks(const HeadArguments& head, const Figures& own) {
  if (head.ranks == nullptr) return own;
  const std::vector<int64_t> one_each(static_cast<size_t>(head.ranks->world.size()), 1);
  const Tensor all = parallel::all_gather(own.unsqueeze(0), one_each, 0, head.ranks, kWho);
  const Tensor largest = all.select(1, 0).amax(0);
  const Tensor sum = (all.select(1, 1) * (all.select(1, 0) - largest).exp()).sum(0);
  const Tensor of_target = (all.select(1, 2) + all.select(1, 0)).amax(0) - largest;
  return at::stack({largest, sum, of_target});
}

class Tiles {
 public:
  explicit Tiles(const HeadArguments& head)
      : head_(head),
        wide_(wide_type(head.hidden)),
        first_class_(first_class(head)),
        rows_(rows_of_tile(head)),
        logits_(at::empty({std::min(rows_, head.hidden.size(0)), head.weight.size(0)},
                          head.hidden.options())) {}

  HeadResults run() {
    const int64_t tokens = head_.hidden.size(0);
    const bool gradients = head_.of_hidden || head_.of_weight || head_.of_bias;
    HeadResults results;
    results.loss = at::zeros({}, head_.hidden.options().dtype(wide_));
    if (head_.of_hidden)
      results.of_hidden =
          at::empty(head_.hidden.sizes(), head_.hidden.options().dtype(kept_type(head_.hidden)));
    std::optional<WeightGradient> of_weight;
    if (head_.of_weight) of_weight.emplace(head_.weight, /*single_tile=*/tokens <= rows_);
    if (head_.of_bias)
      results.of_bias = at::zeros(head_.bias.sizes(), head_.bias.options().dtype(wide_));
    for (int64_t first = 0; first < tokens; first += rows_) {
      const int64_t numel = std::min(rows_, tokens - first);
      const Tensor hidden = head_.hidden.narrow(0, first, numel);
      const Tensor targets = head_.targets.narrow(0, first, numel);
      Tensor logits = logits_.narrow(0, 0, numel);
      at::mm_out(logits, hidden, head_.weight.t());
      if (head_.bias.defined()) logits.add_(head_.bias);
      results.loss.add_(loss_of(logits, targets, gradients));
      if (head_.of_hidden) set_of_hidden(results.of_hidden.narrow(0, first, numel), logits);
      if (head_.of_weight) of_weight->add(logits, hidden);
      if (head_.of_bias) results.of_bias.add_(logits.sum(0, /*keepdim=*/false, wide_));
    }
    logits_.reset();
    if (head_.of_hidden && head_.ranks != nullptr) {
      results.of_hidden =
          parallel::all_reduce(results.of_hidden, comm::ReduceOp::kSum, head_.ranks, kWho);
    }
    if (head_.of_weight) results.of_weight = of_weight->result(kept_type(head_.weight));
    if (head_.of_bias) results.of_bias = results.of_bias.to(kept_type(head_.bias));
    return results;
  }

 private:
  static int64_t first_class(const HeadArguments& head) {
    if (head.ranks == nullptr) return 0;
    const parallel::Slices slices(head.classes, /*unit=*/1, head.ranks->world.size(), kWho);
    return slices.begin(head.ranks->world.rank());
  }
  // HeadResults.
  static at::ScalarType kept_type(const Tensor& tensor) {
    return tensor.scalar_type() == at::kHalf ? at::kFloat : tensor.scalar_type();
  }

  void set_of_hidden(Tensor rows, const Tensor& of_logits) const {
    if (rows.scalar_type() == of_logits.scalar_type()) {
      at::mm_out(rows, of_logits, head_.weight);
    } else {
      rows.copy_(at::mm(of_logits, head_.weight));
    }
  }

  // These turn logits into their gradients if those are wanted, and return the sum of the tile's losses. []
  Tensor loss_of(Tensor& logits, const Tensor& targets, bool gradients) const {
    if (has_loops(logits)) return by_loops(logits, targets, gradients);
    if (const auto stream = kernel_stream(logits))
      return by_kernels(*stream, logits, targets, gradients);
    if (!logits.is_meta()) return composed(logits, targets, gradients);
    over_ranks(head_, at::empty({3, logits.size(0)}, logits.options().dtype(at::kDouble)));
    return at::empty({}, logits.options().dtype(wide_));
  }
  Tensor by_loops(const Tensor& logits, const Tensor& targets, bool gradients) const;
  Tensor by_kernels(void* stream, const Tensor& logits, const Tensor& targets,
                    bool gradients) const;
  Tensor composed(Tensor& logits, const Tensor& targets, bool gradients) const;

  const HeadArguments& head_;
  const at::ScalarType wide_;
  const int64_t first_class_;
  const int64_t rows_;
  Tensor logits_;  // [rows of a tile, classes of this rank]
};

Tensor sum_of_losses(const Figures& figures) {
  return (figures[1].log() - figures[2]).sum();
}

Tensor Tiles::by_loops(const Tensor& logits, const Tensor& targets, bool gradients) const {
  const int64_t rows = logits.size(0), columns = logits.size(1);
  const auto* const target = elements<int64_t>(targets);
  const Figures figures = at::empty({3, rows}, logits.options().dtype(at::kDouble));
  auto* const largest = elements<double>(figures);
  double* const sums = largest + rows;
  double* const of_target = sums + rows;
  const auto own_class = [this, target](int64_t row) { return target[row] - first_class_; };
  const auto is_here = [columns](int64_t own) { return own >= 0 && own < columns; };
  visit_elements(logits, [&]<typename T>() {
    T* const values = elements<T>(logits);
    optim::parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* const of_row = values + row * columns;
        const ExponentSum exponents = cpu::loops_of<T>().sum_exponents(of_row, columns);
        largest[row] = exponents.largest;
        sums[row] = exponents.sum;
        const int64_t own = own_class(row);
        of_target[row] =
            is_here(own) ? double{optim::to_float(of_row[own])} - exponents.largest : -INFINITY;
      }
    });
  });
  const Figures of_all = over_ranks(head_, figures);
  if (gradients) {
    const auto* const all_largest = elements<double>(of_all);
    const double* const all_sums = all_largest + rows;
    visit_elements(logits, [&]<typename T>() {
      T* const values = elements<T>(logits);
      optim::parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          T* const of_row = values + row * columns;
          const double factor = std::exp(largest[row] - all_largest[row]) / all_sums[row];
          cpu::loops_of<T>().to_probabilities(of_row, columns, static_cast<float>(largest[row]),
                                              static_cast<float>(factor));
          const int64_t own = own_class(row);
          if (is_here(own))
            set(of_row[own], static_cast<float>(std::exp(of_target[row]) * factor - 1));
        }
      });
    });
  }
  return sum_of_losses(of_all);
}

Tensor Tiles::by_kernels(void* stream, const Tensor& logits, const Tensor& targets,
                         bool gradients) const {
  const Figures figures = at::empty({3, logits.size(0)}, logits.options().dtype(at::kFloat));
  Tensor losses;
  visit_elements(logits, [&]<typename T>() {
    const cuda::LogitTile<T> tile{.logits = elements<T>(logits),
                                  .targets = elements<int64_t>(targets),
                                  .rows = logits.size(0),
                                  .columns = logits.size(1),
                                  .first_class = first_class_,
                                  .ignore_index = head_.ignore_index};
    cuda::sum_exponents(tile, elements<float>(figures), stream);
    const Figures of_all = over_ranks(head_, figures);
    if (gradients)
      cuda::to_gradients(tile, elements<float>(figures), elements<float>(of_all), stream);
    losses = of_all[1].log() - of_all[2];
  });
  return losses.masked_fill_(targets.eq(head_.ignore_index), 0).sum();
}

Tensor Tiles::composed(Tensor& logits, const Tensor& targets, bool gradients) const {
  // In place where the dtype is wide already.
  Tensor exponents = logits.to(wide_);
  const Tensor largest = exponents.amax(1);
  exponents.sub_(largest.unsqueeze(1));
  const Tensor own = targets - first_class_;
  const Tensor elsewhere = own.lt(0).logical_or_(own.ge(logits.size(1)));
  const Tensor column = own.masked_fill(elsewhere, 0).unsqueeze(1);
  const Tensor of_target = exponents.gather(1, column).squeeze(1).masked_fill(elsewhere, -INFINITY);
  exponents.exp_();
  const Figures of_all = over_ranks(head_, at::stack({largest, exponents.sum(1), of_target}));
  const Tensor ignored = targets.eq(head_.ignore_index);
  if (gradients) {
    exponents.mul_(
        ((largest - of_all[0]).exp_() / of_all[1]).masked_fill_(ignored, 0).unsqueeze(1));
    exponents.scatter_add_(
        1, column, elsewhere.logical_or(ignored).logical_not_().to(wide_).neg_().unsqueeze(1));
    if (!exponents.is_same(logits)) logits.copy_(exponents);
  }
  return (of_all[1].log() - of_all[2]).masked_fill(ignored, 0).sum();
}

void check_targets(const HeadArguments& head) {
  if (!head.targets.is_cpu() || head.targets.numel() == 0) return;
  const auto* const target = elements<int64_t>(head.targets);
  for (int64_t token = 0; token < head.targets.numel(); ++token) {
    const bool is_class = target[token] >= 0 && target[token] < head.classes;
    ZP_CHECK(is_class || target[token] == head.ignore_index, kWho, ": expected targets from 0 to ",
             head.classes - 1, ", or ", head.ignore_index, " for a token without loss, got ",
             target[token], " for token ", token,
             "; look at the targets, or at the tokenizer that they came from");
  }
}

// The tokens that count alone, where that is known without waiting for a device.
HeadArguments without_ignored(const HeadArguments& head, const Tensor& kept) {
  HeadArguments fewer = head;
  fewer.hidden = head.hidden.index_select(0, kept);
  fewer.targets = head.targets.index_select(0, kept);
  return fewer;
}

}  // namespace

HeadResults head_in_tiles(const HeadArguments& head) {
  check_targets(head);
  const auto scalar = [&head](int64_t count) {
    return at::full({}, count, head.hidden.options().dtype(wide_type(head.hidden)));
  };
  if (!head.targets.is_cpu()) {
    HeadResults results = Tiles(head).run();
    results.count = head.targets.is_meta()
                        ? scalar(1)
                        : head.targets.ne(head.ignore_index).sum().to(results.loss.scalar_type());
    return results;
  }
  const Tensor kept = head.targets.ne(head.ignore_index).nonzero().squeeze(1);
  if (kept.numel() == head.targets.numel()) {
    HeadResults results = Tiles(head).run();
    results.count = scalar(kept.numel());
    return results;
  }
  HeadResults results = Tiles(without_ignored(head, kept)).run();
  results.count = scalar(kept.numel());
  if (head.of_hidden) {
    results.of_hidden = at::zeros(head.hidden.sizes(), results.of_hidden.options())
                            .index_copy_(0, kept, results.of_hidden);
  }
  return results;
}

}  // namespace zeropage::fused
