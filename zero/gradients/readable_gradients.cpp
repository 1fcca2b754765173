#include "zero/gradients/readable_gradients.h"

#include <utility>

#include "memory/storage.h"
#include "paging/trap.h"
#include "parallel/slice_gradient.h"
#include "parallel/slice_mark.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

// A tensor of the parameter's sizes, on a storage of its own that has no memory.
at::Tensor make_sharded_like(const PlacedParameter& placed, at::ScalarType dtype) {
  const at::Tensor& parameter = placed.parameter.tensor;
  const auto bytes = placed.range.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor sharded =
      memory::tensor_in(memory::storage_without_memory(bytes, parameter.device()), parameter,
                        placed.offset - placed.range.begin, dtype);
  paging::set_trap(sharded);
  return sharded;
}

std::shared_ptr<paging::Pager> make_pager(std::unique_ptr<paging::PageSource> source,
                                          const ReducedGradients::BeforeUse& on_use,
                                          const ReducedGradients::BeforeUse& before_use) {
  paging::check_dispatcher();
  // A call may set another.
  const auto call = [&on_use, &before_use](const c10::OperatorName& operation, bool reads) {
    if (on_use) on_use(operation, reads);
    if (const ReducedGradients::BeforeUse set = before_use) set(operation, reads);
  };
  return paging::Pager::make(
      std::move(source),
      {.what = "gradient", .prefetch_bytes = 0, .before_use = call, .traced = false});
}

}  // namespace

class ReadableGradients::CheckedSource final : public paging::PageSource {
 public:
  CheckedSource(std::unique_ptr<paging::PageSource> source, const ParameterPages& pages,
                Memory& memory)
      : source_(std::move(source)), of_model_(pages), memory_(memory) {}

  void add(size_t page) { pages_.push_back(page); }

  paging::Fetch start_fetch(size_t entry) override {
    const size_t page = pages_[entry];
    memory_.check_readable(page);
    const GradientMemory* const memory = memory_.memory(page);
    ZP_CHECK(memory == nullptr || memory->get().defined(), "p.grad() of ", of_model_.describe(page),
             " was zeroed, and its memory has gone with it, but a view of it is read; read "
             "gradients before zero_grad(), or keep a clone() of them");
    return source_->start_fetch(entry);
  }
  void write_back(size_t entry, const at::Tensor& buffer) override {
    source_->write_back(entry, buffer);
  }
  void end_use(size_t entry) override { source_->end_use(entry); }

 private:
  const std::unique_ptr<paging::PageSource> source_;
  const ParameterPages& of_model_;
  Memory& memory_;
  std::vector<size_t> pages_;  // of the entries
};

ReadableGradients::ReadableGradients(std::shared_ptr<ParameterPages> pages,
                                     std::unique_ptr<paging::PageSource> source, Memory& memory)
    : pages_(std::move(pages)),
      memory_(memory),
      source_(new CheckedSource(std::move(source), *pages_, memory)),
      pager_(make_pager(std::unique_ptr<paging::PageSource>(source_), on_use_, before_use_)),
      gradients_(pages_->parameters().size()),
      places_(gradients_.size()),
      pager_index_(pages_->layouts().size()) {}

ReadableGradients::~ReadableGradients() {
  for (size_t index = 0; index < gradients_.size(); ++index) {
    at::Tensor& gradient = pages_->parameters()[index].parameter.tensor.mutable_grad();
    if (gradient.defined() && gradients_[index].defined() &&
        same_elements(gradient, gradients_[index])) {
      gradient.reset();
    }
  }
}

void ReadableGradients::add_page(size_t page, int64_t bytes, at::ScalarType dtype) {
  source_->add(page);
  std::vector<paging::Page::StorageInPage> page_storages;
  for (const size_t index : pages_->parameters().of_page(page)) {
    const PlacedParameter& placed = pages_->parameters()[index];
    gradients_[index] = make_sharded_like(placed, dtype);
    places_.set(index, gradients_[index]);
    page_storages.push_back({gradients_[index].storage(),
                             placed.range.begin * static_cast<int64_t>(c10::elementSize(dtype))});
  }
  pager_index_[page] =
      pager_->add_page(pages_->layouts()[page].name, bytes, std::move(page_storages));
}

bool ReadableGradients::is(size_t parameter, const at::Tensor& gradient) const {
  if (!gradient.defined()) return false;
  if (!gradient.is_same(gradients_[parameter]) && !places_.has(parameter, gradient)) return false;
  const GradientMemory* const memory = memory_.memory(pages_->parameters().page(parameter));
  return memory == nullptr || memory->is_kept_by(gradient);
}

at::Tensor ReadableGradients::of(size_t parameter) {
  const at::Tensor& sharded = gradients_[parameter];
  const PlacedParameter& placed = pages_->parameters()[parameter];
  GradientMemory* const memory = memory_.memory(placed.page);
  if (memory == nullptr) {
    parallel::mark_as_gradient(sharded, placed.parameter.tensor);
    return sharded;
  }
  // Past the dispatcher, which would ask the trap.
  auto keeping = sharded.unsafeGetTensorImpl()->shallow_copy_and_detach(
      /*version_counter=*/0, /*allow_tensor_metadata_change=*/true);
  at::Tensor gradient(std::move(keeping));
  auto keeper = memory->keeper();
  if (!parallel::mark_as_gradient(gradient, placed.parameter.tensor, keeper)) {
    gradient.unsafeGetTensorImpl()->set_backend_meta(std::move(keeper));
  }
  return gradient;
}

at::Tensor ReadableGradients::replaced(size_t parameter, const at::Tensor& gradient) {
  const size_t page = pages_->parameters()[parameter].page;
  GradientMemory* const memory = memory_.memory(page);
  const bool is_view_of_it = same_elements(gradient, gradients_[parameter]);
  if (memory != nullptr && !memory->get().defined()) {
    ZP_CHECK(
        !is_view_of_it, "parameter \"", pages_->parameters()[parameter].parameter.name(),
        "\": p.grad() was set to one of an earlier backward, which was zeroed since; expected a "
        "tensor with values, keep a clone() of the gradient");
    memory_.renew(page);
  }
  const at::Tensor own = of(parameter);
  if (memory != nullptr) memory->let_go();
  const parallel::SlicesAsTheyAre scope;
  if (!is_view_of_it) at::Tensor(gradients_[parameter]).copy_(gradient);
  return own;
}

void ReadableGradients::gather(const std::vector<size_t>& parameters, paging::Pins& pins) {
  pager_->announce({"GatheredGradients", ""}, /*reads=*/true);
  for (const size_t index : parameters) {
    pins.add({pager_, *pager_index_[pages_->parameters()[index].page]}, /*writes=*/false);
  }
  pins.take_outside_trace("GatheredGradients");
}

void ReadableGradients::release_zeroed(size_t page) {
  if (has(page)) pager_->release_unpinned(*pager_index_[page]);
}

}  // namespace zeropage::zero
