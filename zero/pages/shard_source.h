// Brings pages by gathering the shards of all ranks, and takes back what was written to them.
//
// On one rank a page is its shard: nothing is copied, and a page costs no bytes, unless shards are
// offloaded; then they are copied up first.
//
// Ranks of a group may share a second copy of each page, a secondary shard each. What a forward gathered over
// all ranks leaves this rank's there when it goes, and backward gathers the page within the group. The end of
// a pass ends that, because shards are about to change. That a gather is of a backward is the same on all
// ranks, so they agree on who gathers.
//
// On an accelerator gathers have a stream of their own, and whole pages have their memory from it. That
// stream waits for what compute has been given so far, when a page is let go, whose memory the next
// one may get at once, and when one is fetched, whose shard may just have been written. With two
// pages at a time this costs nothing: the page that is gathered takes the place of the one that
// compute has just left.
//
// Lifetime: owned by a pager. Collective: start_fetch.
// Threads: under the pager's mutex; add_shard before the first fetch of that page. Streams: pages are
// used on the stream that was current when they were fetched.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/stream.h"
#include "paging/pager.h"
#include "zero/layout/shard_layout.h"
#include "zero/pages/memory_holders.h"
#include "zero/tiers/page_offload.h"
#include "zeropage/ledger.h"
#include "zeropage/world.h"

namespace zeropage::zero {

class ShardSource final : public paging::PageSource {
 public:
  // what: "the gradient of page", for errors. hint: behind the page's name there, what a user does who
  // did not mean to gather. kind: of the whole pages. secondary: the ranks of this one's group, if they share a
  // second copy; a whole number of such groups are the world, in the order of its ranks.
  ShardSource(comm::World world, std::string what, std::string hint, memory::Kind kind,
              std::optional<comm::World> secondary = std::nullopt);
  // Waits for copies that read shards on the host.
  ~ShardSource() override;

  // Where a shard lives that is not on the device.
  struct Away {
    TierStorage* storage = nullptr;  // of page_offload; null: it is on the device
    size_t page = 0;                 // there
    std::shared_ptr<PageOffload> page_offload;
    // Code that changes it on the host does not check what the device still reads, as optimizers do
    // (zero/update/offloaded_steps.h): the host waits for each copy up.
    bool changes_at_any_time = false;
  };
  // Called with a whole page that was written to, before it is written back to its shards.
  using OnWritten = std::function<void(const at::Tensor& whole)>;
  // ranks: that have the page's shards. shard: [shard_numel], this rank's, of the page that the pager gets next. Returns what the page
  // costs while it is whole, in bytes.
  int64_t add_shard(const comm::World& ranks, const PageLayout& layout, at::Tensor shard,
                    const Away& away, OnWritten on_written = nullptr);
  // The same of a shard on the device that comes and goes. shard: undefined while it is not there; then nobody
  // fetches the page, and what was written to it is dropped.
  int64_t add_shard(const comm::World& ranks, const PageLayout& layout, c10::ScalarType dtype,
                    std::function<at::Tensor()> shard);

  // Called before each fetch, which does not take place where it throws.
  void set_before_fetch(std::function<void()> call) { before_fetch_ = std::move(call); }
  // Its memory from step to step: secondary shards, whose values are forgotten.
  void visit_secondary(const VisitMemory& visit);

  paging::Fetch start_fetch(size_t page) override;
  void write_back(size_t page, const at::Tensor& buffer) override;
  void end_use(size_t page) override;
  void end_pass() override;

 private:
  struct Entry {
    comm::World ranks;
    std::string what;
    Range range;                        // of the shard in the page
    std::function<at::Tensor()> shard;  // [shard_numel]
    Away away;
    at::Tensor secondary;  // [page's numel / ranks of the group]; undefined where there is no group
    bool has_secondary = false;  // of the shards as they are
    at::Tensor whole;            // while it is whole, of which the secondary shard is to be taken
    OnWritten on_written;

    bool is_whole() const { return ranks.size() == 1 && away.storage == nullptr; }
  };

  void wait_for_compute() const;
  // The part of a whole page that this rank has as secondary shard.
  at::Tensor secondary_of(const at::Tensor& whole) const;
  static memory::Pending start_own(const Entry& entry, const at::Tensor& shard,
                                   const at::Tensor& own);
  int64_t bytes_of_last(int64_t shard_bytes) const;

  const comm::World world_;
  const std::optional<comm::World> secondary_;
  const std::string what_;
  const std::string hint_;
  const memory::Kind kind_;
  const std::shared_ptr<memory::Ledger> ledger_;  // of the rank
  const device::Stream gathers_;
  std::function<void()> before_fetch_;  // empty: nobody
  std::vector<Entry> entries_;
};

}  // namespace zeropage::zero
