#include "zero/shard_source.h"

#include <utility>

#include <ATen/ATen.h>

namespace zeropage {

ShardSource::ShardSource(comm::World world, std::string what, memory::Kind kind)
    : world_(std::move(world)),
      what_(std::move(what)),
      kind_(kind),
      ledger_(memory::Ledger::current()),
      gathers_(memory::Stream::another(world_.communicator().device())) {}

int64_t ShardSource::add_shard(const PageLayout& layout, at::Tensor shard) {
  entries_.push_back(
      {what_ + " \"" + layout.name + "\"", layout.shard(world_.rank()), std::move(shard)});
  const auto shard_bytes = static_cast<int64_t>(entries_.back().shard.nbytes());
  return world_.size() == 1 ? 0 : shard_bytes * world_.size();
}

memory::Fetch ShardSource::start_fetch(size_t page) {
  const Entry& entry = entries_[page];
  if (world_.size() == 1) return {entry.shard, {}};
  wait_for_compute();
  const memory::StreamScope on_gathers(gathers_);
  // In the backward of an accelerator the thread is autograd's.
  const memory::LedgerScope ledger(ledger_);
  at::Tensor whole;  // [world size * shard_numel]
  {
    const memory::KindScope kind(kind_);
    whole = world_.communicator().buffer(entry.shard.numel() * world_.size(),
                                         entry.shard.scalar_type());
  }
  whole.narrow(0, entry.range.begin, entry.range.numel()).copy_(entry.shard);
  return {whole, world_.communicator().all_gather(whole, entry.what)};
}

void ShardSource::end_use(size_t) {
  if (world_.size() > 1) wait_for_compute();
}

void ShardSource::wait_for_compute() const {
  gathers_.wait_for(memory::Stream::current(world_.communicator().device()));
}

void ShardSource::write_back(size_t page, const at::Tensor& buffer) {
  if (world_.size() == 1) return;
  const Entry& entry = entries_[page];
  entry.shard.copy_(buffer.narrow(0, entry.range.begin, entry.range.numel()));
}

}  // namespace zeropage
