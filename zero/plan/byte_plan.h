// What a rank will hold of each page, by kind and by tier: made of the layout and the options, before
// anything is allocated.
//
// Everything that asks for these bytes, or for what the stage shards, reads the plan: the pages, the
// gradients' buckets, the refusals of what does not fit, and programs that print what a run needs.
//
// The states of an optimizer are counted apart, since how many there are is known when it is made.
//
// A value. Bytes include the padding of shards, but padding has no state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "zero/layout/shard_layout.h"
#include "zeropage/ledger.h"
#include "zeropage/options.h"

namespace zeropage::zero {

// How the ranks share the parameters of a page, or its gradient.
enum class Sharing : uint8_t {
  kReplicated,  // each rank has all of it, and updates all of it
  kOwned,       // each rank has all of it, and updates its shard
  kSharded,     // each rank has its shard alone
};

// What one rank updates of each page.
enum class Ownership : uint8_t {
  kWholePage,  // all ranks compute the same update
  kShard,      // each rank its shard; the others take it over
};

// What a rank keeps beside the parameters in a lower precision that it updates.
enum class MasterWeightsAs : uint8_t {
  kNone,
  kFp32,        // a copy; also of fp32 parameters whose optimizer left without them
  kRemainders,  // the 16 bits that make fp32 of bf16 (optim/split_value.h)
};

struct PagePlan {
  Sharing parameters = Sharing::kReplicated;
  Sharing gradients = Sharing::kReplicated;
  // What this rank updates, as elements of the page.
  Range owned;
  memory::Tier parameter_tier = memory::Tier::kDevice;
  // The tier of what the optimizer needs: master weights and states. If it is not the device, the
  // reduced gradient is on the host.
  memory::Tier optimizer_tier = memory::Tier::kDevice;
  MasterWeightsAs masters = MasterWeightsAs::kNone;

  c10::ScalarType gradient_dtype = c10::ScalarType::Float;  // in which its gradient is kept
  c10::ScalarType reduce_dtype = c10::ScalarType::Float;    // in which that travels between ranks

  // Bytes of its parameters while they are whole.
  int64_t whole_bytes = 0;
  // Bytes of this rank's own gradient, before any reduction; without padding.
  int64_t own_gradient_bytes = 0;
  // What the reduction of its gradient takes on the device besides; 0 where it travels as it lies.
  int64_t bucket_bytes = 0;
  // Bytes of its reduced gradient on the host, if that is freed as soon as the page is updated: then it is not in
  // `held`, and a few such gradients are there at once (zero/tiers/transient_storage.h).
  int64_t passing_gradient_bytes = 0;
  // Bytes of one state of the optimizer.
  int64_t state_bytes = 0;
  // From step to step, but for states and gradients that pass.
  memory::TierBytes held;
  // Bytes of its gradient on the device, whole or the shard, from the first gradient of a backward until it is zeroed.
  int64_t gradient_bytes = 0;
};

class BytePlan {
 public:
  // A plan without pages.
  BytePlan() = default;
  // Throws for a page that cannot leave the device as the options say.
  BytePlan(const std::vector<PageLayout>& layouts, const Options& options,
           const PlacesOfRank& places);

  const std::vector<PagePlan>& pages() const { return pages_; }
  const PagePlan& operator[](size_t page) const { return pages_[page]; }
  Ownership ownership() const;
  // How all pages share their gradients.
  Sharing gradients() const;

  // The page was frozen, and trains from here on. Its optimizer stays on the device if its parameters do, and is
  // where they are otherwise.
  void begin_training(size_t page, const PageLayout& layout);

  // What this rank holds from step to step, with an optimizer of that many states for each parameter, in the mean: between zero_grad() and the next
  // backward.
  memory::TierBytes held(double states) const;
  // What its gradients take on the device besides, from backward to zero_grad().
  int64_t gradient_bytes() const;
  // Both: what it holds at the end of a backward.
  memory::TierBytes held_with_gradients(double states) const;
  // The states alone.
  memory::TierBytes states(double states) const;
  // What it holds on the device besides while a step runs: two largest pages, or the budget, and a bucket.
  int64_t transient_bytes() const;

 private:
  Options options_;
  PlacesOfRank places_ = PlaceOfRank();
  std::vector<PagePlan> pages_;
};

// What a rank holds from step to step of an fp32 module of that many parameters, as if nothing were padded and all
// of it sharded, cast and offloaded as the options say. states: of the optimizer, for each parameter, in the mean.
memory::TierBytes formula_bytes(const Options& options, int64_t parameters, int world_size,
                                double states);
// What its gradients take on the device besides, from backward to zero_grad(). ZeRO's formula (Rajbhandari et al. 2020,
// section 5) is the sum of both.
int64_t formula_gradient_bytes(const Options& options, int64_t parameters, int world_size);

// The options at a stage that shards all that theirs does, and more.
struct HigherStage {
  int number = 0;
  Options options;

  // "stage 2".
  std::string words() const { return "stage " + std::to_string(number); }
};
// Up to that stage, the lowest first.
std::vector<HigherStage> higher_stages(const Options& options, int highest);

// What the options say of all pages, for who has none yet. Sharded parameters and sharded gradients
// need a module, whose forward and backward are followed.
bool shards_states(const Options& options);
bool shards_parameters(const Options& options);
bool shards_gradients(const Options& options);

}  // namespace zeropage::zero
