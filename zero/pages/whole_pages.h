// The sharded pages of a rank's parameters: their parameters have no memory until an operator on one
// gathers the page (paging/pager, paging/trap), and none after that.
//
// Lifetime: parameters of sharded pages have no values once this object is gone.
// Collective: what makes a page whole. Threads: the training thread, or the one that runs backward.
#pragma once

#include <memory>
#include <vector>

#include "paging/pager.h"
#include "paging/pins.h"
#include "zero/pages/page_memory.h"
#include "zero/pages/parameter_pages.h"
#include "zero/pages/shard_source.h"
#include "zero/pages/user_writes.h"
#include "zeropage/communicator.h"

namespace zeropage::zero {

class WholePages {
 public:
  // Takes over the sharded pages, which have their values already.
  WholePages(std::shared_ptr<const ParameterPages> pages, std::shared_ptr<const PageMemory> memory,
             std::shared_ptr<UserWrites> user_writes, const paging::PagerOptions& options);

  // Null where pages are not sharded.
  const std::shared_ptr<paging::Pager>& pager() const { return pager_; }

  // Adds the parameter's page, if it is sharded.
  void add_to(paging::Pins& pins, size_t parameter, bool writes) const;
  // Every rank takes the values that `root` has in the page, which is whole or pinned. Collective.
  comm::Pending start_broadcast(size_t page, int root) const;

  // What was written to the page, if it is sharded, is in this rank's shard too. It stays resident where
  // it is.
  void write_back(size_t page) const;
  // The same for all sharded pages, of which none is resident from here on. Throws if one is in use.
  // who: "step()".
  void release_all(const char* who) const;
  // What this rank has of them beside its shards, whose values are forgotten. REQUIRES: release_all().
  void visit(const VisitMemory& visit) const {
    if (source_ != nullptr) source_->visit_secondary(visit);
  }
  // PageMemory::check_not_parked().
  void check_not_parked(const char* who) const { memory_->check_not_parked(who); }

  // Gives back what need not stay between backward and step.
  void end_backward() const;
  // A step has ended, and with it a pass over the pages.
  void end_step() const;

 private:
  void hand_over(size_t page, ShardSource& source, const std::shared_ptr<UserWrites>& user_writes);

  const std::shared_ptr<const ParameterPages> pages_;
  const std::shared_ptr<const PageMemory> memory_;
  ShardSource* source_ = nullptr;  // owned by pager_
  std::shared_ptr<paging::Pager> pager_;
  std::vector<size_t> pager_index_;  // by page
};

}  // namespace zeropage::zero
