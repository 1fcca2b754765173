#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>

#include "zeropage/bytes.h"
#include "zeropage/ledger.h"
#include "zeropage/plan.h"

namespace zeropage {
namespace {

using memory::format_bytes;
using memory::Tier;

constexpr std::array kEachTier = {Tier::kDevice, Tier::kHost, Tier::kNvme};

std::string cell(const std::string& text, int width) {
  std::ostringstream out;
  out << std::right << std::setw(width) << text;
  return out.str();
}

std::string bytes_cell(int64_t bytes, int width) {
  return cell(bytes == 0 ? "-" : format_bytes(bytes), width);
}

std::string text_of_flops(double flops) {
  constexpr std::array<const char*, 6> kUnits = {"", "k", "M", "G", "T", "P"};
  size_t unit = 0;
  while (flops >= 1000 && unit + 1 < kUnits.size()) {
    flops /= 1000;
    ++unit;
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << flops << ' ' << kUnits[unit]
      << "FLOP";
  return out.str();
}

std::string text_of_seconds(double seconds) {
  std::ostringstream out;
  out << std::setprecision(3);
  if (seconds < 1) {
    out << seconds * 1000 << " ms";
  } else {
    out << seconds << " s";
  }
  return out.str();
}

// "-", "optimizer: host" or "all: nvme".
std::string text_of_offload(const PlannedSetting& setting) {
  if (setting.optimizer == Tier::kDevice) return "-";
  const char* const what = setting.parameters == Tier::kDevice ? "optimizer: " : "all: ";
  return what + std::string(memory::name(setting.optimizer));
}

// What is missing most, of one that does not fit.
std::string shortage(const Forecast& forecast) {
  const auto most = std::max_element(forecast.missing_bytes.begin(), forecast.missing_bytes.end());
  const auto tier = static_cast<Tier>(most - forecast.missing_bytes.begin());
  return format_bytes(*most) + " of " + std::string(memory::name(tier)) + " missing";
}

bool tells_reserved(const Plan& plan) {
  return std::any_of(plan.forecasts.begin(), plan.forecasts.end(),
                     [](const Forecast& forecast) { return forecast.reserved_bytes > 0; });
}

// Whether pages were tried in several ways.
bool tells_paging(const Plan& plan) {
  return std::any_of(plan.forecasts.begin(), plan.forecasts.end(), [](const Forecast& forecast) {
    return !(forecast.setting.paging == PagingSetting());
  });
}

// How large pages are, how far ahead they are fetched, and whether the step is made in backward; "-" for the training's.
std::string text_of_paging(const PagingSetting& paging) {
  const std::string pages =
      paging.page_bytes == Options::kPageBytesOfDevice ? "-" : format_bytes(paging.page_bytes);
  const bool is_ahead = paging.prefetch_bytes == Options::kTwoLargestPages;
  return cell(pages, 11) + cell(is_ahead ? "-" : format_bytes(paging.prefetch_bytes), 10) +
         cell(paging.step == StepWhen::kInBackward ? "backward" : "-", 10);
}

std::string row(const Forecast& forecast, bool is_choice, bool tells_reserved, bool tells_paging) {
  const PlannedSetting& setting = forecast.setting;
  std::ostringstream out;
  out << (is_choice ? "* " : "  ") << std::left << std::setw(7) << text_of(setting.stage)
      << std::setw(17) << text_of_offload(setting) << std::setw(11) << name(setting.checkpointing)
      << (tells_paging ? text_of_paging(setting.paging) : "")
      << bytes_cell(forecast.at_peak[Tier::kDevice].total(), 11)
      << (tells_reserved ? bytes_cell(forecast.reserved_bytes, 11) : "")
      << bytes_cell(forecast.at_peak[Tier::kHost].total(), 11)
      << bytes_cell(forecast.at_peak[Tier::kNvme].total(), 11)
      << bytes_cell(forecast.sent.total().bytes, 12)
      << cell(forecast.flops == 0 ? "-" : text_of_flops(forecast.flops), 14)
      << (forecast.seconds == 0 ? "" : cell(text_of_seconds(forecast.seconds), 11)) << "  "
      << (forecast.fits() ? "yes" : "no: " + shortage(forecast)) << '\n';
  return out.str();
}

std::string by_kind(const Forecast& forecast) {
  std::vector<memory::MemoryColumn> columns;
  for (const Tier tier : kEachTier) {
    if (tier != Tier::kDevice && forecast.at_peak[tier].total() == 0) continue;
    columns.push_back({std::string(memory::name(tier)), forecast.at_peak[tier],
                       forecast.held[tier].persistent()});
  }
  return memory::memory_table(columns);
}

memory::Kind largest_kind(const memory::Breakdown& bytes) {
  const auto most = std::max_element(bytes.bytes.begin(), bytes.bytes.end());
  return static_cast<memory::Kind>(most - bytes.bytes.begin());
}

// The tier that is fullest, and what it is full of.
std::string limit_text(const WorldDescription& world, const Forecast& forecast) {
  Tier fullest = Tier::kDevice;
  double share = -1;
  for (const Tier tier : kEachTier) {
    if (world.bytes_of_rank(tier) == 0) continue;
    const double of_tier = static_cast<double>(forecast.used_bytes(world, tier)) /
                           static_cast<double>(world.bytes_of_rank(tier));
    if (of_tier <= share) continue;
    share = of_tier;
    fullest = tier;
  }
  if (share < 0) return "no limit is given, so all settings fit\n";
  memory::Breakdown bytes = forecast.at_peak[fullest];
  if (fullest == Tier::kHost && world.device_is_host) {
    for (size_t kind = 0; kind < memory::kKindCount; ++kind) {
      bytes.bytes[kind] += forecast.at_peak[Tier::kDevice].bytes[kind];
    }
  }
  const memory::Kind kind = largest_kind(bytes);
  const int64_t used = forecast.used_bytes(world, fullest);
  std::ostringstream out;
  out << "limited by " << memory::name(fullest) << " memory: " << format_bytes(used) << " of "
      << format_bytes(world.bytes_of_rank(fullest)) << " a rank";
  if (used != bytes.total()) {
    out << " are reserved for " << format_bytes(bytes.total()) << " of tensors";
  }
  out << ", of them " << format_bytes(bytes[kind]) << " " << memory::name(kind) << '\n';
  return out.str();
}

// A line, where a step has several micro-batches.
std::string reduction_text(const Plan& plan, const Forecast& forecast) {
  if (plan.micro_steps == 1 || !forecast.reduction || plan.world.ranks == 1) return "";
  return c10::str("gradients of ", plan.micro_steps, " micro-batches are reduced ",
                  forecast.reduction->to_string(), '\n');
}

// What the script is to do, where a setting recomputes blocks that were found.
std::string blocks_text(const Plan& plan, const Forecast& forecast) {
  if (plan.blocks.empty() || forecast.setting.checkpointing != CheckpointPolicy::kBlocks) return "";
  std::string lists;
  for (const std::string& list : plan.lists_of_blocks) {
    lists += (lists.empty() ? ", {\"" : "\", \"") + list;
  }
  // The module itself is found by no name.
  if (plan.lists_of_blocks.front().empty()) lists = "";
  return c10::str("blocks are ", plan.blocks,
                  ": zeropage::recompute(model, RecomputeOptions::by_blocks(find_blocks(*module",
                  lists, lists.empty() ? "" : "\"}", "))) around forward and loss\n");
}

std::string verdict_on_all(const Plan& plan) {
  const Forecast* const choice = plan.choice();
  std::ostringstream out;
  if (choice == nullptr) {
    const Forecast& nearest = plan.nearest();
    out << "nothing fits; nearest: " << zeropage::to_string(nearest.setting) << ", "
        << shortage(nearest) << '\n'
        << by_kind(nearest) << reduction_text(plan, nearest) << limit_text(plan.world, nearest)
        << blocks_text(plan, nearest) << "use more ranks, a smaller batch or a lower precision\n";
    if (!plan.without_blocks.empty()) out << "not tried: " << plan.without_blocks << '\n';
    return out.str();
  }
  out << "choice: " << to_string(choice->setting) << '\n'
      << by_kind(*choice) << reduction_text(plan, *choice) << blocks_text(plan, *choice)
      << limit_text(plan.world, *choice);
  if (const Forecast* const next = plan.next_best()) {
    out << "next best: " << to_string(next->setting) << ", "
        << format_bytes(next->at_peak[Tier::kDevice].total()) << " of device memory\n";
  } else {
    out << "no other setting fits\n";
  }
  return out.str();
}

}  // namespace

std::string Plan::to_string() const {
  const bool has_seconds = !forecasts.empty() && forecasts.front().seconds > 0;
  const bool has_reserved = tells_reserved(*this);
  const bool has_paging = tells_paging(*this);
  std::ostringstream out;
  out << parameters << " parameters on " << world.ranks << (world.ranks == 1 ? " rank" : " ranks")
      << ", " << std::min(world.ranks, world.ranks_per_host) << " a host; "
      << (has_steps ? "bytes at the peak of a step, and what a rank sends in one"
                    : "bytes at the end of backward: activations and traffic are not known")
      << (has_seconds ? "; the fastest first\n\n" : "; the cheapest first\n\n")
      << "  stage  offload          checkpoint "
      << (has_paging ? "     pages  prefetch      step" : "") << "     device"
      << (has_reserved ? "   reserved" : "") << "       host       nvme        sent       compute"
      << (has_seconds ? "       step" : "") << "  fits\n";
  const Forecast* const best = choice();
  for (const Forecast& forecast : forecasts) {
    out << row(forecast, &forecast == best, has_reserved, has_paging);
  }
  out << '\n' << verdict_on_all(*this);
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const Plan& plan) {
  return out << plan.to_string();
}

}  // namespace zeropage
