#include "zero/pages/make_pages.h"

#include <utility>

#include <torch/csrc/autograd/variable.h>

#include "zero/pages/page_filler.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

void check_fits_budget(const ParameterPages& pages, size_t page,
                       const paging::PagerOptions& paging) {
  const int64_t bytes = pages.plan()[page].whole_bytes;
  const int64_t budget = paging.budget_bytes;
  ZP_CHECK(budget == 0 || bytes <= budget || pages.shards().size() == 1, pages.describe(page),
           " has ", memory::format_bytes(bytes), ", but ", paging.budget_option, " is ",
           memory::format_bytes(budget), ": no operator could use it; raise it to at least ", bytes,
           " bytes, or use smaller pages if the page has several parameters");
}

void check_storage_can_move(const ParameterPages& pages, const PlacedStorage& placed) {
  const NamedParameter& first = pages.parameters()[placed.parameters.front()].parameter;
  const bool is_cast = first.dtype != first.tensor.scalar_type();
  if (!pages.is_sharded(placed.page) && !is_cast) return;
  size_t holders = placed.parameters.size();
  for (const size_t index : placed.parameters) {
    // A parameter that was made as a view keeps what it is a view of.
    if (pages.parameters()[index].parameter.tensor.is_view()) ++holders;
  }
  // A deferred module's storages are on its tape too.
  ZP_CHECK(first.tensor.is_meta() || first.tensor.storage().use_count() <= holders, "parameter \"",
           first.name(),
           "\": something else holds its memory, such as a view of it or a graph that used it, and "
           "would not notice when the parameter is ",
           is_cast ? "cast to options.compute_dtype" : "sharded", "; let that go before wrapping");
  ZP_CHECK(!is_cast || !torch::autograd::impl::try_get_grad_accumulator(first.tensor),
           "parameter \"", first.name(), "\": a graph that used it in ", first.tensor.scalar_type(),
           " is alive, and options.compute_dtype is to make it ", first.dtype,
           "; let the loss and its outputs go before wrapping");
}

// Refuses before anything is moved.
void check_can_move(const ParameterPages& pages, const paging::PagerOptions& paging) {
  for (size_t page = 0; page < pages.layouts().size(); ++page) {
    if (pages.is_sharded(page)) check_fits_budget(pages, page, paging);
    for (const Slot& slot : pages.layouts()[page].slots) {
      check_storage_can_move(pages, pages.storages()[slot.storage]);
    }
  }
}

}  // namespace

PageParts make_pages(PageWorlds worlds, std::vector<NamedParameter> parameters,
                     const MakePagesOptions& options, const DeferredValues* deferred,
                     const CheckPages& check) {
  PageParts made;
  made.pages = std::make_shared<ParameterPages>(std::move(worlds), std::move(parameters),
                                                options.pages, deferred != nullptr);
  check_can_move(*made.pages, options.paging);
  if (check) check(*made.pages);
  made.memory = std::make_shared<PageMemory>(made.pages);
  made.masters = std::make_shared<MasterWeights>(made.pages, made.memory);
  PageFiller(*made.pages, *made.memory, *made.masters).fill(deferred);
  made.masters->begin_noticing();
  const auto user_writes = std::make_shared<UserWrites>(made.pages, made.memory);
  made.paging = std::make_shared<WholePages>(made.pages, made.memory, user_writes, options.paging);
  made.in_place = std::make_shared<ModulePlacement>(made.pages, made.memory);
  made.writes = std::make_shared<PageWrites>(made.pages, made.masters, made.paging, made.in_place,
                                             user_writes);
  return made;
}

}  // namespace zeropage::zero
