// The parameters of one rank as pages: flat buffers in which the parameters' storages live.
//
// A parameter stays the tensor that the module holds; only its storage's memory moves into a page,
// so collectives on a page update parameters in place. Storages are moved one page at a time, and
// every rank takes rank 0's values.
//
// A page is whole on every rank, or sharded: then a rank keeps its shard, and the page is gathered
// while operators use it (paging/pager, paging/trap).
//
// Lifetime: a whole page's buffer lives as long as this object or any parameter in it; parameters of
// sharded pages have no values once this object is gone. Throws on parameters that cannot be placed:
// off the communicator's device, overlapping, or with repeated elements.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "comm/world.h"
#include "paging/pager.h"
#include "paging/pins.h"
#include "zero/layout/deferred_values.h"
#include "zero/layout/module_parameters.h"
#include "zero/layout/shard_layout.h"
#include "zero/options.h"
#include "zero/pages/shard_source.h"
#include "zero/pages/written_blocks.h"
#include "zero/plan/byte_plan.h"
#include "zero/tiers/page_offload.h"

namespace zeropage {

struct PlacedParameter {
  NamedParameter parameter;
  size_t page = 0;
  // Where the parameter's elements lie in the page, gaps of a strided parameter included.
  Range range;
  // Of its first element.
  int64_t offset = 0;
  // As it was when it was placed: its elements, whatever memory the parameter is given later.
  at::Tensor in_place;
  // Of the tensor when a backward made its step (StepWhen::kInBackward).
  int64_t version = 0;
};

// The parameter's place in a flat buffer that is laid out as its page; shaped as the parameter.
at::Tensor slot_in(const at::Tensor& flat, const PlacedParameter& placed);

// Whether two tensors of the same sizes are the same elements of the same storage, as one and its
// detach() are.
bool same_elements(const at::Tensor& left, const at::Tensor& right);

class ParameterPages {
 public:
  struct PageOptions {
    int64_t page_bytes = 0;
    // What the byte plan is made of, beside the layout.
    Options sharding = {.stage = Stage::kReplicated};
    // Null: all stays on the device.
    std::shared_ptr<PageOffload> page_offload;
    memory::PagerOptions paging;
  };

  using CheckPlan = std::function<void(const BytePlan&)>;

  // deferred: of a module that was constructed without memory, whose parameters get their values
  // now. check: called when pages are laid out and nothing has moved yet. Collective.
  ParameterPages(comm::World world, std::vector<NamedParameter> parameters,
                 const PageOptions& options, const DeferredValues* deferred = nullptr,
                 const CheckPlan& check = nullptr);

  const comm::World& world() const { return world_; }
  const std::vector<PageLayout>& layouts() const { return layouts_; }
  const BytePlan& plan() const { return plan_; }
  const std::vector<PlacedParameter>& parameters() const { return parameters_; }

  // Index into parameters() of a tensor, or -1 if it is none of them.
  int64_t index_of(const at::Tensor& tensor) const;

  // Elements of the page that this rank updates, and their values: [owned numel].
  Range owned(size_t page) const { return plan_[page].owned; }
  const at::Tensor& owned_values(size_t page) const { return memory_[page].owned; }
  // Their fp32 copy, which the optimizer updates, in a lower precision or offloaded; undefined where
  // there is none.
  const at::Tensor& master_weights(size_t page) const { return memory_[page].master; }
  // Or what makes fp32 master weights of them; undefined where there is nothing.
  const at::Tensor& remainders(size_t page) const { return memory_[page].remainders; }
  // Null where all stays on the device.
  const std::shared_ptr<PageOffload>& page_offload() const { return options_.page_offload; }
  bool offloads_optimizer(size_t page) const {
    return plan_[page].optimizer_tier != memory::Tier::kDevice;
  }
  bool offloads_parameters(size_t page) const {
    return plan_[page].parameter_tier != memory::Tier::kDevice;
  }
  bool is_sharded(size_t page) const { return !memory_[page].whole.defined(); }

  // Of the sharded pages; null if there is none.
  const std::shared_ptr<memory::Pager>& pager() const { return pager_; }

  // Gives back what need not stay between backward and step.
  void end_backward();
  // Around an update of owned_values(). begin: from here on no sharded page is resident, and what was
  // written to parameters is in a copy of them in another tier; master weights beside them follow it
  // in the update (OwnedPart::adopts_copy). Throws if a page is in use.
  // updated: by parameter. A backward over a graph from before is refused from here on.
  void begin_update();
  // The same for one page, before its update in the middle of a backward. has_gradient: of its
  // parameters.
  void begin_update_in_backward(size_t page, const std::function<bool(size_t)>& has_gradient);
  void end_update(const std::vector<bool>& updated);
  // Instead of both, where a step changes nothing: ends its pass.
  void skip_update();

  // What was written to parameters is from here on in what this rank owns, master weights included; no
  // sharded page is resident. Throws if one is in use, or a parameter is not in place. who:
  // "save_state()".
  void take_over_writes(const char* who);
  // Of one page, which stays resident where it is. REQUIRES: parameters are in place.
  void take_over_writes(size_t page);
  // This rank's memory of the page, which it has until visit returns.
  struct Owned {
    at::Tensor values;      // [owned numel]
    at::Tensor master;      // as master_weights()
    at::Tensor remainders;  // as remainders()
  };
  void visit_owned(size_t page, TierStorage::Use use,
                   const std::function<void(const Owned&)>& visit) const;
  // Every rank takes over the others' shards of a whole page, whoever updates them. Collective.
  comm::Pending start_gather_shards(size_t page) const;
  // All values were replaced, behind autograd's back.
  void end_load();

  // Adds the parameter's page, if it is sharded.
  void add_to(memory::Pins& pins, size_t parameter, bool writes) const;
  // Every rank takes the values that `root` has in the page, which is whole or pinned. Collective.
  comm::Pending start_broadcast(size_t page, int root) const;
  // Parameters of these pages that were given other memory take its values and live in their page
  // again. REQUIRES: sharded ones are pinned. Returns what is wrong with one that could not, or "".
  std::string put_back(const std::vector<size_t>& pages);
  // A backward over a graph from before is refused from here on.
  void note_written(const std::vector<size_t>& pages);
  // Sends what this rank updated of a whole page to the others, in place. Nothing to do where each
  // rank updates whole pages, nor for a sharded page, which is gathered when it is used. Collective.
  comm::Pending start_gather(size_t page) const;

  // Throws if the calling thread's current stream is another than where the pages were made: pages
  // come and go in that one's order. who: "forward()".
  void check_stream(const char* who) const;
  // The parameter was frozen when it was placed. Its page trains from here on.
  void begin_training(size_t parameter);
  // Throws if a parameter no longer lives in its page.
  void check_in_place(const char* who) const;
  // Both.
  void check_can_update() const;

 private:
  std::vector<StorageSpec> group_by_storage();
  void lay_out(const std::vector<StorageSpec>& storages);
  void fill(const DeferredValues* deferred);
  void make_what_leaves();
  void make_memory(size_t page);
  void make_masters(size_t page);
  void take_over(size_t storage, const at::Tensor& values);
  void live_in_page(size_t storage);
  void hand_to_pager();
  void hand_to_pager(size_t page);
  at::Tensor make_master(size_t page);
  at::Tensor make_shard(size_t page);
  void check_before_moving() const;
  void check_fits_budget(size_t page) const;
  bool shards(size_t page) const;
  std::string describe(size_t page) const;
  bool is_in_place(const PlacedParameter& placed) const;
  bool is_copied_elsewhere(size_t page) const;
  void adopt_written(size_t page, const at::Tensor& blocks);
  void adopt_into_master(size_t page);
  void check_unwritten_since_backward() const;

  struct PlacedStorage {
    std::vector<size_t> parameters;  // that share it
    size_t page = 0;
    Range range;  // in the page
  };

  struct PageMemory {
    at::Tensor whole;       // [padded_numel]; undefined for a sharded page
    at::Tensor owned;       // [owned numel], in `whole` or on its own
    at::Tensor master;      // [owned numel] fp32, or undefined
    at::Tensor remainders;  // [owned numel] int16, or undefined
    size_t pager_index = 0;
  };

  // Constant after construction.
  const comm::World world_;
  const PageOptions options_;
  const memory::Stream compute_;
  std::vector<PageLayout> layouts_;
  BytePlan plan_;
  std::vector<PlacedParameter> parameters_;
  std::vector<PlacedStorage> storages_;  // by index of StorageSpec
  std::vector<PageMemory> memory_;       // by page
  WrittenBlocks written_;                // of pages that have a copy in another tier
  bool was_updated_ = false;
  ShardSource* source_ = nullptr;  // owned by pager_
  std::shared_ptr<memory::Pager> pager_;
};

}  // namespace zeropage
