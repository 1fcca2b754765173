#include "zero/pages/shard_source.h"

#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

namespace zeropage::zero {

namespace {

bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

}  // namespace

ShardSource::ShardSource(comm::World world, std::string what, std::string hint, memory::Kind kind,
                         std::optional<comm::World> secondary)
    : world_(std::move(world)),
      secondary_(std::move(secondary)),
      what_(std::move(what)),
      hint_(std::move(hint)),
      kind_(kind),
      ledger_(memory::Ledger::current()),
      gathers_(device::Stream::another(world_.communicator().device())) {}

ShardSource::~ShardSource() {
  try {
    for (const Entry& entry : entries_) {
      if (entry.away.storage != nullptr) entry.away.page_offload->copies().wait_for_device();
    }
  } catch (const std::exception&) {
    // A device that failed has told whoever computed on it.
  }
}

int64_t ShardSource::add_shard(const comm::World& ranks, const PageLayout& layout, at::Tensor shard,
                               const Away& away, OnWritten on_written) {
  at::Tensor secondary;
  if (secondary_) {
    const memory::KindScope of_kind(kind_);
    const int groups = world_.size() / secondary_->size();
    secondary = at::empty({shard.numel() * groups}, shard.options());
  }
  const auto shard_bytes = static_cast<int64_t>(shard.nbytes());
  entries_.push_back({ranks,
                      what_ + " \"" + layout.name + "\"" + hint_,
                      layout.shard(ranks.rank()),
                      [shard = std::move(shard)] { return shard; },
                      away,
                      std::move(secondary),
                      false,
                      {},
                      std::move(on_written)});
  return bytes_of_last(shard_bytes);
}

int64_t ShardSource::add_shard(const comm::World& ranks, const PageLayout& layout,
                               c10::ScalarType dtype, std::function<at::Tensor()> shard) {
  TORCH_INTERNAL_ASSERT(!secondary_, "a shard that goes has no second one");
  entries_.push_back({ranks,
                      what_ + " \"" + layout.name + "\"" + hint_,
                      layout.shard(ranks.rank()),
                      std::move(shard),
                      {},
                      {},
                      false,
                      {},
                      {}});
  return bytes_of_last(layout.shard_numel * static_cast<int64_t>(c10::elementSize(dtype)));
}

int64_t ShardSource::bytes_of_last(int64_t shard_bytes) const {
  const Entry& entry = entries_.back();
  return entry.is_whole() ? 0 : shard_bytes * entry.ranks.size();
}

void ShardSource::visit_secondary(const VisitMemory& visit) {
  end_pass();
  for (const Entry& entry : entries_) visit(entry.secondary, kind_);
}

paging::Fetch ShardSource::start_fetch(size_t page) {
  if (before_fetch_) before_fetch_();
  Entry& entry = entries_[page];
  const at::Tensor shard = entry.shard();
  if (entry.is_whole()) return {shard, {}};
  wait_for_compute();
  const device::StreamScope on_gathers(gathers_);
  // In the backward of an accelerator the thread is autograd's.
  const memory::LedgerScope ledger(ledger_);
  const bool in_group = entry.has_secondary && is_in_backward();
  comm::Communicator& among = (in_group ? *secondary_ : entry.ranks).communicator();
  at::Tensor whole;  // [world size * shard_numel]
  {
    const memory::KindScope kind(kind_);
    whole = among.buffer(shard.numel() * entry.ranks.size(), shard.scalar_type());
  }
  if (in_group) {
    secondary_of(whole).copy_(entry.secondary);
    return {whole, among.all_gather(whole, entry.what)};
  }
  if (secondary_) entry.whole = whole;
  const memory::Pending own =
      start_own(entry, shard, whole.narrow(0, entry.range.begin, entry.range.numel()));
  if (entry.ranks.size() == 1) return {whole, own};
  own.wait();
  return {whole, among.all_gather(whole, entry.what)};
}

at::Tensor ShardSource::secondary_of(const at::Tensor& whole) const {
  const int64_t numel = whole.numel() / secondary_->size();
  return whole.narrow(0, secondary_->rank() * numel, numel);
}

// Brings this rank's shard into its place in the page.
memory::Pending ShardSource::start_own(const Entry& entry, const at::Tensor& shard,
                                       const at::Tensor& own) {
  if (entry.away.storage == nullptr) {
    at::Tensor(own).copy_(shard);
    return {};
  }
  entry.away.storage->fetch(entry.away.page);
  const memory::Pending up =
      entry.away.page_offload->copies().start(offload::Direction::kToDevice, own, shard);
  // Memory that goes with the release is read until then.
  if (!entry.away.storage->stays() || entry.away.changes_at_any_time) up.synchronize();
  entry.away.storage->release(entry.away.page, TierStorage::Use::kRead);
  return up;
}

void ShardSource::end_use(size_t page) {
  Entry& entry = entries_[page];
  if (entry.is_whole()) return;
  wait_for_compute();
  if (!entry.whole.defined()) return;
  const device::StreamScope on_gathers(gathers_);
  entry.secondary.copy_(secondary_of(entry.whole));
  entry.has_secondary = true;
  entry.whole.reset();
}

void ShardSource::end_pass() {
  for (Entry& entry : entries_) {
    entry.has_secondary = false;
    entry.whole.reset();
  }
}

void ShardSource::wait_for_compute() const {
  gathers_.wait_for(device::Stream::current(world_.communicator().device()));
}

void ShardSource::write_back(size_t page, const at::Tensor& buffer) {
  const Entry& entry = entries_[page];
  if (entry.is_whole()) return;
  const at::Tensor shard = entry.shard();
  if (!shard.defined()) return;
  if (entry.on_written) entry.on_written(buffer);
  if (entry.away.storage != nullptr) {
    entry.away.storage->before_write(entry.away.page);
    entry.away.storage->fetch(entry.away.page);
  }
  shard.copy_(buffer.narrow(0, entry.range.begin, entry.range.numel()));
  if (entry.away.storage != nullptr) {
    entry.away.storage->release(entry.away.page, TierStorage::Use::kWrite);
  }
}

}  // namespace zeropage::zero
