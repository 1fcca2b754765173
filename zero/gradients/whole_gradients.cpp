#include "zero/gradients/whole_gradients.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "memory/check.h"
#include "memory/ledger.h"

namespace zeropage {

WholeGradients::WholeGradients(std::shared_ptr<ParameterPages> pages, const Options& options)
    : pages_(std::move(pages)),
      options_(options),
      pages_of_gradients_(pages_->layouts().size(),
                          {{}, {}, {}, accumulate::MicroStepSums(sum_order_of(options))}),
      slots_(pages_->parameters().size()) {
  for (size_t index = 0; index < slots_.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (!placed.parameter.tensor.requires_grad()) continue;
    const PageLayout& layout = pages_->layouts()[placed.page];
    PageOfGradients& of_page = pages_of_gradients_[placed.page];
    if (!of_page.bucket.defined()) {
      const memory::KindScope kind(memory::Kind::kGradient);
      // Zeros: the gaps between slots are reduced too and must stay zero.
      of_page.bucket = pages_->world()
                           .communicator()
                           .buffer(layout.padded_numel(pages_->world().size()),
                                   accumulate_dtype_of(options_, layout.dtype))
                           .zero_();
      const Range owned = pages_->owned(placed.page);
      of_page.owned = of_page.bucket.narrow(0, owned.begin, owned.numel());
    }
    slots_[index] = slot_in(of_page.bucket, placed);
  }
}

const at::Tensor& WholeGradients::wire(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  const at::ScalarType dtype = reduce_dtype_of(options_, pages_->layouts()[page].dtype);
  if (dtype == of_page.bucket.scalar_type()) return of_page.bucket;
  const memory::KindScope kind(memory::Kind::kBucket);
  of_page.wire = pages_->world().communicator().buffer(of_page.bucket.numel(), dtype);
  of_page.wire.copy_(of_page.bucket);
  return of_page.wire;
}

void WholeGradients::close(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  if (of_page.wire.defined()) {
    const Range own = pages_->owned(page);
    of_page.owned.copy_(of_page.wire.narrow(0, own.begin, own.numel()));
    of_page.wire.reset();
  }
  if (of_page.kept.order() == accumulate::SumOrder::kRunning) complete(page);
}

bool WholeGradients::complete(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  if (of_page.kept.empty()) return false;
  of_page.kept.add_to(of_page.owned);
  return true;
}

void WholeGradients::keep(size_t page, const std::vector<Range>& forgotten) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  {
    const memory::KindScope kind(memory::Kind::kGradient);
    of_page.kept.push(of_page.owned);
  }
  for (const Range& range : forgotten) forget(page, range);
}

void WholeGradients::forget(size_t page) {
  pages_of_gradients_[page].kept.clear();
}

void WholeGradients::skip(size_t page) {
  pages_of_gradients_[page].kept.skip();
}

void WholeGradients::forget(size_t page, const Range& range) {
  const Range owned = pages_->owned(page);
  const Range zeroed = intersection(owned, range);
  if (zeroed.empty()) return;
  pages_of_gradients_[page].kept.zero(zeroed.begin - owned.begin, zeroed.numel());
}

std::string WholeGradients::describe(size_t page) const {
  return "the gradient of page \"" + pages_->layouts()[page].name + "\"";
}

const std::string& WholeGradients::name_of(size_t parameter) const {
  return pages_->parameters()[parameter].parameter.name();
}

// ---- replicated ----

comm::Pending ReplicatedGradients::start_reduction(size_t page) {
  return pages().world().communicator().all_reduce(wire(page), op(), describe(page));
}

void ReplicatedGradients::replace(size_t parameter, const at::Tensor& gradient) {
  reduced_gradient(parameter).copy_(gradient);
}

// ---- owned ----

OwnedGradients::OwnedGradients(std::shared_ptr<ParameterPages> of_pages, const Options& options)
    : WholeGradients(std::move(of_pages), options) {
  // There are no bits on the meta device.
  if (pages().world().communicator().device().is_meta()) return;
  std::vector<std::vector<size_t>> parameters_of_page(pages().layouts().size());
  for (size_t index = 0; index < pages().parameters().size(); ++index) {
    const PlacedParameter& placed = pages().parameters()[index];
    if (placed.parameter.tensor.requires_grad()) parameters_of_page[placed.page].push_back(index);
  }
  for (size_t page = 0; page < parameters_of_page.size(); ++page) {
    if (parameters_of_page[page].empty()) continue;
    samples_.add(open(page, Collect::kLocally), pages(), parameters_of_page[page]);
  }
}

comm::Pending OwnedGradients::start_reduction(size_t page) {
  return pages().world().communicator().reduce_scatter(wire(page), op(), describe(page));
}

void OwnedGradients::replace(size_t parameter, const at::Tensor&) {
  ZP_THROW("parameter \"", name_of(parameter),
           "\": p.grad() was replaced after backward, but this rank holds only its shard of the "
           "mean gradient; change gradients before backward ends (a tensor hook), or use stage 0, "
           "2 or 3");
}

void OwnedGradients::gather(const std::vector<size_t>& parameters, memory::Pins&) {
  // Whole pages are about to change, not only what was asked for.
  take_over_changes(reduced_);
  std::set<size_t> of_pages;
  for (const size_t index : parameters) of_pages.insert(pages().parameters()[index].page);
  std::vector<comm::Pending> in_flight;
  for (const size_t page : of_pages) {
    in_flight.push_back(
        pages().world().communicator().all_gather(open(page, Collect::kLocally), describe(page)));
  }
  for (const comm::Pending& pending : in_flight) pending.wait();
  note_reduced(std::vector<size_t>(reduced_));
}

void OwnedGradients::note_reduced(const std::vector<size_t>& parameters) {
  reduced_ = parameters;
  if (!samples_.empty()) when_reduced_ = samples_.take();
}

// On an accelerator this waits for backward: what the check finds must not reach the optimizer.
void OwnedGradients::take_over_changes(const std::vector<size_t>& parameters) {
  std::vector<size_t> both;
  std::set_intersection(reduced_.begin(), reduced_.end(), parameters.begin(), parameters.end(),
                        std::back_inserter(both));
  if (both.empty() || !when_reduced_.defined()) return;
  for (const size_t index : samples_.differing(when_reduced_, samples_.take())) {
    ZP_CHECK(!std::binary_search(both.begin(), both.end(), index), "parameter \"", name_of(index),
             "\": p.grad() was changed between backward and step (clip_grad_norm_?), but at this "
             "stage it is the mean gradient only in this rank's shard, so every rank would scale "
             "differently; use stage 0, 2 or 3 to change gradients by hand");
  }
}

}  // namespace zeropage
