// The memory that this rank has of its parameters' pages: all of a whole page, and of a sharded one its
// shard, on the device or in a tier.
//
// Pages are made while they are filled (zero/pages/page_filler.h), so that wrapping holds a module and
// little more. What is in a tier is made at once: a file has its size before the first use of what is in it.
//
// Lifetime: a whole page's buffer lives as long as this object or any parameter in it.
// Threads: the training thread.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "device/stream.h"
#include "zero/pages/memory_holders.h"
#include "zero/pages/parameter_pages.h"
#include "zeropage/check.h"
#include "zeropage/communicator.h"

namespace zeropage::zero {

class PageMemory {
 public:
  explicit PageMemory(std::shared_ptr<const ParameterPages> pages);

  bool has(size_t page) const { return memory_[page].owned.defined(); }
  void make(size_t page);

  // [padded_numel]; undefined for a sharded page.
  const at::Tensor& whole(size_t page) const { return memory_[page].whole; }
  // What this rank owns of the page, in whole() or on its own: [owned numel].
  const at::Tensor& owned(size_t page) const { return memory_[page].owned; }

  // Sends what this rank updated of a whole page to the others, in place. Nothing to do where each
  // rank updates whole pages, nor for a sharded page, which is gathered when it is used. Collective.
  comm::Pending start_gather(size_t page) const;
  // Every rank takes over the others' shards of a whole page, whoever updates them. Collective.
  comm::Pending start_gather_shards(size_t page) const;

  // Throws if the calling thread's current stream is another than where the pages were made: pages
  // come and go in that one's order. who: "forward()".
  void check_stream(const char* who) const;

  // The device's part of it.
  void visit(const VisitMemory& visit) const;
  // While the model is parked (zero/setup/parking.h) its memory is elsewhere, and stays there if the model is destroyed. why: what the
  // errors say; "": it is back.
  void set_away(std::string why) { away_ = std::move(why); }
  // Throws if it is away. who: "step()".
  void check_not_parked(const char* who) const { ZP_CHECK(away_.empty(), who, ": ", away_); }

 private:
  struct OfPage {
    at::Tensor whole;  // [padded_numel]; undefined for a sharded page
    at::Tensor owned;  // [owned numel], in `whole` or on its own
  };

  at::Tensor make_shard(size_t page) const;
  comm::Pending start_all_gather(size_t page) const;

  const std::shared_ptr<const ParameterPages> pages_;
  const device::Stream compute_;
  std::vector<OfPage> memory_;  // by page
  std::string away_;            // why; "": it is here
};

}  // namespace zeropage::zero
