#include "zeropage/fit.h"

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <utility>

#include "device/stream.h"
#include "memory/expandable_segments.h"
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

void check(const Options& options, const FitOptions& fit_options) {
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
  const bool pages_decide = options.optimizer_state == offload::StateFormat::k8Bit;
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
  return std::max<int64_t>(1, limit_bytes - limit_bytes / kForecastMarginPart - held_bytes);
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
  if (!memory::has_streams(device.type())) return {.segments = AllocatorSegments::kNone};
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

std::string describe(const Plan& plan, const Forecast& choice) {
  const WorldDescription& world = plan.world;
  std::string text = to_string(choice.setting);
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

// A choice as text between ranks: numbers, then the description.
std::string encode(const PlannedSetting& setting, const std::string& description) {
  std::ostringstream out;
  out << text_of(setting.stage) << ' ' << static_cast<int>(setting.optimizer) << ' '
      << static_cast<int>(setting.parameters) << ' ' << static_cast<int>(setting.checkpointing)
      << ' ' << setting.paging.page_bytes << ' ' << setting.paging.prefetch_bytes << ' '
      << static_cast<int>(setting.paging.step) << ' ' << description;
  return out.str();
}

std::pair<PlannedSetting, std::string> decode(const std::string& text) {
  std::istringstream in(text);
  int stage = 0, optimizer = 0, parameters = 0, checkpointing = 0, step = 0;
  PlannedSetting setting;
  in >> stage >> optimizer >> parameters >> checkpointing >> setting.paging.page_bytes >>
      setting.paging.prefetch_bytes >> step;
  in.get();
  setting.stage = stage_of(stage);
  setting.optimizer = static_cast<Tier>(optimizer);
  setting.parameters = static_cast<Tier>(parameters);
  setting.checkpointing = static_cast<CheckpointPolicy>(checkpointing);
  setting.paging.step = static_cast<StepWhen>(step);
  std::string description;
  std::getline(in, description);
  return {setting, description};
}

}  // namespace

namespace detail {

Fitted fit(const MakePlannedModel& make, Blocks blocks, const comm::World& world,
           const Options& options, const FitOptions& fit_options) {
  check(options, fit_options);
  world.check_agreement("the options of fit()", zeropage::describe(options));
  std::string error;
  std::string choice;
  if (world.rank() == 0) {
    try {
      const WorldDescription described = description_of(world, options, fit_options);
      // A simulated rank is on no device, whose pages it would have.
      Options training = options;
      training.page_bytes = page_bytes_on(world.device(), options);
      const Plan plan = detail::plan(make, blocks, described,
                                     {.training = training,
                                      .micro_steps = fit_options.micro_steps,
                                      .reduce = fit_options.reduce,
                                      .gradient_budget_bytes = fit_options.gradient_budget_bytes,
                                      .tiers = tiers_to_try(world, options, fit_options),
                                      .stages = fit_options.stages,
                                      .policies = fit_options.policies,
                                      .paging = paging_to_try(world, options, fit_options)});
      if (const Forecast* const best = plan.choice()) {
        choice = encode(best->setting, describe(plan, *best));
      } else {
        error = c10::str("fit(): no setting keeps below the limits of memory\n", plan);
      }
    } catch (const std::exception& failure) {  // the model's own, too: the others wait
      error = memory::message_of(failure);
    }
  }
  zeropage::throw_alike(world, "what fits", error);
  const auto [setting, description] = decode(world.gather_text("what was chosen", choice)[0]);
  Fitted fitted{.options = options_of(options, setting),
                .checkpointing = setting.checkpointing,
                .description = description};
  if (setting.optimizer == Tier::kNvme) {
    fitted.options.offload.nvme_directory = fit_options.nvme_directory;
  }
  return fitted;
}

}  // namespace detail
}  // namespace zeropage
