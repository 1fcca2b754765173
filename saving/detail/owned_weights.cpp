#include "saving/detail/owned_weights.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "optim/split_values.h"
#include "saving/detail/element_runs.h"
#include "zeropage/ledger.h"

namespace zeropage::saving {
namespace {

// Most elements that are converted, or copied to a device, at once.
constexpr int64_t kMostElementsAtOnce = 1 << 18;

}  // namespace

void read_as(at::ScalarType dtype, int64_t first, const at::Tensor& to, const ReadElements& read) {
  if (to.is_cpu() && to.scalar_type() == dtype) {
    read(first, to);
    return;
  }
  const memory::KindScope kind(memory::Kind::kStaging);
  for (int64_t at = 0; at < to.numel(); at += kMostElementsAtOnce) {
    const int64_t numel = std::min(kMostElementsAtOnce, to.numel() - at);
    const at::Tensor piece = at::empty({numel}, dtype);
    read(first + at, piece);
    to.narrow(0, at, numel).copy_(piece);
  }
}

void fill_owned(const zero::ParameterPages& pages, const zero::PlacedParameter& placed,
                const zero::MasterWeights::Owned& owned, const StoredValues& stored) {
  const Range own = pages.owned(placed.page);
  const auto part = [&](const at::Tensor& of_owned, const ElementRun& run) {
    return of_owned.narrow(0, run.in_page - own.begin, run.numel);
  };
  if (owned.remainders.defined()) {
    for_each_run(placed, own, [&](const ElementRun& run) {
      const at::Tensor wide = at::empty({run.numel}, at::kFloat);
      stored.exact(run.in_whole, wide);
      const optim::SplitValues split = optim::split_values(wide.to(owned.values.device()));
      part(owned.values, run).copy_(split.high);
      part(owned.remainders, run).copy_(split.low);
    });
    return;
  }
  const ReadElements& values =
      stored.dtype == owned.values.scalar_type() ? stored.rounded : stored.exact;
  // Where every rank has all of it, others read the rest.
  const Range shard = pages.layouts()[placed.page].shard(pages.shards(placed.page).rank());
  for_each_run(placed, intersection(own, shard),
               [&](const ElementRun& run) { values(run.in_whole, part(owned.values, run)); });
  if (!owned.copy.defined()) return;
  for_each_run(placed, own,
               [&](const ElementRun& run) { stored.exact(run.in_whole, part(owned.copy, run)); });
}

}  // namespace zeropage::saving
