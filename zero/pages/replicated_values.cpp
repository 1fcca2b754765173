#include "zero/pages/replicated_values.h"

#include <array>
#include <utility>
#include <vector>

#include "optim/bit_hashes.h"
#include "zero/pages/value_hash.h"
#include "zero/plan/byte_plan.h"

namespace zeropage::zero {
namespace {

// What is added in the same order has the same hash.
void add_part(uint64_t& hash, size_t parameter, uint64_t of_values) {
  const std::array<uint64_t, 3> parts = {hash, parameter, of_values};
  hash = hash_of_bytes(parts.data(), sizeof(parts));
}

}  // namespace

// Who else has the same values of a parameter.
struct ReplicatedValues::Sharers {
  bool data = false;
  bool experts = false;
  bool replicas = false;
  bool tensor = false;
  bool tied = false;

  bool any() const { return data || experts || replicas || tensor || tied; }
};

std::string quoted(const NamedParameter& parameter) {
  const std::string name = "parameter \"" + parameter.name() + "\"";
  return parameter.slice ? c10::str("slice ", parameter.slice->ranks.rank(), " of ", name) : name;
}

at::Tensor values_here(const ParameterPages& pages, const PageMemory& memory, size_t parameter) {
  const PlacedParameter& placed = pages.parameters()[parameter];
  if (placed.range.empty()) return {};
  if (!pages.is_sharded(placed.page)) {
    return memory.whole(placed.page).narrow(0, placed.range.begin, placed.range.numel());
  }
  const bool has_memory =
      !pages.offloads_parameters(placed.page) || pages.page_offload()->parameters().stays();
  const Range owned = pages.owned(placed.page);
  const Range range = intersection(owned, placed.range);
  if (range.empty() || !has_memory) return {};
  return memory.owned(placed.page).narrow(0, range.begin - owned.begin, range.numel());
}

bool ReplicatedValues::have_shards_alike() const {
  return pages_->worlds().replicas && shards_parameters(pages_->options());
}

ReplicatedValues::Sharers ReplicatedValues::sharers(size_t parameter) const {
  const PlacedParameter& placed = pages_->parameters()[parameter];
  const NamedParameter& named = placed.parameter;
  const bool is_whole = !pages_->is_sharded(placed.page);
  const bool has_others = pages_->world(placed.page).size() > 1;
  return {.data = is_whole && has_others && !named.is_of_experts(),
          .experts = is_whole && has_others && named.is_of_experts(),
          .replicas = !is_whole && pages_->worlds().replicas,
          .tensor = pages_->tensor_world() != nullptr && !named.slice,
          .tied = named.is_tied};
}

ReplicatedValues::Hashes ReplicatedValues::hashes() const {
  std::vector<size_t> parameters;
  std::vector<at::Tensor> flat;
  for (size_t index = 0; index < pages_->parameters().size(); ++index) {
    if (!sharers(index).any()) continue;
    const at::Tensor values = values_here(*pages_, *memory_, index);
    if (!values.defined()) continue;
    parameters.push_back(index);
    flat.push_back(values);
  }
  const std::vector<uint64_t> of_values = optim::bit_hashes(flat);
  Hashes hashes;
  for (size_t i = 0; i < of_values.size(); ++i) {
    const size_t index = parameters[i];
    const Sharers of = sharers(index);
    if (of.data) add_part(hashes.data, index, of_values[i]);
    if (of.experts) add_part(hashes.experts, index, of_values[i]);
    if (of.replicas) add_part(hashes.replicas, index, of_values[i]);
    if (of.tensor) add_part(hashes.tensor, index, of_values[i]);
    // The stages have it at another index, and may have several in another order.
    if (of.tied) hashes.tied += of_values[i];
  }
  return hashes;
}

std::string ReplicatedValues::words(size_t parameter) const {
  const PlacedParameter& placed = pages_->parameters()[parameter];
  const std::string name = quoted(placed.parameter);
  if (!pages_->is_sharded(placed.page)) return name;
  return c10::str("shard ", pages_->shards(placed.page).rank(), " of ", name);
}

void ReplicatedValues::describe(const TellValues& tell) const {
  for (size_t index = 0; index < pages_->parameters().size(); ++index) {
    if (!sharers(index).any()) continue;
    const at::Tensor values = values_here(*pages_, *memory_, index);
    if (values.defined()) tell("values of " + words(index), words_of_values(values));
  }
}

}  // namespace zeropage::zero
