#include "zero/gradients/whole_gradients.h"

#include <utility>

#include "memory/event_sink.h"
#include "memory/ledger.h"
#include "zero/gradients/sum_order.h"

namespace zeropage {

WholeGradients::WholeGradients(std::shared_ptr<ParameterPages> pages, const Options& options)
    : pages_(std::move(pages)),
      pages_of_gradients_(pages_->layouts().size(),
                          {{}, {}, {}, accumulate::MicroStepSums(sum_order_of(options))}),
      slots_(pages_->parameters().size()) {}

void WholeGradients::begin_training(size_t page, const std::vector<size_t>& /*parameters*/) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  if (of_page.bucket.defined()) return;
  const PageLayout& layout = pages_->layouts()[page];
  const comm::World& shards = pages_->shards();
  const memory::KindScope kind(memory::Kind::kGradient);
  const memory::OwnerScope owner("gradient", layout.name);
  // Zeros: the gaps between slots are reduced too and must stay zero.
  of_page.bucket =
      shards.communicator()
          .buffer(layout.padded_numel(shards.size()), pages_->plan()[page].gradient_dtype)
          .zero_();
  const Range owned = pages_->owned(page);
  of_page.owned = of_page.bucket.narrow(0, owned.begin, owned.numel());
  // Also of those that are still frozen.
  for (size_t index = 0; index < slots_.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (placed.page == page) slots_[index] = slot_in(of_page.bucket, placed);
  }
}

const at::Tensor& WholeGradients::wire(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  const at::ScalarType dtype = pages_->plan()[page].reduce_dtype;
  if (dtype == of_page.bucket.scalar_type()) return of_page.bucket;
  const memory::KindScope kind(memory::Kind::kBucket);
  of_page.wire = pages_->shards().communicator().buffer(of_page.bucket.numel(), dtype);
  of_page.wire.copy_(of_page.bucket);
  return of_page.wire;
}

void WholeGradients::close(size_t page, Backwards /*backwards*/) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  if (of_page.wire.defined()) {
    const Range own = pages_->owned(page);
    of_page.owned.copy_(of_page.wire.narrow(0, own.begin, own.numel()));
    of_page.wire.reset();
  }
  if (of_page.kept.order() == accumulate::SumOrder::kRunning) WholeGradients::complete(page);
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

comm::Pending ReplicatedGradients::start_reduction(size_t page, comm::ReduceOp op) {
  return pages().world().communicator().all_reduce(wire(page), op, describe(page));
}

void ReplicatedGradients::replace(size_t parameter, const at::Tensor& gradient) {
  reduced_gradient(parameter).copy_(gradient);
}

}  // namespace zeropage
