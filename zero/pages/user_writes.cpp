#include "zero/pages/user_writes.h"

#include <array>
#include <utility>

#include <ATen/ATen.h>

#include "optim/bit_hashes.h"
#include "zero/pages/value_hash.h"

namespace zeropage::zero {
namespace {

uint64_t chained(uint64_t hash, uint64_t part) {
  const std::array<uint64_t, 2> both = {hash, part};
  return hash_of_bytes(both.data(), sizeof(both));
}

// What is added in the same order has the same hashes.
void add(UserWrites::Hashes& hashes, const NamedParameter& parameter, uint64_t part) {
  if (parameter.is_of_experts()) {
    hashes.of_experts = chained(hashes.of_experts, part);
    return;
  }
  hashes.all = chained(hashes.all, part);
  if (!parameter.slice) hashes.whole = chained(hashes.whole, part);
}

}  // namespace

UserWrites::UserWrites(std::shared_ptr<const ParameterPages> pages,
                       std::shared_ptr<const PageMemory> memory)
    : pages_(std::move(pages)),
      memory_(std::move(memory)),
      own_raises_(pages_->parameters().size()),
      agreed_raises_(pages_->parameters().size()) {
  see_all();
  agreed_raises_ = seen_raises_;
}

int64_t UserWrites::raises(size_t parameter) const {
  const auto version = pages_->parameters().impl(parameter).version_counter().current_version();
  return static_cast<int64_t>(version) - own_raises_[parameter];
}

void UserWrites::see_all() {
  seen_raises_.resize(agreed_raises_.size());
  for (size_t index = 0; index < seen_raises_.size(); ++index) seen_raises_[index] = raises(index);
}

// Sharded pages are not whole here.
bool UserWrites::is_compared(size_t parameter) const {
  const PlacedParameter& placed = pages_->parameters()[parameter];
  return !pages_->is_sharded(placed.page) && !placed.range.empty();
}

// A shard of a sharded page, which the ranks of a tensor-parallel group have alike. Undefined where it is none, or not on the
// host.
at::Tensor UserWrites::sampled_shard(size_t parameter) const {
  const PlacedParameter& placed = pages_->parameters()[parameter];
  if (pages_->tensor_world() == nullptr || placed.parameter.slice) return {};
  if (!pages_->is_sharded(placed.page) || pages_->offloads_parameters(placed.page)) return {};
  const at::Tensor shard = values_here(*pages_, *memory_, parameter);
  return shard.defined() && shard.is_cpu() ? shard : at::Tensor();
}

void UserWrites::note_written_back(size_t page, const at::Tensor& whole) {
  std::vector<at::Tensor> flat;
  const std::vector<Slot>& slots = pages_->layouts()[page].slots;
  for (const Slot& slot : slots) {
    flat.push_back(whole.narrow(0, slot.range.begin, slot.range.numel()));
  }
  const std::vector<uint64_t> hashes = optim::bit_hashes(flat);
  for (size_t i = 0; i < slots.size(); ++i) {
    uint64_t& hash = written_back_[pages_->storages()[slots[i].storage].parameters.front()];
    hash = chained(hash, hashes[i]);
  }
}

uint64_t UserWrites::sample(size_t parameter, uint64_t round) const {
  const at::Tensor flat = values_here(*pages_, *memory_, parameter);
  return sampled_hash(flat.const_data_ptr(), flat.nbytes(), round);
}

UserWrites::Hashes UserWrites::look(std::optional<uint64_t> sample_round) {
  see_all();
  for (const auto& [parameter, hash] : std::exchange(written_back_, {})) {
    uint64_t& seen = seen_back_[parameter];
    seen = chained(seen, hash);
  }
  std::vector<size_t> written;
  std::vector<at::Tensor> flat;
  Hashes hashes;
  for (size_t index = 0; index < seen_raises_.size(); ++index) {
    if (!is_compared(index)) continue;
    const NamedParameter& parameter = pages_->parameters()[index].parameter;
    if (seen_raises_[index] != agreed_raises_[index]) {
      written.push_back(index);
      flat.push_back(values_here(*pages_, *memory_, index));
    }
    const bool is_on_host = memory_->whole(pages_->parameters()[index].page).is_cpu();
    if (sample_round && is_on_host) add(hashes, parameter, sample(index, *sample_round));
  }
  const std::vector<uint64_t> of_written = optim::bit_hashes(flat);
  for (size_t i = 0; i < written.size(); ++i) {
    const NamedParameter& parameter = pages_->parameters()[written[i]].parameter;
    add(hashes, parameter, written[i]);
    add(hashes, parameter, of_written[i]);
  }
  // Ranks of `data` have other shards, so these are compared along `tensor` alone.
  for (size_t index = 0; sample_round && index < seen_raises_.size(); ++index) {
    const at::Tensor shard = sampled_shard(index);
    if (!shard.defined()) continue;
    hashes.whole =
        chained(hashes.whole, sampled_hash(shard.const_data_ptr(), shard.nbytes(), *sample_round));
  }
  for (const auto& [index, hash] : seen_back_) {
    const NamedParameter& parameter = pages_->parameters()[index].parameter;
    add(hashes, parameter, index);
    add(hashes, parameter, hash);
  }
  return hashes;
}

bool UserWrites::has_news() const {
  if (!written_back_.empty()) return true;
  for (size_t index = 0; index < agreed_raises_.size(); ++index) {
    if (is_compared(index) && raises(index) != agreed_raises_[index]) return true;
  }
  return false;
}

void UserWrites::forget() {
  agreed_raises_ = seen_raises_;
  seen_back_.clear();
}

void UserWrites::describe(const TellValues& tell) const {
  // Ranks that wrote nothing say so: they have the parameter too.
  for (const auto& storage : pages_->storages()) {
    const PlacedParameter& placed = pages_->parameters()[storage.parameters.front()];
    if (!pages_->is_sharded(placed.page)) continue;
    const auto seen = seen_back_.find(storage.parameters.front());
    tell("what was written to " + quoted(placed.parameter),
         seen == seen_back_.end() ? "nothing" : c10::str("hash ", seen->second));
  }
}

}  // namespace zeropage::zero
