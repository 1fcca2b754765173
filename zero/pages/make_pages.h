// Moves the parameters of a rank into pages: lays them out, refuses what could not be undone, gives each
// page its memory, and fills it with rank 0's values. Each question about pages has one class then.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "paging/pager.h"
#include "zero/layout/deferred_values.h"
#include "zero/layout/module_parameters.h"
#include "zero/pages/master_weights.h"
#include "zero/pages/module_placement.h"
#include "zero/pages/page_memory.h"
#include "zero/pages/page_worlds.h"
#include "zero/pages/page_writes.h"
#include "zero/pages/parameter_pages.h"
#include "zero/pages/whole_pages.h"
#include "zeropage/options.h"

namespace zeropage::zero {

struct MakePagesOptions {
  ParameterPages::PageOptions pages = {};
  // Options of the pager of sharded pages.
  paging::PagerOptions paging = {};
};

// The pages of a rank's parameters: for each question about them the part that answers it. Parts share what
// they need of each other.
struct PageParts {
  // Which pages there are, where in them each parameter lies, and what this rank owns.
  std::shared_ptr<ParameterPages> pages;
  // The memory that this rank has of them.
  std::shared_ptr<PageMemory> memory;
  // What it keeps in fp32 beside that.
  std::shared_ptr<MasterWeights> masters;
  // When a sharded page is whole.
  std::shared_ptr<WholePages> paging;
  // Whether the module still has its parameters there.
  std::shared_ptr<ModulePlacement> in_place;
  // Passes writes to parameters to what depends on them.
  std::shared_ptr<PageWrites> writes;
};

using CheckPages = std::function<void(const ParameterPages&)>;

// deferred: of a module that was constructed without memory, whose parameters get their values now; null
// for others. check: called when pages are laid out and nothing has moved yet. Collective. Throws on
// parameters that cannot be placed, or moved.
PageParts make_pages(PageWorlds worlds, std::vector<NamedParameter> parameters,
                     const MakePagesOptions& options, const DeferredValues* deferred = nullptr,
                     const CheckPages& check = nullptr);

}  // namespace zeropage::zero
