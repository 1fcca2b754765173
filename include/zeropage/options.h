// `Options` of a wrapped module: stage, pages, precision, offload, limits.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include "zeropage/bytes.h"
#include "zeropage/detail/state_format.h"
#include "zeropage/ledger.h"

// Which modules of a tree are meant, by type or by name.
//
//   options.stays_fp32 = ModuleSelection::of_type<torch::nn::LayerNorm>() |
//                        ModuleSelection::named({"*.router", "head"});

namespace zeropage {

class ModuleSelection {
 public:
  static ModuleSelection none() { return {}; }

  // torch::nn::BatchNorm1d, 2d and 3d, and parallel::SyncBatchNorm.
  static ModuleSelection batch_norms();

  // Module holders (torch::nn::LayerNorm) or classes of modules; derived ones too.
  template <typename... M>
  static ModuleSelection of_type() {
    ModuleSelection selection;
    (selection.add([](const std::string&, const torch::nn::Module& module) {
      return dynamic_cast<const Class<M>*>(&module) != nullptr;
    }),
     ...);
    return selection;
  }

  // patterns: of whole names, "blocks.3.norm"; * is any characters, ? is one. The wrapped module
  // itself is "".
  static ModuleSelection named(const std::vector<std::string>& patterns);

  // Your own rule. It must say the same on all ranks.
  static ModuleSelection where(
      std::function<bool(const std::string& name, const torch::nn::Module& module)> rule) {
    ModuleSelection selection;
    selection.add(std::move(rule));
    return selection;
  }

  friend ModuleSelection operator|(ModuleSelection left, const ModuleSelection& right) {
    left.rules_.insert(left.rules_.end(), right.rules_.begin(), right.rules_.end());
    return left;
  }

  bool contains(const std::string& name, const torch::nn::Module& module) const;

 private:
  using Rule = std::function<bool(const std::string&, const torch::nn::Module&)>;

  template <typename M>
  struct ClassOf {
    using type = M;
  };
  template <typename M>
  requires requires { typename M::ContainedType; }
  struct ClassOf<M> {
    using type = typename M::ContainedType;
  };
  template <typename M>
  using Class = typename ClassOf<M>::type;

  void add(Rule rule) { rules_.push_back(std::move(rule)); }

  std::vector<Rule> rules_;
};

// Which part of a rank's training state leaves its device, and when the optimizer's step on it is
// made.
// When the optimizer's step on offloaded state is computed. Results of the first two are the same.
enum class StepWhen : uint8_t {
  // In step(), page by page: while one is updated, gradients come down and parameters go up.
  kInStep,
  // A page is updated as soon as its gradient is reduced, while backward goes on. Each backward (of
  // an accumulator, its last) must then be followed by step(), with the options of that moment: what
  // looks at all gradients first (clipping, a loss scale that changes, norm spikes) is refused, and
  // so is a change of gradients or options in between, and a second backward() without zero_grad() (gradients are freed).
  kInBackward,
  // step() starts the update and the next step() takes it over, so it is computed beside a whole
  // forward and backward, whose parameters are one step old (Ren et al. 2021, "ZeRO-Offload",
  // section 5.2, delayed parameter update). Results differ from a run without. A write to p.grad() waits for
  // the update that reads it. Only for parameters that stay on the device, for kHost, and for all states: not with
  // optimizer_bytes.
  kOneStepLate,
};

struct OffloadOptions {
  // The tier of what the optimizer needs: fp32 values (the parameters' or their master weights),
  // its states, and, unless kDevice, the reduced gradients. kNvme: gradients are on the host. For
  // optimizers with a fused form (kHasFusedForm of zeropage/optimizer.h). Bytes an owned element: 4 of values, 4 a state,
  // and a gradient.
  memory::Tier optimizer = memory::Tier::kDevice;

  // The tier of sharded parameters: a page is brought when operators use it. The optimizer's fp32
  // values are then these, not a copy. Needs stage 3, on one rank too.
  memory::Tier parameters = memory::Tier::kDevice;

  // The most bytes of values, states and gradients that leave a rank: pages from the end of the
  // module, whose gradients come first, as long as they fit; the others stay.
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  int64_t optimizer_bytes = kAll;

  StepWhen step = StepWhen::kInStep;

  // For kNvme: a folder on a local disk.
  std::string nvme_directory = {};

  // Threads of the offloaded step, beside LibTorch's and pinned to the rank's cores. 0: one for
  // each core.
  int worker_threads = 0;

  // Makes copies between the tiers take as long as over a link of that speed in each direction, to
  // measure pipelines on a machine without one; host devices only. 0: as fast as they go.
  int64_t link_bytes_per_second = 0;

  bool any() const {
    return optimizer != memory::Tier::kDevice || parameters != memory::Tier::kDevice;
  }
};

// The user's choices about sharding. docs/options.md has a line on each option, made from the table in
// zeropage/option_fields.h.
// What is sharded over ranks (Rajbhandari et al. 2020, "ZeRO", section 5): a set, of which the
// stages of ZeRO are four. Sharded gradients or parameters need a sharded optimizer state.
//
//   options.stage = Stage::kParameters;
//   options.stage = {.optimizer_state = true, .parameters = true};  // whole gradients
struct Stage {
  bool optimizer_state = false;
  bool gradients = false;
  bool parameters = false;

  // Bytes a rank for P fp32 parameters, Adam and N ranks, with gradients, which are there from backward to zero_grad():
  static const Stage kReplicated;      // stage 0: 16 P
  static const Stage kOptimizerState;  // stage 1: 8 P + 8 P / N
  static const Stage kGradients;       // stage 2: 4 P + 12 P / N
  static const Stage kParameters;      // stage 3: 16 P / N

  friend bool operator==(const Stage&, const Stage&) = default;
};

inline constexpr Stage Stage::kReplicated{};
inline constexpr Stage Stage::kOptimizerState{.optimizer_state = true};
inline constexpr Stage Stage::kGradients{.optimizer_state = true, .gradients = true};
inline constexpr Stage Stage::kParameters{
    .optimizer_state = true, .gradients = true, .parameters = true};

// The stage of that number, 0 to 3; throws for other numbers.
Stage stage_of(int number);
// Stages of ZeRO by their number, other sets by their parts.
std::string text_of(const Stage& stage);

// When the memory of sharded parameters is given back.
enum class Reshard : uint8_t {
  kAfterUse,       // a page goes after its last use in forward and in backward; with a budget, when
                   // another needs its room
  kAfterBackward,  // stays from forward to the end of backward: one gather a backward, not two
  kAfterStep,      // stays through all micro-batches: one gather a step
};

// What computes the optimizer's update.
enum class UpdateBy : uint8_t {
  kAuto,   // kFused where the class has such a form, else kClass
  kClass,  // the torch::optim class itself: its bits
  kFused,  // one pass over memory: the same formulas, rounded otherwise. For classes with such a form (kHasFusedForm of
           // zeropage/optimizer.h); the same bits on the host and on CUDA
};

// How parameters in bfloat16 or half are updated.
enum class LowPrecisionUpdate : uint8_t {
  // The optimizer updates an fp32 copy of what this rank owns and rounds it into them (Micikevicius
  // et al. 2018, "Mixed Precision Training", section 3.1). Costs 4 bytes an owned parameter, and
  // keeps updates that are too small for the parameter's precision. What is written to parameters,
  // by operators or past them, becomes the copy, element by element; the others keep their lower bits.
  kMasterWeights,
  // The same copy, kept as the 16 bits that the bfloat16 parameter lacks: 2 bytes an owned
  // parameter instead of 4. The copy has the bits that kMasterWeights gives it from the same
  // gradients, but parameters are rounded halves away from zero instead of to even, so a tie is
  // another bfloat16. By the fused update alone. For bfloat16.
  kSplitMasterWeights,
  // No copy: the update is computed in fp32 and rounded up or down at random, so that small updates
  // count on average (Zamirai et al. 2020, "Revisiting BFloat16 Training", section 4). For bfloat16.
  // While a page is updated it costs 4 bytes an owned element of it.
  kStochasticRounding,
  // The update that torch::optim makes of such parameters: what is below half a unit in the last
  // place is lost.
  kNearest,
};

struct Options {
  // ---- what is computed where ----

  Stage stage = Stage::kOptimizerState;

  static constexpr int kAllRanks = 0;
  // Shards over groups of this many neighbouring ranks, each of which has all of the model (hybrid sharding).
  // Gathers stay within a group, which should be the ranks of a host. Shards of gradients are summed between
  // groups, once a step if micro-steps accumulate. Results are those of a single group. They have the same bits if
  // this is a power of two, gradients travel as fp32 and nothing accumulates. Needs stage 1 or more. By default all
  // ranks are one group.
  int shard_within = kAllRanks;

  static constexpr int kNoSecondaryShards = 0;
  // Keeps each page a second time within groups of this many neighbouring ranks, such as those of a host, from its
  // forward to the end of the step: backward gathers it within such a group (hpZ in Wang et al. 2023, "ZeRO++",
  // section 3.2). Each rank then holds a group's share of the parameters beside its shard. Results
  // have the same bits. Needs stage 3 with parameters on the device. By default backward gathers over all
  // ranks.
  int secondary_shard_within = kNoSecondaryShards;

  UpdateBy update_by = UpdateBy::kAuto;

  // Each backward that averages ends by giving all ranks rank 0's buffers (running means), so that
  // several forwards may come before it; a training forward without gradients begins with it. Only buffers that some
  // rank has written to since are sent, which ranks tell each other by a byte a buffer in a message that a backward sends
  // anyway; those of floating point with at most one dimension, such as running means, are always sent. A write through
  // data_ptr() or .data() is seen on the host, to a few elements of a buffer of more than 64 KiB within 64 backwards. On
  // an accelerator it is not seen: write by operators there. Costs a broadcast of what is sent; nothing for a module
  // without buffers.
  bool broadcast_buffers = true;

  // The same bits for any power-of-two split of the same micro-batches over ranks and micro-steps:
  // gradients are summed as one pairwise tree over all of them, numbered micro-step times ranks plus
  // rank, in fp32. Needs a power of two of ranks, a fixed order of reductions, and as many threads a
  // rank; and an Accumulator, which knows what the micro-steps of a step are. Between these p.grad() may not be
  // looked at. Costs a reduction a micro-step and up to log2(micro-steps) gradients of the owned part.
  bool world_invariant = false;

  // Once in so many steps ranks compare, bit by bit, all that several of them have: whole parameters at stages 0 to 2,
  // what a tensor-parallel group has whole, the shards that groups of shard_within have alike, experts, both copies of a
  // pipeline's tied weight, and buffers that nobody writes. So a bit that flipped in the memory of one rank ends in an
  // error that names the parameter and the rank, in that step, and reaches no saved state: saves compare all of it, too.
  // 0: neither does. Options of optimizers are compared in each step, whatever this is. Costs a look at what is compared,
  // and 48 bytes each between the groups of shard_within and between the two ends of a pipeline (docs/replicas.md).
  int64_t compare_replicas = 100;

  // ---- precision ----

  // bfloat16, half or double: wrapping an fp32 module casts its parameters to it, and so gathers, gradients and
  // activations have it; buffers keep their dtype. Tensors of floating point among forward's
  // arguments are cast to it. Master weights of bfloat16 and half begin with the fp32 values. double has none and
  // is updated by the optimizer's class; it is for comparing runs. Unset: the module's dtype.
  std::optional<c10::ScalarType> compute_dtype = {};

  // Modules whose own parameters stay fp32. Their forward gets activations in compute_dtype: LibTorch's norms take
  // both dtypes on the host, and batch norm does on CUDA.
  ModuleSelection stays_fp32 = ModuleSelection::batch_norms();

  LowPrecisionUpdate low_precision_update = LowPrecisionUpdate::kMasterWeights;

  // The format of the optimizer's states. Only the fused update keeps them in less than fp32. Bytes
  // for each owned parameter of AdamW or Adam: fp32 8, bf16 4, 8 bits 2.03; of momentum, Adagrad
  // and Lion half of that. bf16 is rounded up or down at random; 8 bits are quantised by blocks of
  // 256 elements of a page, cut at parameters, each with a scale (optim/quantisation_map.h).
  // Parameters of fewer than 4096 elements keep fp32 instead of 8 bits. The bits depend neither on
  // ranks and stage nor on threads.
  StateFormat optimizer_state = StateFormat::kFp32;

  // Seed of stochastic rounding: of kStochasticRounding, and of states in bf16.
  uint64_t rounding_seed = 0;

  // The dtype in which gradients travel between ranks; sums over ranks are fp32 in between. Unset:
  // the parameter's dtype, or fp32 where world_invariant. Gradients in double travel and are summed in double.
  std::optional<c10::ScalarType> reduce_dtype = {};

  // The dtype in which gradients of parameters in a lower precision are kept, and in which
  // micro-steps add up: fp32, or that of the parameters, which saves 2 bytes an element and is
  // enough where nothing accumulates. Unset: fp32.
  std::optional<c10::ScalarType> accumulate_dtype = {};

  // ---- memory and speed, never results ----

  static constexpr int64_t kPageBytesOfDevice = 0;  // as many as suit the device
  // Parameters are grouped into pages of about this size; a gradient is reduced as soon as its page
  // is complete. Smaller pages overlap more of backward and cost more messages. A parameter is
  // never split. Unset: 16 MiB on the host, 64 MiB on an accelerator, whose links want more at once.
  int64_t page_bytes = kPageBytesOfDevice;

  // What leaves the device. By default nothing.
  OffloadOptions offload = {};

  // ---- limits ----

  static constexpr int64_t kNoLimit = 0;
  // The most bytes of tensors that a rank holds on its device from wrapping on. What is held from step to
  // step is compared with it before anything is moved. From there on an allocation that would pass it throws, and
  // the error names the kind, the page and the phase. zeropage::fit (zeropage/fit.h) chooses the settings
  // that keep below it. On CUDA it is a limit of LibTorch's allocator.
  int64_t device_memory_bytes = kNoLimit;
  // The same for the memory of a host, which its ranks share in equal parts: tensors there, and what is
  // offloaded there. Where the device is the host, both limits count its tensors. What a process has besides
  // tensors, such as code, some 200 MB, is in neither.
  int64_t host_memory_bytes = kNoLimit;

  // ---- memory and speed of sharded parameters ----

  // The most bytes of whole parameters that a rank holds at once. An operator that needs more throws. 0: with
  // kAfterUse the two largest pages, or what one operator needs; otherwise no limit.
  int64_t parameter_budget_bytes = 0;

  static constexpr int64_t kTwoLargestPages = -1;
  // How far ahead of their use pages are gathered, in bytes of pages and within the budget. 0: not ahead. By
  // default the two largest pages.
  int64_t prefetch_bytes = kTwoLargestPages;

  Reshard reshard = Reshard::kAfterUse;

  // The least size of a page that is sharded: parameters of smaller pages stay whole on every rank.
  int64_t minimum_sharded_bytes = 0;
};

// options.page_bytes, or the device's.
int64_t page_bytes_on(c10::Device device, const Options& options = {});

// The dtypes of gradients, for parameters of that dtype.
c10::ScalarType reduce_dtype_of(const Options& options, c10::ScalarType parameters);
c10::ScalarType accumulate_dtype_of(const Options& options, c10::ScalarType parameters);

// The format of the optimizer's states for a parameter of that many elements.
StateFormat state_format_of(const Options& options, int64_t parameter_numel);

// Whether it is bfloat16 or half.
bool is_low_precision(c10::ScalarType dtype);

// The options with what is about sharded parameters alone, which is stage 3, at its defaults.
Options without_sharded_parameters(Options options);

// Throws for a value, or a combination of values, that is not supported.
void validate(const Options& options);

// The options as lines "field: value", for comparing ranks; made of their table (zero/option_fields.cpp).
std::vector<std::string> describe(const Options& options);

}  // namespace zeropage
