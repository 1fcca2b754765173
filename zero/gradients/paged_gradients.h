// p.grad() of parameters whose reduced gradient a rank has in part: sharded tensors, which are defined,
// have the parameter's sizes and no memory of their own.
//
// So p.grad() stays the truth about what exists, and zeroing it, by whatever call, works. An operator on
// one gathers its page (paging/pager), so clip_grad_norm_, an optimizer of LibTorch's and a look at a
// norm see the mean gradient, on all ranks alike; what is written goes back to the owners' shards.
//
// Collective: operators on them. Lifetime: when it goes, those that are p.grad() become undefined.
// Threads: as operators; pages are added by the training thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "paging/pager.h"
#include "paging/pins.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage {

class PagedGradients {
 public:
  // What errors of a gather say behind the page's name.
  static constexpr const char* kHint =
      ", which an operator on p.grad() gathers, so all ranks run it alike "
      "(zeropage::GatheredGradients)";

  // source: brings whole gradients, pages in the order in which they are added. check: throws where the
  // page's gradient may not be read.
  PagedGradients(std::shared_ptr<ParameterPages> pages, std::unique_ptr<memory::PageSource> source,
                 std::function<void(size_t page)> check);
  ~PagedGradients();
  PagedGradients(const PagedGradients&) = delete;
  PagedGradients& operator=(const PagedGradients&) = delete;

  // All parameters of the page, frozen ones too. bytes: of the page while it is whole, beside what the
  // source keeps of it anyway. REQUIRES: the source knows the page.
  void add_page(size_t page, int64_t bytes, at::ScalarType dtype);
  bool has(size_t page) const { return pager_index_[page].has_value(); }
  // Shaped as the parameter; undefined if its page was not added.
  const at::Tensor& of(size_t parameter) const { return gradients_[parameter]; }

  // Makes those of the parameters whole for as long as `pins` lives. Collective.
  void gather(const std::vector<size_t>& parameters, memory::Pins& pins) const;
  // What was written to them is where the source keeps it. Throws if one is in use. who: "step()".
  void release(const char* who) const { pager_->release_all(who); }

 private:
  class CheckedSource;

  const std::shared_ptr<ParameterPages> pages_;
  CheckedSource* const source_;  // owned by pager_
  const std::shared_ptr<memory::Pager> pager_;
  std::vector<at::Tensor> gradients_;               // by parameter
  std::vector<std::optional<size_t>> pager_index_;  // by page
};

}  // namespace zeropage
