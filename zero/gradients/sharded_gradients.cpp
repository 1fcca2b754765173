#include "zero/gradients/sharded_gradients.h"

#include <algorithm>
#include <utility>

#include "memory/ledger.h"
#include "memory/storage.h"
#include "paging/trap.h"
#include "zero/tiers/page_offload.h"

namespace zeropage {
namespace {

// Of the parameter's sizes, on a storage of its own that has no memory.
at::Tensor make_sharded_like(const PlacedParameter& placed, at::ScalarType dtype) {
  const at::Tensor& parameter = placed.parameter.tensor;
  const auto bytes = placed.range.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor sharded =
      memory::tensor_in(memory::storage_without_memory(bytes, parameter.device()), parameter,
                        placed.offset - placed.range.begin, dtype);
  memory::set_trap(sharded);
  return sharded;
}

}  // namespace

ShardedGradients::ShardedGradients(std::shared_ptr<ParameterPages> pages, const Options& options)
    : pages_(std::move(pages)),
      options_(options),
      pages_of_gradients_(pages_->layouts().size()),
      sharded_(pages_->parameters().size()) {
  memory::check_dispatcher();
  auto source = std::make_unique<ShardSource>(pages_->world(), "the gradient of page",
                                              memory::Kind::kGradient);
  source_ = source.get();
  pager_ = memory::Pager::make(std::move(source),
                               {.what = "gradient", .prefetch_bytes = 0, .traced = false});
  std::vector<std::vector<size_t>> parameters_of_page(pages_->layouts().size());
  for (size_t index = 0; index < sharded_.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (placed.parameter.tensor.requires_grad()) parameters_of_page[placed.page].push_back(index);
  }
  for (size_t page = 0; page < parameters_of_page.size(); ++page) {
    if (!parameters_of_page[page].empty()) make_page(page, parameters_of_page[page]);
  }
}

ShardedGradients::~ShardedGradients() {
  for (size_t index = 0; index < sharded_.size(); ++index) {
    at::Tensor& gradient = pages_->parameters()[index].parameter.tensor.mutable_grad();
    if (gradient.defined() && sharded_[index].defined() &&
        same_elements(gradient, sharded_[index])) {
      gradient.reset();
    }
  }
}

std::unique_ptr<ShardGradient> ShardedGradients::make_owned(size_t page) const {
  const PageLayout& layout = pages_->layouts()[page];
  const comm::Communicator& communicator = pages_->world().communicator();
  const at::ScalarType dtype = accumulate_dtype_of(options_, layout.dtype);
  if (pages_->offloads_optimizer(page)) {
    PageOffload& page_offload = *pages_->page_offload();
    return std::make_unique<OffloadedGradient>(
        page_offload.gradients().add(page, layout.shard_numel, dtype, 0, memory::Kind::kGradient),
        communicator.device(), sum_order_of(options_), page_offload.copies());
  }
  const memory::KindScope kind(memory::Kind::kGradient);
  return std::make_unique<ResidentGradient>(communicator.buffer(layout.shard_numel, dtype).zero_(),
                                            sum_order_of(options_));
}

void ShardedGradients::make_page(size_t page, const std::vector<size_t>& parameters) {
  const PageLayout& layout = pages_->layouts()[page];
  pages_of_gradients_[page].owned = make_owned(page);
  const at::Tensor& owned = pages_of_gradients_[page].owned->values();
  pages_of_gradients_[page].gaps = gaps_between(page, parameters);
  ShardSource::Away away;
  if (pages_->offloads_optimizer(page)) {
    away = {.storage = &pages_->page_offload()->gradients(),
            .page = page,
            .page_offload = pages_->page_offload(),
            .changes_at_any_time = true};
  }
  std::vector<memory::Page::Tenant> tenants;
  for (const size_t index : parameters) {
    const PlacedParameter& placed = pages_->parameters()[index];
    sharded_[index] = make_sharded_like(placed, owned.scalar_type());
    tenants.push_back({sharded_[index].storage(),
                       placed.range.begin * static_cast<int64_t>(owned.element_size())});
  }
  pages_of_gradients_[page].pager_index =
      pager_->add_page(layout.name, source_->add_shard(layout, owned, away), std::move(tenants));
}

std::vector<Range> ShardedGradients::gaps_between(size_t page,
                                                  const std::vector<size_t>& parameters) const {
  std::vector<Range> taken;
  for (const size_t index : parameters) taken.push_back(pages_->parameters()[index].range);
  std::sort(taken.begin(), taken.end(),
            [](const Range& left, const Range& right) { return left.begin < right.begin; });
  const int64_t end = pages_->layouts()[page].padded_numel(pages_->world().size());
  taken.push_back({end, end});
  std::vector<Range> gaps;
  int64_t begin = 0;
  for (const Range& range : taken) {
    if (range.begin > begin) gaps.push_back({begin, range.begin});
    begin = range.end;
  }
  return gaps;
}

const at::Tensor& ShardedGradients::open(size_t page, Collect collect) {
  at::Tensor& bucket = pages_of_gradients_[page].bucket;
  if (!bucket.defined()) {
    const PageLayout& layout = pages_->layouts()[page];
    const memory::KindScope kind(memory::Kind::kBucket);
    bucket = pages_->world().communicator().buffer(layout.padded_numel(pages_->world().size()),
                                                   collect == Collect::kLocally
                                                       ? accumulate_dtype_of(options_, layout.dtype)
                                                       : reduce_dtype_of(options_, layout.dtype));
    // They are reduced too.
    for (const Range& gap : pages_of_gradients_[page].gaps) {
      bucket.narrow(0, gap.begin, gap.numel()).zero_();
    }
  }
  return bucket;
}

comm::Pending ShardedGradients::start_reduction(size_t page) {
  const PageLayout& layout = pages_->layouts()[page];
  at::Tensor& bucket = pages_of_gradients_[page].bucket;
  {
    const memory::KindScope kind(memory::Kind::kBucket);
    bucket = open(page, Collect::kForReduction).to(reduce_dtype_of(options_, layout.dtype));
  }
  return pages_->world().communicator().reduce_scatter(
      bucket, op(), "the gradient of page \"" + layout.name + "\"");
}

void ShardedGradients::close(size_t page) {
  PageOfGradients& of_page = pages_of_gradients_[page];
  const Range own = pages_->owned(page);
  of_page.owned->take(of_page.bucket.narrow(0, own.begin, own.numel()), more_follow());
  if (!of_page.owned->arrival().done()) memory::assign(of_page.bucket, memory::Kind::kStaging);
  of_page.bucket.reset();
  if (leaving_) pages_of_gradients_[*leaving_].owned->wait();
  leaving_ = page;
}

bool ShardedGradients::complete(size_t page) {
  return pages_of_gradients_[page].owned->complete();
}

void ShardedGradients::keep(size_t page, const std::vector<Range>& forgotten) {
  pager_->release_all("backward()");
  for (const Range& range : forgotten) forget(page, range);
  pages_of_gradients_[page].owned->keep();
}

void ShardedGradients::forget(size_t page) {
  pager_->release_all("backward()");
  pages_of_gradients_[page].owned->forget();
}

void ShardedGradients::skip(size_t page) {
  pager_->release_all("backward()");
  pages_of_gradients_[page].owned->skip();
}

void ShardedGradients::forget(size_t page, const Range& range) {
  const Range own = pages_->owned(page);
  const Range zeroed = intersection(own, range);
  if (zeroed.empty()) return;
  pages_of_gradients_[page].owned->zero({zeroed.begin - own.begin, zeroed.end - own.begin});
}

void ShardedGradients::replace(size_t parameter, const at::Tensor& gradient) {
  sharded_[parameter].copy_(gradient);
}

void ShardedGradients::gather(const std::vector<size_t>& parameters, memory::Pins& pins) {
  for (const size_t index : parameters) {
    const size_t page = pages_->parameters()[index].page;
    pins.add({pager_, pages_of_gradients_[page].pager_index}, /*writes=*/false);
  }
  pins.take_aside("GatheredGradients");
}

// The last one's way down is all that backward did not hide.
void ShardedGradients::note_reduced(const std::vector<size_t>&) {
  for (const PageOfGradients& of_page : pages_of_gradients_) {
    if (of_page.owned) of_page.owned->wait();
  }
  leaving_.reset();
}

void ShardedGradients::take_over_changes(const std::vector<size_t>&) {
  pager_->release_all("step()");
}

}  // namespace zeropage
