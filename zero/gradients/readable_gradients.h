// p.grad() of parameters whose reduced gradient a rank has in part: sharded tensors, which are defined,
// have the parameter's sizes and no memory of their own.
//
// So p.grad() stays the truth about what exists, and zeroing it, by whatever call, works. An operator on
// one gathers its page (paging/pager), so clip_grad_norm_, an optimizer of LibTorch's and a look at a
// norm see the mean gradient, on all ranks alike; what is written goes back to the owners' shards.
//
// All that p.grad() ever is of a parameter shares one storage, by which the pager knows it. Each backward makes other
// tensors over it, which keep what that backward's gradient lies in.
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
#include "zero/gradients/gradient_buckets.h"
#include "zero/gradients/gradient_memory.h"
#include "zero/pages/parameter_pages.h"

namespace zeropage::zero {

class ReadableGradients final : public ReducedGradients {
 public:
  // What errors of a gather say behind the page's name.
  static constexpr const char* kHint =
      ", which an operator on p.grad() gathers, so all ranks run it alike "
      "(zeropage::GatheredGradients)";

  // Where the gradient of a page that was added is.
  class Memory {
   public:
    virtual ~Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    // Null where it stays whether or not there is a p.grad().
    virtual GradientMemory* memory(size_t page) = 0;
    // Gives it memory, of zeros. REQUIRES: it has none.
    virtual void renew(size_t page) = 0;
    // Throws where it may not be read.
    virtual void check_readable(size_t page) const = 0;

   protected:
    Memory() = default;
  };

  // source: brings whole gradients, pages in the order in which they are added. memory: outlives it.
  ReadableGradients(std::shared_ptr<ParameterPages> pages,
                    std::unique_ptr<paging::PageSource> source, Memory& memory);
  ~ReadableGradients() override;

  // All parameters of the page, frozen ones too. bytes: of the page while it is whole, beside what the
  // source keeps of it anyway. REQUIRES: the source knows the page.
  void add_page(size_t page, int64_t bytes, at::ScalarType dtype);
  bool has(size_t page) const { return pager_index_[page].has_value(); }

  bool is(size_t parameter, const at::Tensor& gradient) const override;
  at::Tensor of(size_t parameter) override;
  at::Tensor replaced(size_t parameter, const at::Tensor& gradient) override;
  void set_before_use(BeforeUse call) override { before_use_ = std::move(call); }
  void set_on_use(BeforeUse call) override { on_use_ = std::move(call); }
  void gather(const std::vector<size_t>& parameters, paging::Pins& pins) override;
  void release(const char* who) override { pager_->release_all(who); }
  void release_zeroed(size_t page) override;

 private:
  class CheckedSource;

  const std::shared_ptr<ParameterPages> pages_;
  Memory& memory_;
  CheckedSource* const source_;  // owned by pager_
  BeforeUse before_use_;
  BeforeUse on_use_;
  const std::shared_ptr<paging::Pager> pager_;
  std::vector<at::Tensor> gradients_;               // by parameter; keep nothing
  std::vector<std::optional<size_t>> pager_index_;  // by page
};

}  // namespace zeropage::zero
