#include "zero/whole_gradients.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "memory/check.h"
#include "memory/ledger.h"

namespace zeropage {
namespace {

// Enough that a change of all elements does not hide behind a few zeros.
constexpr int64_t kSampledElements = 16;

}  // namespace

WholeGradients::WholeGradients(std::shared_ptr<ParameterPages> pages)
    : pages_(std::move(pages)),
      pages_of_gradients_(pages_->layouts().size()),
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
                           .buffer(layout.padded_numel(pages_->world().size()), layout.dtype)
                           .zero_();
      const Range owned = pages_->owned(placed.page);
      of_page.owned = of_page.bucket.narrow(0, owned.begin, owned.numel());
    }
    slots_[index] = slot_in(of_page.bucket, placed);
  }
}

void WholeGradients::close(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  if (of_page.kept.defined()) of_page.owned.add_(of_page.kept);
  of_page.kept.reset();
}

void WholeGradients::keep(size_t page, const std::vector<Range>& forgotten) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  {
    const memory::KindScope kind(memory::Kind::kGradient);
    of_page.kept = of_page.owned.clone();
  }
  for (const Range& range : forgotten) forget(page, range);
}

void WholeGradients::forget(size_t page) {
  pages_of_gradients_[page].kept.reset();
}

void WholeGradients::forget(size_t page, const Range& range) {
  const Range owned = pages_->owned(page);
  const Range zeroed = intersection(owned, range);
  if (zeroed.empty()) return;
  pages_of_gradients_[page].kept.narrow(0, zeroed.begin - owned.begin, zeroed.numel()).zero_();
}

std::string WholeGradients::describe(size_t page) const {
  return "the gradient of page \"" + pages_->layouts()[page].name + "\"";
}

const std::string& WholeGradients::name_of(size_t parameter) const {
  return pages_->parameters()[parameter].parameter.name();
}

// ---- replicated ----

comm::Pending ReplicatedGradients::start_reduction(size_t page) {
  return pages().world().communicator().all_reduce(open(page), comm::ReduceOp::kMean,
                                                   describe(page));
}

void ReplicatedGradients::replace(size_t parameter, const at::Tensor& gradient) {
  reduced_gradient(parameter).copy_(gradient);
}

// ---- owned ----

OwnedGradients::OwnedGradients(std::shared_ptr<ParameterPages> pages)
    : WholeGradients(std::move(pages)), sample_when_reduced_(this->pages().parameters().size()) {}

comm::Pending OwnedGradients::start_reduction(size_t page) {
  return pages().world().communicator().reduce_scatter(open(page), comm::ReduceOp::kMean,
                                                       describe(page));
}

void OwnedGradients::replace(size_t parameter, const at::Tensor&) {
  ZP_THROW("parameter \"", name_of(parameter),
           "\": p.grad() was replaced after backward, but this rank holds only its shard of the "
           "mean gradient; change gradients before backward ends (a tensor hook), or use stage 0, "
           "2 or 3");
}

void OwnedGradients::gather(const std::vector<size_t>& parameters, memory::Pins&) {
  std::set<size_t> of_pages;
  for (const size_t index : parameters) of_pages.insert(pages().parameters()[index].page);
  std::vector<comm::Pending> in_flight;
  for (const size_t page : of_pages) {
    in_flight.push_back(pages().world().communicator().all_gather(open(page), describe(page)));
  }
  for (const comm::Pending& pending : in_flight) pending.wait();
  // The whole page has changed, not only what was asked for.
  for (size_t index = 0; index < sample_when_reduced_.size(); ++index) {
    if (of_pages.contains(pages().parameters()[index].page)) {
      sample_when_reduced_[index] = sample_of(index);
    }
  }
}

// A few elements of the slot. Version counters would not do: clip_grad_norm_ changes gradients
// behind .data().
uint64_t OwnedGradients::sample_of(size_t parameter) const {
  const PlacedParameter& placed = pages().parameters()[parameter];
  const at::Tensor& slot = reduced_gradient(parameter);
  if (slot.is_meta()) return 0;  // has no bits
  const auto element_bytes = static_cast<int64_t>(slot.element_size());
  const auto* page = static_cast<const char*>(slot.storage().data());
  const int64_t stride = std::max<int64_t>(1, placed.range.numel() / kSampledElements);
  uint64_t hash = 0;
  for (int64_t at = placed.range.begin; at < placed.range.end; at += stride) {
    uint64_t bits = 0;
    std::memcpy(&bits, page + at * element_bytes, static_cast<size_t>(element_bytes));
    hash = (hash ^ bits) * 0x9E3779B97F4A7C15ULL;
  }
  return hash;
}

void OwnedGradients::note_reduced(const std::vector<size_t>& parameters) {
  for (const size_t index : parameters) sample_when_reduced_[index] = sample_of(index);
}

void OwnedGradients::take_over_changes(const std::vector<size_t>& parameters) {
  for (const size_t index : parameters) {
    ZP_CHECK(sample_of(index) == sample_when_reduced_[index], "parameter \"", name_of(index),
             "\": p.grad() was changed between backward and step (clip_grad_norm_?), but at this "
             "stage it is the mean gradient only in this rank's shard, so every rank would scale "
             "differently; use stage 0, 2 or 3 to change gradients by hand");
  }
}

}  // namespace zeropage
