// The parameters of one rank as pages: which pages there are, where in them each parameter lies, and what
// of a page this rank owns.
//
// Nothing here has memory or values. zero/pages/make_pages.h makes the pages of a model, and names the
// classes that have.
//
// Threads: the training thread changes which pages train, between two steps; others read.
// Throws on parameters that cannot be placed: off the communicator's device, overlapping, or with
// repeated elements.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/TensorBody.h>

#include "zero/layout/module_parameters.h"
#include "zero/layout/shard_layout.h"
#include "zero/pages/page_worlds.h"
#include "zero/pages/placed_parameters.h"
#include "zero/plan/byte_plan.h"
#include "zero/tiers/page_offload.h"
#include "zeropage/detail/model_part.h"
#include "zeropage/options.h"

namespace zeropage::zero {

// Memory that moves into a page in one piece: of one parameter, or of several that share it.
struct PlacedStorage {
  std::vector<size_t> parameters;
  size_t page = 0;
  Range range;  // in the page
};

// The parameter's place in a flat buffer that is laid out as its page; shaped as the parameter.
at::Tensor slot_in(const at::Tensor& flat, const PlacedParameter& placed);
// Whether a tensor in such a buffer is that place.
bool is_slot(const at::Tensor& tensor, const PlacedParameter& placed);
bool is_slot(const at::Tensor& tensor, const PlacedParameters& parameters, size_t parameter);

class ParameterPages;

// The stages of a pipeline that have the model's other parameters; null where there are none beside this one.
const comm::World* pipeline_world_of(const ParameterPages& pages);
// World::check_agreement() over the ranks that have the same parameters, or slices of them.
void check_agreement(const ParameterPages& pages, const std::string& topic,
                     const std::vector<std::string>& lines);
// The same over the stages of a pipeline.
void check_stages_agree(const ParameterPages& pages, const std::string& topic,
                        const std::vector<std::string>& lines);

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
    std::shared_ptr<PageOffload> page_offload = nullptr;
    // Null: of a whole model.
    std::shared_ptr<const ModelPart> part = nullptr;
    // None: the ranks that the slices are over, if there are any.
    std::optional<comm::World> tensor_world = {};
  };

  // is_deferred: of a module that was constructed without memory, on the meta device.
  ParameterPages(PageWorlds worlds, std::vector<NamedParameter> parameters,
                 const PageOptions& options, bool is_deferred = false);

  // The ranks that train the module together.
  const comm::World& world() const { return worlds_.all; }
  // Those that have the page's parameters. Of a page of experts that are cut over ranks: those with the same experts.
  const comm::World& world(size_t page) const {
    return is_of_experts(page) ? *worlds_.same_experts : worlds_.all;
  }
  // Those among which its pages are sharded, but for experts that are cut.
  const comm::World& shards() const { return worlds_.shards; }
  // Those among which the page is sharded.
  const comm::World& shards(size_t page) const {
    return is_of_experts(page) ? *worlds_.same_experts : worlds_.shards;
  }
  bool is_of_experts(size_t page) const { return layouts_[page].of_experts; }
  // Over how many ranks the page's experts are cut; 1 for other pages.
  int ranks_of_experts(size_t page) const { return world().size() / world(page).size(); }
  const PageWorlds& worlds() const { return worlds_; }
  // The ranks that compute the same samples, with other slices of parameters. A stage of a pipeline may have all of its
  // own in whole. Null where there are none beside this one.
  const comm::World* tensor_world() const {
    return tensor_world_ && tensor_world_->size() > 1 ? &*tensor_world_ : nullptr;
  }
  // What of the model these parameters are; null where they are all of it.
  const std::shared_ptr<const ModelPart>& part() const { return options_.part; }
  const std::vector<PageLayout>& layouts() const { return layouts_; }
  // What the pages were made with.
  const Options& options() const { return options_.sharding; }
  // What of each page is sharded, what leaves the device, and what that takes.
  const BytePlan& plan() const { return plan_; }
  const PlacedParameters& parameters() const { return parameters_; }
  // By index of StorageSpec, as slots have it.
  const std::vector<PlacedStorage>& storages() const { return storages_; }
  // 'page "blocks.7"', for errors and messages; 'page "blocks.7" of model 2' where these ranks have another model.
  std::string describe(size_t page) const {
    return "page \"" + layouts_[page].name + "\"" + of_model_;
  }
  const std::string& of_model() const { return of_model_; }

  // Elements of the page that this rank updates.
  Range owned(size_t page) const { return plan_[page].owned; }
  // Whether a rank keeps its shard of the page alone, which is gathered while operators use it.
  bool is_sharded(size_t page) const { return plan_[page].parameters == Sharing::kSharded; }

  // Null where all stays on the device.
  const std::shared_ptr<PageOffload>& page_offload() const { return options_.page_offload; }
  bool offloads_optimizer(size_t page) const {
    return plan_[page].optimizer_tier != memory::Tier::kDevice;
  }
  bool offloads_parameters(size_t page) const {
    return plan_[page].parameter_tier != memory::Tier::kDevice;
  }

  // The page's parameters were frozen when it was laid out. It trains from here on.
  void begin_training(size_t page) {
    layouts_[page].requires_grad = true;
    plan_.begin_training(page, layouts_[page]);
    ++training_version_;
  }
  // Changes when a page begins to train.
  uint64_t training_version() const { return training_version_; }

 private:
  std::vector<StorageSpec> group_by_storage(const std::vector<PlacedParameter>& parameters);
  void lay_out(const std::vector<StorageSpec>& storages, std::vector<PlacedParameter> parameters);

  const PageWorlds worlds_;
  const std::optional<comm::World> tensor_world_;
  const PageOptions options_;
  const std::string of_model_;  // "" for the first of these ranks
  std::vector<PageLayout> layouts_;
  BytePlan plan_;
  PlacedParameters parameters_;
  std::vector<PlacedStorage> storages_;
  uint64_t training_version_ = 0;
};

}  // namespace zeropage::zero
