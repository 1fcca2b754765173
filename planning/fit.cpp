#include "zeropage/fit.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <sstream>
#include <utility>

#include "device/stream.h"
#include "memory/expandable_segments.h"
#include "planning/fewer_samples.h"
#include "zero/setup/memory_limits.h"
#include "zero/setup/memory_need.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/device.h"

namespace zeropage {
namespace {

using memory::format_bytes;
using memory::Tier;

bool has(const std::vector<Tier>& tiers, Tier tier) {
  return std::find(tiers.begin(), tiers.end(), tier) != tiers.end();
}

// Whether the optimizer's step can be the fused one, which is made in any tier.
bool can_leave(const Options& options) {
  return options.update_by != UpdateBy::kClass && options.compute_dtype != c10::kDouble &&
         options.low_precision_update == LowPrecisionUpdate::kMasterWeights;
}

void check(const comm::World& world, const Options& options, const FitOptions& fit_options) {
  const std::vector<Tier>& tiers = fit_options.tiers;
  const std::string& directory = fit_options.nvme_directory;
  const int64_t nvme_bytes = fit_options.nvme_bytes;
  ZP_CHECK(options.device_memory_bytes != Options::kNoLimit ||
               options.host_memory_bytes != Options::kNoLimit,
           "fit(): expected a limit to fit into, options.device_memory_bytes or "
           "host_memory_bytes; got none");
  const OffloadOptions& offload = options.offload;
  const bool is_optimizer = offload.optimizer != Tier::kDevice;
  ZP_CHECK(!offload.any(), "fit(): chooses what leaves the device, but options.offload.",
           is_optimizer ? "optimizer" : "parameters", " is ",
           memory::name(is_optimizer ? offload.optimizer : offload.parameters),
           "; leave it out, or set FitOptions::tiers to where it may be");
  ZP_CHECK(
      !has(tiers, Tier::kNvme) || !directory.empty(),
      "FitOptions::tiers: Tier::kNvme needs FitOptions::nvme_directory, a folder on a local disk");
  ZP_CHECK(nvme_bytes >= 0, "FitOptions::nvme_bytes: expected 0 (what the disk has) or more, got ",
           nvme_bytes);
  ZP_CHECK(fit_options.besides_bytes >= 0,
           "FitOptions::besides_bytes: expected 0 or more bytes to leave free, got ",
           fit_options.besides_bytes);
  ZP_CHECK(fit_options.besides_device_bytes >= 0,
           "FitOptions::besides_device_bytes: expected 0 or more bytes to leave free, got ",
           fit_options.besides_device_bytes);
  ZP_CHECK(nvme_bytes == 0 || !directory.empty(),
           "FitOptions::nvme_bytes: ", format_bytes(nvme_bytes),
           " of no folder; set nvme_directory, or leave it out");
  const bool may_leave =
      std::any_of(tiers.begin(), tiers.end(), [](Tier tier) { return tier != Tier::kDevice; });
  ZP_CHECK(!may_leave || can_leave(options),
           "FitOptions::tiers: only an optimizer with a fused update of fp32 values can leave the "
           "device; set options.update_by to UpdateBy::kAuto and low_precision_update to "
           "LowPrecisionUpdate::kMasterWeights, or leave tiers out");
  const int context = fit_options.context, expert = fit_options.expert;
  ZP_CHECK(context >= 1 && expert >= 1 && world.size() % (int64_t{context} * expert) == 0,
           "FitOptions::context, expert: expected numbers of ranks whose product divides the ",
           world.size(), " of the world, got ", context, " and ", expert,
           "; give the sizes of these axes of the mesh");
  validate(options_of(options, {.stage = Stage::kParameters}));
}

std::vector<Tier> tiers_to_try(const comm::World& world, const Options& options,
                               const FitOptions& fit_options) {
  if (!fit_options.tiers.empty()) return fit_options.tiers;
  std::vector<Tier> tiers = {Tier::kDevice};
  if (!can_leave(options)) return tiers;
  if (!world.device().is_cpu()) tiers.push_back(Tier::kHost);
  if (!fit_options.nvme_directory.empty()) tiers.push_back(Tier::kNvme);
  return tiers;
}

// From the default on to smaller ones, then without what is fetched ahead.
std::vector<PagingSetting> paging_to_try(const comm::World& world, const Options& options,
                                         const FitOptions& fit_options) {
  constexpr int64_t kLeastPageBytes = int64_t{1} << 20;
  std::vector<PagingSetting> settings = {{}};
  // Their blocks of 256 elements are counted from a page's beginning, so other pages round otherwise.
  const bool pages_decide = options.optimizer_state == StateFormat::k8Bit;
  int64_t page_bytes = Options::kPageBytesOfDevice;
  if (options.page_bytes == Options::kPageBytesOfDevice && !pages_decide) {
    constexpr int64_t kShrink = 4;
    const int64_t first = page_bytes_on(world.device());
    for (int64_t bytes = first / kShrink; bytes >= kLeastPageBytes; bytes /= kShrink) {
      page_bytes = bytes;
      settings.push_back({.page_bytes = bytes});
    }
  }
  if (options.prefetch_bytes == Options::kTwoLargestPages) {
    settings.push_back({.page_bytes = page_bytes, .prefetch_bytes = 0});
  }
  if (!fit_options.may_step_in_backward || options.offload.step != StepWhen::kInStep) {
    return settings;
  }
  const size_t in_step = settings.size();
  for (size_t index = 0; index < in_step; ++index) {
    PagingSetting in_backward = settings[index];
    in_backward.step = StepWhen::kInBackward;
    settings.push_back(in_backward);
  }
  return settings;
}

int64_t nvme_bytes_of(const FitOptions& fit_options) {
  if (fit_options.nvme_directory.empty() || fit_options.nvme_bytes > 0) {
    return fit_options.nvme_bytes;
  }
  std::error_code error;
  const auto space = std::filesystem::space(fit_options.nvme_directory, error);
  ZP_CHECK(!error, "FitOptions::nvme_directory: ", fit_options.nvme_directory, ": ",
           error.message(), "; expected a folder on a local disk");
  // A full disk is not one without a limit.
  return std::max<int64_t>(1, static_cast<int64_t>(space.available));
}

// What a rank holds already, such as its data, is not there any more. For a limit, not for none.
int64_t left_of(int64_t limit_bytes, int64_t held_bytes) {
  if (limit_bytes == Options::kNoLimit) return Options::kNoLimit;
  return std::max<int64_t>(1, limit_bytes - limit_bytes / zero::kForecastMarginPart - held_bytes);
}

// What ranks of a host take for their messages beside each other (under 1 MiB), as far as it is not there yet. No simulated
// world has it.
int64_t transport_bytes(const comm::World& world) {
  constexpr int64_t kMostBytes = int64_t{1} << 20;
  if (world.size() == 1 || !world.device().is_cpu()) return 0;
  const int64_t held = memory::Ledger::current()->now()[memory::Kind::kStaging];
  return std::max<int64_t>(0, kMostBytes - held);
}

DeviceAllocator allocator_of(const comm::World& world, const FitOptions& fit_options) {
  if (fit_options.allocator) return *fit_options.allocator;
  const c10::Device device = world.device();
  if (!device::has_streams(device.type())) return {.segments = AllocatorSegments::kNone};
  const bool grow = device.is_cuda() && memory::uses_expandable_segments();
  return {.segments = grow ? AllocatorSegments::kExpandable : AllocatorSegments::kFixed,
          .workspaces = memory::product_workspaces(device)};
}

WorldDescription description_of(const comm::World& world, const Options& options,
                                const FitOptions& fit_options) {
  const memory::Ledger& ledger = *memory::Ledger::current();
  const auto ranks = static_cast<int64_t>(world.local_size());
  // Where the device is the host, what is taken of either is taken of both.
  const int64_t on_device = fit_options.besides_device_bytes;
  const bool device_is_host = world.device().is_cpu();
  const int64_t besides =
      fit_options.besides_bytes + (device_is_host ? on_device + transport_bytes(world) : 0);
  return {.ranks = world.size(),
          .ranks_per_host = world.local_size(),
          .context = fit_options.context,
          .context_form = fit_options.context_form,
          .expert = fit_options.expert,
          .device_memory_bytes =
              left_of(options.device_memory_bytes, ledger.now(world.device().type()).total() +
                                                       (device_is_host ? besides : on_device)),
          .host_memory_bytes = left_of(
              options.host_memory_bytes,
              ranks * (ledger.now().total() + ledger.offloaded(Tier::kHost).total() + besides)),
          .nvme_bytes = nvme_bytes_of(fit_options),
          .device_is_host = device_is_host,
          .allocator = allocator_of(world, fit_options)};
}

// What the script does for the choice.
std::string line_for_script(const Plan& plan, const Forecast& choice) {
  const CheckpointPolicy policy = choice.setting.checkpointing;
  if (policy == CheckpointPolicy::kNone) return "";
  if (policy == CheckpointPolicy::kBlocks && plan.blocks.empty()) {
    return "make regions of the blocks, as ModelToPlan::checkpoint_blocks does";
  }
  return "around forward and loss: ActivationScope forward(recompute), with auto recompute = "
         "zeropage::recompute(model, fitted) behind the model";
}

std::string describe(const Plan& plan, const Forecast& choice) {
  const WorldDescription& world = plan.world;
  std::string text = to_string(choice.setting);
  if (choice.setting.checkpointing == CheckpointPolicy::kBlocks && !plan.blocks.empty()) {
    text += ", " + plan.blocks;
  }
  if (plan.micro_steps > 1 && world.ranks > 1) {
    text += "; micro-steps are reduced " + choice.reduction->to_string();
  }
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    const int64_t limit = world.bytes_of_rank(tier);
    if (limit == 0 || choice.used_bytes(world, tier) == 0) continue;
    const bool is_reserved = tier == Tier::kDevice && choice.reserved_bytes > 0;
    text +=
        c10::str("; ", format_bytes(choice.used_bytes(world, tier)), " of ", format_bytes(limit),
                 is_reserved ? " reserved on " : " on ", memory::name(tier));
  }
  return text;
}

// What all ranks are told.
struct Choice {
  PlannedSetting setting;
  memory::TierBytes at_peak;
  std::vector<std::string> lists_of_blocks;
  std::string description;
  std::string for_script;
};

// A choice as text between ranks: numbers, then a line for each text.
std::string encode(const Choice& choice) {
  const PlannedSetting& setting = choice.setting;
  std::ostringstream out;
  out << text_of(setting.stage) << ' ' << static_cast<int>(setting.optimizer) << ' '
      << static_cast<int>(setting.parameters) << ' ' << static_cast<int>(setting.checkpointing)
      << ' ' << setting.paging.page_bytes << ' ' << setting.paging.prefetch_bytes << ' '
      << static_cast<int>(setting.paging.step);
  for (const memory::Breakdown& tier : choice.at_peak.by_tier) {
    for (const int64_t bytes : tier.bytes) out << ' ' << bytes;
  }
  out << ' ' << choice.lists_of_blocks.size() << '\n'
      << choice.description << '\n'
      << choice.for_script;
  // The module itself has no name.
  for (const std::string& list : choice.lists_of_blocks) out << '\n' << list;
  return out.str();
}

Choice decode(const std::string& text) {
  std::istringstream in(text);
  int stage = 0, optimizer = 0, parameters = 0, checkpointing = 0, step = 0;
  Choice choice;
  PlannedSetting& setting = choice.setting;
  in >> stage >> optimizer >> parameters >> checkpointing >> setting.paging.page_bytes >>
      setting.paging.prefetch_bytes >> step;
  for (memory::Breakdown& tier : choice.at_peak.by_tier) {
    for (int64_t& bytes : tier.bytes) in >> bytes;
  }
  size_t lists = 0;
  in >> lists;
  in.get();
  setting.stage = stage_of(stage);
  setting.optimizer = static_cast<Tier>(optimizer);
  setting.parameters = static_cast<Tier>(parameters);
  setting.checkpointing = static_cast<CheckpointPolicy>(checkpointing);
  setting.paging.step = static_cast<StepWhen>(step);
  std::getline(in, choice.description);
  std::getline(in, choice.for_script);
  choice.lists_of_blocks.resize(lists);
  for (std::string& list : choice.lists_of_blocks) std::getline(in, list);
  return choice;
}

// The choice of a plan; nothing fits: none.
std::optional<Choice> choice_of(const Plan& plan) {
  const Forecast* const best = plan.choice();
  if (best == nullptr) return std::nullopt;
  Choice choice{.setting = best->setting,
                .at_peak = best->at_peak,
                .description = describe(plan, *best),
                .for_script = line_for_script(plan, *best)};
  if (best->setting.checkpointing == CheckpointPolicy::kBlocks) {
    choice.lists_of_blocks = plan.lists_of_blocks;
  }
  return choice;
}

// What an error about memory compares with: the forecast, and what this rank held before.
memory::ExpectedPeak expected_peak(const comm::World& world, const memory::TierBytes& at_peak,
                                   const Options& options) {
  const memory::Ledger& ledger = *memory::Ledger::current();
  memory::ExpectedPeak expected{.counted_by = "fit()",
                                .on_device = at_peak[Tier::kDevice],
                                .on_host = at_peak[Tier::kHost],
                                .options = zeropage::describe(options)};
  const memory::Breakdown held = ledger.now(world.device().type());
  const memory::Breakdown offloaded = ledger.offloaded(Tier::kHost);
  for (size_t kind = 0; kind < memory::kKindCount; ++kind) {
    expected.on_device.bytes[kind] += held.bytes[kind];
    expected.on_host.bytes[kind] += offloaded.bytes[kind];
  }
  return expected;
}

// The line to write, where a smaller micro-batch makes it fit; else "". The rest of the step is as it was. samples: of a
// micro-batch; 0: not known.
std::string with_smaller(const detail::MakePlannedModel& make, detail::Blocks blocks,
                         const WorldDescription& described, PlanOptions asked, int64_t samples) {
  const int64_t micro_steps = asked.micro_steps;
  for (int64_t pieces = 2; pieces <= samples; pieces *= 2) {
    const planning::FewerSamples fewer(pieces);
    asked.micro_steps = micro_steps * pieces;
    try {
      const Plan plan = detail::plan(make, blocks, described, asked);
      if (const auto found = choice_of(plan)) {
        const int64_t planned = fewer.planned_samples();
        return c10::str("with micro-batches of ", planned, " samples instead of ", samples,
                        " it fits: give fit() a sample of ", planned,
                        ", FitOptions::micro_steps = ", asked.micro_steps,
                        " and an Accumulator of as many: ", found->description, '\n');
      }
    } catch (const std::exception&) {
      // A forward that takes no fewer samples.
      return "";
    }
  }
  return "";
}

}  // namespace

checkpointing::Recompute recompute(const DistributedDataParallelBase& model, const Fitted& fitted) {
  using checkpointing::RecomputeOptions;
  RecomputeOptions options = RecomputeOptions::nothing();
  if (fitted.checkpointing == CheckpointPolicy::kSelective) {
    options = RecomputeOptions::selective();
  } else if (!fitted.blocks.empty()) {
    // The module itself has no name, and is found without.
    const bool is_module = fitted.blocks.front().empty();
    options = RecomputeOptions::by_blocks(checkpointing::find_blocks(
        model.untyped_module(), is_module ? std::vector<std::string>() : fitted.blocks));
  }
  return recompute(model, std::move(options));
}

namespace detail {

Fitted fit(const MakePlannedModel& make, Blocks blocks, const comm::World& world,
           const Options& options, const FitOptions& fit_options) {
  check(world, options, fit_options);
  world.check_agreement("the options of fit()", zeropage::describe(options));
  std::string error;
  std::string choice;
  if (world.rank() == 0) {
    try {
      const WorldDescription described = description_of(world, options, fit_options);
      // A simulated rank is on no device, whose pages it would have.
      Options training = options;
      training.page_bytes = page_bytes_on(world.device(), options);
      PlanOptions asked{.training = training,
                        .micro_steps = fit_options.micro_steps,
                        .reduce = fit_options.reduce,
                        .gradient_budget_bytes = fit_options.gradient_budget_bytes,
                        .tiers = tiers_to_try(world, options, fit_options),
                        .stages = fit_options.stages,
                        .policies = fit_options.policies,
                        .blocks = fit_options.blocks,
                        .paging = paging_to_try(world, options, fit_options)};
      const planning::FewerSamples whole(/*pieces=*/1);
      const Plan plan = detail::plan(make, blocks, described, asked);
      if (const auto found = choice_of(plan)) {
        choice = encode(*found);
      } else {
        error = c10::str("fit(): no setting keeps below the limits of memory\n", plan,
                         with_smaller(make, blocks, described, asked, whole.samples()));
      }
    } catch (const std::exception& failure) {  // the model's own, too: the others wait
      error = memory::message_of(failure);
    }
  }
  zeropage::zero::throw_alike(world, "what fits", error);
  const Choice chosen = decode(world.gather_text("what was chosen", choice)[0]);
  const PlannedSetting& setting = chosen.setting;
  Fitted fitted{.options = options_of(options, setting),
                .checkpointing = setting.checkpointing,
                .blocks = chosen.lists_of_blocks,
                .description = chosen.description,
                .for_script = chosen.for_script};
  if (setting.optimizer == Tier::kNvme) {
    fitted.options.offload.nvme_directory = fit_options.nvme_directory;
  }
  memory::Ledger::current()->expect(expected_peak(world, chosen.at_peak, fitted.options));
  return fitted;
}

}  // namespace detail
}  // namespace zeropage
