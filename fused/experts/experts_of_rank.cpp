#include "fused/experts/experts_of_rank.h"

#include <vector>

#include <ATen/ATen.h>

#include "zeropage/fused.h"

namespace zeropage::fused {
namespace {

using at::Tensor;

std::vector<int64_t> numbers_of(const Tensor& on_host) {
  const auto* const first = on_host.const_data_ptr<int64_t>();
  return {first, first + on_host.numel()};
}

// The load where experts get as many rows, and the first ones what is left.
Tensor even_load(int64_t rows, int64_t experts) {
  Tensor load = at::full({experts}, rows / experts, at::kLong);
  load.narrow(0, 0, rows % experts).add_(1);
  return load;
}

}  // namespace

Tensor by_experts(const ExpertMatrices& matrices, const Tensor& rows, const ExpertRows& of) {
  const auto linear = [&of](const Tensor& from, const Tensor& weight) {
    return expert_linear(from, weight.to(from.scalar_type()), of);
  };
  const Tensor up = linear(rows, matrices.up);
  return linear(matrices.gate.defined() ? swiglu(linear(rows, matrices.gate), up) : at::gelu(up),
                matrices.down);
}

ArrivingRows arriving_rows(const Tensor& load, int64_t most, const parallel::RanksPointer& ranks,
                           const std::string& name) {
  const int64_t count = ranks->world.size();
  const int64_t experts = load.numel() / count;
  ArrivingRows arriving;
  Tensor own, theirs;  // [ranks, experts / ranks], on the host
  if (load.is_meta()) {
    parallel::experts::exchange_loads(load, ranks, name);
    own = even_load(most, load.numel()).view({count, experts});
    theirs = own[ranks->world.rank()].expand({count, experts}).contiguous();
  } else {
    theirs = parallel::experts::exchange_loads(load, ranks, name);
    own = load.cpu().view({count, experts});
  }
  arriving.numbers = {.given = numbers_of(own.sum(1)), .received = numbers_of(theirs.sum(1))};
  arriving.sent = own.sum().item<int64_t>();
  const Tensor expert_of_row =
      at::arange(experts, at::kLong).repeat({count}).repeat_interleave(theirs.view(-1));
  arriving.order = sorted_by(expert_of_row.to(load.device()), /*active=*/1);
  arriving.rows = {.ends = theirs.sum(0).cumsum(0).to(load.device(), at::kInt), .all = true};
  return arriving;
}

}  // namespace zeropage::fused
