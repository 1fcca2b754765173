#include "zero/plan/byte_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "zero/tiers/transient_storage.h"
#include "zeropage/check.h"
#include "zeropage/detail/state_format.h"

namespace zeropage::zero {
namespace {

using memory::Kind;
using memory::Tier;

int64_t bytes_of_element(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// A buffer that a rank has of a page, from step to step or while there is a gradient.
struct Buffer {
  Kind kind;
  Tier tier;
  bool is_shard;  // as long as this rank's shard, not as the page
  int64_t element_bytes;
};

Sharing sharing_of(const Options& options, bool is_sharded) {
  if (is_sharded) return Sharing::kSharded;
  return options.stage.optimizer_state ? Sharing::kOwned : Sharing::kReplicated;
}

MasterWeightsAs masters_of(LowPrecisionUpdate update) {
  switch (update) {
    case LowPrecisionUpdate::kMasterWeights:
      return MasterWeightsAs::kFp32;
    case LowPrecisionUpdate::kSplitMasterWeights:
      return MasterWeightsAs::kRemainders;
    case LowPrecisionUpdate::kStochasticRounding:
    case LowPrecisionUpdate::kNearest:
      break;
  }
  return MasterWeightsAs::kNone;
}

int64_t element_bytes(MasterWeightsAs masters) {
  return static_cast<int64_t>(masters == MasterWeightsAs::kFp32 ? sizeof(float) : sizeof(int16_t));
}

// One kind of page: what is the same for all of that dtype that are sharded, or leave, alike.
struct Manner {
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool trains = true;
  bool is_sharded = false;
  bool optimizer_leaves = false;
};

PagePlan plan_of(const Options& options, const Manner& manner) {
  PagePlan page;
  page.parameters = sharing_of(options, manner.is_sharded);
  page.gradients = sharing_of(options, options.stage.gradients);
  if (manner.is_sharded) page.parameter_tier = options.offload.parameters;
  page.gradient_dtype = accumulate_dtype_of(options, manner.dtype);
  page.reduce_dtype = reduce_dtype_of(options, manner.dtype);
  if (!manner.trains) return page;
  if (manner.optimizer_leaves) page.optimizer_tier = options.offload.optimizer;
  if (is_low_precision(manner.dtype)) {
    page.masters = masters_of(options.low_precision_update);
  } else if (manner.optimizer_leaves && page.parameter_tier == Tier::kDevice) {
    // Parameters that leave are themselves what the optimizer updates.
    page.masters = MasterWeightsAs::kFp32;
  }
  return page;
}

std::vector<Buffer> buffers_of(const PagePlan& page, const Manner& manner) {
  std::vector<Buffer> buffers = {{Kind::kParameter, page.parameter_tier,
                                  page.parameters == Sharing::kSharded,
                                  bytes_of_element(manner.dtype)}};
  if (!manner.trains) return buffers;
  const bool updates_shard = page.parameters != Sharing::kReplicated;
  const bool shards_gradient = page.gradients == Sharing::kSharded;
  const int64_t gradient = bytes_of_element(page.gradient_dtype);
  if (manner.optimizer_leaves) {
    buffers.push_back({Kind::kGradient, Tier::kHost, updates_shard, gradient});
  }
  if (!manner.optimizer_leaves || !shards_gradient) {
    buffers.push_back({Kind::kGradient, Tier::kDevice, shards_gradient, gradient});
  }
  if (page.masters != MasterWeightsAs::kNone) {
    buffers.push_back(
        {Kind::kMasterWeights, page.optimizer_tier, updates_shard, element_bytes(page.masters)});
  }
  return buffers;
}

// Whether it is there from backward to zero_grad() only. What is on the host stays.
bool goes_when_zeroed(const Buffer& buffer) {
  return buffer.kind == Kind::kGradient && buffer.tier == Tier::kDevice;
}

// Whether it goes as soon as its page is updated.
bool passes(const Options& options, const Buffer& buffer) {
  return options.offload.step == StepWhen::kInBackward && buffer.kind == Kind::kGradient &&
         buffer.tier == Tier::kHost;
}

// This rank's part of what a group has a second time, of so many bytes.
int64_t secondary_bytes(const Options& options, int64_t bytes, int world_size) {
  const int ranks = options.secondary_shard_within;
  return ranks == Options::kNoSecondaryShards || ranks == world_size ? 0 : bytes / ranks;
}

// Bytes of one state. first_in_block: the place of its first element in a block of 8-bit states.
int64_t bytes_of_state(const Options& options, c10::ScalarType dtype, StateFormat format,
                       int64_t first_in_block, int64_t numel) {
  if (format != StateFormat::kFp32) return state_bytes(format, first_in_block, numel);
  // States have the dtype of what is updated.
  const bool in_fp32 =
      is_low_precision(dtype) && options.low_precision_update != LowPrecisionUpdate::kNearest;
  return numel * bytes_of_element(in_fp32 ? c10::kFloat : dtype);
}

// The manner of all pages of a module, as a formula takes it.
Manner manner_of(const Options& options) {
  return {.dtype = options.compute_dtype.value_or(c10::kFloat),
          .is_sharded = options.stage.parameters,
          .optimizer_leaves = options.offload.optimizer != Tier::kDevice};
}

int sharing_ranks(const Options& options, int world_size) {
  return options.shard_within == Options::kAllRanks ? world_size : options.shard_within;
}

int64_t bytes_without_padding(const Options& options, const Buffer& buffer, int64_t parameters,
                              int world_size) {
  const int64_t whole = buffer.element_bytes * parameters;
  return buffer.is_shard ? whole / sharing_ranks(options, world_size) : whole;
}

void check_can_leave(const PageLayout& layout) {
  ZP_CHECK(layout.dtype == c10::kFloat || is_low_precision(layout.dtype),
           "options.offload.optimizer: page \"", layout.name, "\" has ", layout.dtype,
           ", whose step has no fused form; keep its optimizer on the device");
}

class Planner {
 public:
  Planner(const Options& options, const PlacesOfRank& places)
      : options_(options), places_(places) {}

  PagePlan plan(const PageLayout& layout, bool optimizer_leaves) const {
    const auto [rank, ranks] = places_.of(layout);
    const int64_t whole_numel = layout.padded_numel(ranks);
    const int64_t whole_bytes = whole_numel * bytes_of_element(layout.dtype);
    const Manner manner{
        .dtype = layout.dtype,
        .trains = layout.requires_grad,
        .is_sharded = options_.stage.parameters && whole_bytes >= options_.minimum_sharded_bytes,
        .optimizer_leaves = optimizer_leaves};
    PagePlan page = plan_of(options_, manner);
    page.owned =
        page.parameters == Sharing::kReplicated ? Range{0, whole_numel} : layout.shard(rank);
    page.whole_bytes = whole_bytes;
    for (const Buffer& buffer : buffers_of(page, manner)) {
      const int64_t bytes =
          buffer.element_bytes * (buffer.is_shard ? layout.shard_numel : whole_numel);
      if (passes(options_, buffer)) {
        page.passing_gradient_bytes = bytes;
      } else if (goes_when_zeroed(buffer)) {
        page.gradient_bytes = bytes;
      } else {
        page.held[buffer.tier][buffer.kind] += bytes;
      }
    }
    if (page.parameters == Sharing::kSharded) {
      page.held[Tier::kDevice][Kind::kParameter] += secondary_bytes(options_, whole_bytes, ranks);
    }
    if (!layout.requires_grad) return page;
    page.own_gradient_bytes = layout.numel * bytes_of_element(page.gradient_dtype);
    // Whole gradients travel as they lie, or as a copy in another dtype.
    if (page.gradients == Sharing::kSharded || page.reduce_dtype != page.gradient_dtype) {
      page.bucket_bytes = whole_numel * bytes_of_element(page.reduce_dtype);
    }
    page.state_bytes = state_bytes(layout, page.owned);
    return page;
  }

  // Pages from the end of the module, whose gradients come first, as long as they fit.
  std::vector<bool> which_optimizers_leave(const std::vector<PageLayout>& layouts) const {
    std::vector<bool> leave(layouts.size());
    if (options_.offload.optimizer == Tier::kDevice) return leave;
    int64_t left = options_.offload.optimizer_bytes;
    for (size_t index = layouts.size(); index-- > 0;) {
      const PageLayout& layout = layouts[index];
      if (!layout.requires_grad) continue;
      check_can_leave(layout);
      const int64_t bytes = leaving_bytes(layout);
      if (bytes > left) continue;
      left -= bytes;
      leave[index] = true;
    }
    return leave;
  }

 private:
  // Before the optimizer is known: with two states in fp32.
  int64_t leaving_bytes(const PageLayout& layout) const {
    constexpr int64_t kBytesOfTwoStates = 2 * sizeof(float);
    const PagePlan page = plan(layout, /*optimizer_leaves=*/true);
    int64_t bytes = page.owned.numel() * kBytesOfTwoStates;
    for (const Tier tier : {Tier::kHost, Tier::kNvme}) bytes += page.held[tier].total();
    return bytes + page.passing_gradient_bytes;
  }

  int64_t state_bytes(const PageLayout& layout, const Range& owned) const {
    int64_t bytes = 0;
    for (const Slot& slot : layout.slots) {
      for (const Range& parameter : slot.parameters) {
        const Range range = intersection(owned, parameter);
        if (range.empty()) continue;
        bytes +=
            bytes_of_state(options_, layout.dtype, state_format_of(options_, parameter.numel()),
                           range.begin % kStateBlockNumel, range.numel());
      }
    }
    return bytes;
  }

  const Options& options_;
  const PlacesOfRank places_;
};

}  // namespace

BytePlan::BytePlan(const std::vector<PageLayout>& layouts, const Options& options,
                   const PlacesOfRank& places)
    : options_(options), places_(places) {
  TORCH_INTERNAL_ASSERT(
      options_.stage.optimizer_state || !(options_.stage.gradients || options_.stage.parameters),
      "a rank that updates whole pages holds them");
  const Planner planner(options_, places_);
  const std::vector<bool> leave = planner.which_optimizers_leave(layouts);
  for (size_t page = 0; page < layouts.size(); ++page) {
    pages_.push_back(planner.plan(layouts[page], leave[page]));
  }
}

Ownership BytePlan::ownership() const {
  return options_.stage.optimizer_state ? Ownership::kShard : Ownership::kWholePage;
}

Sharing BytePlan::gradients() const {
  return sharing_of(options_, options_.stage.gradients);
}

void BytePlan::begin_training(size_t page, const PageLayout& layout) {
  // Parameters that are away are updated where they are.
  const bool leaves = pages_[page].parameter_tier != Tier::kDevice;
  if (leaves) check_can_leave(layout);
  pages_[page] = Planner(options_, places_).plan(layout, leaves);
}

memory::TierBytes BytePlan::held(double states) const {
  memory::TierBytes all = this->states(states);
  int64_t largest_passing = 0;
  int64_t passing = 0;
  for (const PagePlan& page : pages_) {
    all += page.held;
    if (page.passing_gradient_bytes == 0) continue;
    largest_passing = std::max(largest_passing, page.passing_gradient_bytes);
    ++passing;
  }
  all[Tier::kHost][Kind::kGradient] +=
      largest_passing * std::min<int64_t>(passing, TransientStorage::kBuffers);
  return all;
}

int64_t BytePlan::gradient_bytes() const {
  int64_t bytes = 0;
  for (const PagePlan& page : pages_) bytes += page.gradient_bytes;
  return bytes;
}

memory::TierBytes BytePlan::held_with_gradients(double states) const {
  memory::TierBytes all = held(states);
  all[Tier::kDevice][Kind::kGradient] += gradient_bytes();
  return all;
}

memory::TierBytes BytePlan::states(double states) const {
  memory::TierBytes all;
  for (const PagePlan& page : pages_) {
    all[page.optimizer_tier][Kind::kOptimizerState] +=
        std::llround(static_cast<double>(page.state_bytes) * states);
  }
  return all;
}

int64_t BytePlan::transient_bytes() const {
  int64_t largest_page_bytes = 0;
  int64_t largest_bucket_bytes = 0;
  for (const PagePlan& page : pages_) {
    if (page.parameters == Sharing::kSharded) {
      largest_page_bytes = std::max(largest_page_bytes, page.whole_bytes);
    }
    largest_bucket_bytes = std::max(largest_bucket_bytes, page.bucket_bytes);
  }
  // On one rank a page is its shard, unless that leaves.
  if (places_.others.ranks == 1 && options_.offload.parameters == Tier::kDevice)
    return largest_bucket_bytes;
  return largest_bucket_bytes + (options_.parameter_budget_bytes > 0
                                     ? options_.parameter_budget_bytes
                                     : 2 * largest_page_bytes);
}

memory::TierBytes formula_bytes(const Options& options, int64_t parameters, int world_size,
                                double states) {
  const Manner manner = manner_of(options);
  const PagePlan page = plan_of(options, manner);
  memory::TierBytes formula;
  for (const Buffer& buffer : buffers_of(page, manner)) {
    if (passes(options, buffer) || goes_when_zeroed(buffer)) continue;
    formula[buffer.tier][buffer.kind] +=
        bytes_without_padding(options, buffer, parameters, world_size);
  }
  if (page.parameters == Sharing::kSharded) {
    formula[Tier::kDevice][Kind::kParameter] +=
        secondary_bytes(options, bytes_of_element(manner.dtype) * parameters, world_size);
  }
  const int64_t state_bytes = bytes_of_state(options, manner.dtype, options.optimizer_state,
                                             /*first_in_block=*/0, parameters);
  const bool updates_shard = page.parameters != Sharing::kReplicated;
  formula[page.optimizer_tier][Kind::kOptimizerState] = std::llround(
      states * static_cast<double>(updates_shard ? state_bytes / sharing_ranks(options, world_size)
                                                 : state_bytes));
  return formula;
}

int64_t formula_gradient_bytes(const Options& options, int64_t parameters, int world_size) {
  const Manner manner = manner_of(options);
  int64_t bytes = 0;
  for (const Buffer& buffer : buffers_of(plan_of(options, manner), manner)) {
    if (!goes_when_zeroed(buffer)) continue;
    bytes += bytes_without_padding(options, buffer, parameters, world_size);
  }
  return bytes;
}

std::vector<HigherStage> higher_stages(const Options& options, int highest) {
  const Stage now = options.stage;
  std::vector<HigherStage> stages;
  for (int number = 1; number <= highest; ++number) {
    HigherStage higher{number, options};
    Stage& stage = higher.options.stage;
    stage = stage_of(number);
    const bool keeps = stage.optimizer_state >= now.optimizer_state &&
                       stage.gradients >= now.gradients && stage.parameters >= now.parameters;
    if (keeps && !(stage == now)) stages.push_back(std::move(higher));
  }
  return stages;
}

bool shards_states(const Options& options) {
  return options.stage.optimizer_state;
}

bool shards_parameters(const Options& options) {
  return options.stage.parameters;
}

bool shards_gradients(const Options& options) {
  return options.stage.gradients;
}

}  // namespace zeropage::zero
