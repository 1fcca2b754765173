#include "zero/gradients/paged_gradients.h"

#include <utility>

#include "memory/storage.h"
#include "paging/trap.h"

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

std::shared_ptr<memory::Pager> make_pager(std::unique_ptr<memory::PageSource> source) {
  memory::check_dispatcher();
  return memory::Pager::make(std::move(source),
                             {.what = "gradient", .prefetch_bytes = 0, .traced = false});
}

}  // namespace

class PagedGradients::CheckedSource final : public memory::PageSource {
 public:
  CheckedSource(std::unique_ptr<memory::PageSource> source, std::function<void(size_t page)> check)
      : source_(std::move(source)), check_(std::move(check)) {}

  void add(size_t page) { pages_.push_back(page); }

  memory::Fetch start_fetch(size_t entry) override {
    check_(pages_[entry]);
    return source_->start_fetch(entry);
  }
  void write_back(size_t entry, const at::Tensor& buffer) override {
    source_->write_back(entry, buffer);
  }
  void end_use(size_t entry) override { source_->end_use(entry); }

 private:
  const std::unique_ptr<memory::PageSource> source_;
  const std::function<void(size_t page)> check_;
  std::vector<size_t> pages_;  // of the entries
};

PagedGradients::PagedGradients(std::shared_ptr<ParameterPages> pages,
                               std::unique_ptr<memory::PageSource> source,
                               std::function<void(size_t page)> check)
    : pages_(std::move(pages)),
      source_(new CheckedSource(std::move(source), std::move(check))),
      pager_(make_pager(std::unique_ptr<memory::PageSource>(source_))),
      gradients_(pages_->parameters().size()),
      pager_index_(pages_->layouts().size()) {}

PagedGradients::~PagedGradients() {
  for (size_t index = 0; index < gradients_.size(); ++index) {
    at::Tensor& gradient = pages_->parameters()[index].parameter.tensor.mutable_grad();
    if (gradient.defined() && gradients_[index].defined() &&
        same_elements(gradient, gradients_[index])) {
      gradient.reset();
    }
  }
}

void PagedGradients::add_page(size_t page, int64_t bytes, at::ScalarType dtype) {
  source_->add(page);
  std::vector<memory::Page::Tenant> tenants;
  for (size_t index = 0; index < gradients_.size(); ++index) {
    const PlacedParameter& placed = pages_->parameters()[index];
    if (placed.page != page) continue;
    gradients_[index] = make_sharded_like(placed, dtype);
    tenants.push_back({gradients_[index].storage(),
                       placed.range.begin * static_cast<int64_t>(c10::elementSize(dtype))});
  }
  pager_index_[page] = pager_->add_page(pages_->layouts()[page].name, bytes, std::move(tenants));
}

void PagedGradients::gather(const std::vector<size_t>& parameters, memory::Pins& pins) const {
  for (const size_t index : parameters) {
    pins.add({pager_, *pager_index_[pages_->parameters()[index].page]}, /*writes=*/false);
  }
  pins.take_aside("GatheredGradients");
}

}  // namespace zeropage
