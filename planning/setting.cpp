#include <algorithm>
#include <array>
#include <utility>

#include "zero/plan/byte_plan.h"
#include "zeropage/bytes.h"
#include "zeropage/plan.h"

namespace zeropage {

using memory::Tier;

int64_t WorldDescription::bytes_of_rank(memory::Tier tier) const {
  // 0 is for what is not known. A share of less than a byte is not that.
  const auto share_of = [sharing = int64_t{std::min(ranks, ranks_per_host)}](int64_t bytes) {
    return bytes == 0 ? 0 : std::max<int64_t>(1, bytes / sharing);
  };
  switch (tier) {
    case Tier::kDevice:
      return device_memory_bytes;
    case Tier::kHost:
      return share_of(host_memory_bytes);
    case Tier::kNvme:
      break;
  }
  return share_of(nvme_bytes);
}

std::string_view name(AllocatorSegments segments) {
  constexpr std::array<std::string_view, 3> kNames = {"expandable", "fixed", "none"};
  return kNames[static_cast<size_t>(segments)];
}

std::string_view name(CheckpointPolicy policy) {
  constexpr std::array<std::string_view, 3> kNames = {"none", "selective", "blocks"};
  return kNames[static_cast<size_t>(policy)];
}

namespace {

bool shards_parameters(const PlannedSetting& setting) {
  Options options;
  options.stage = setting.stage;
  return zero::shards_parameters(options);
}

}  // namespace

std::string to_string(const PlannedSetting& setting) {
  std::string text = "stage " + text_of(setting.stage);
  if (setting.optimizer != Tier::kDevice) {
    text +=
        setting.parameters == Tier::kDevice ? ", optimizer on " : ", optimizer and parameters on ";
    text += memory::name(setting.optimizer);
  }
  if (setting.checkpointing != CheckpointPolicy::kNone) {
    text += ", checkpoint " + std::string(name(setting.checkpointing));
  }
  const PagingSetting& paging = setting.paging;
  if (paging.page_bytes != Options::kPageBytesOfDevice) {
    text += ", pages of " + memory::format_bytes(paging.page_bytes);
  }
  if (paging.prefetch_bytes == 0 && shards_parameters(setting)) text += ", no prefetch";
  if (paging.step == StepWhen::kInBackward && setting.optimizer != Tier::kDevice) {
    text += ", step in backward";
  }
  return text;
}

Options options_of(const Options& training, const PlannedSetting& setting) {
  Options options = training;
  const PagingSetting& paging = setting.paging;
  options.stage = setting.stage;
  options.offload.optimizer = setting.optimizer;
  options.offload.parameters = setting.parameters;
  if (setting.optimizer == Tier::kDevice) {
    options.offload.step = StepWhen::kInStep;
  } else if (paging.step != StepWhen::kInStep) {
    options.offload.step = paging.step;
  }
  if (paging.page_bytes != Options::kPageBytesOfDevice) options.page_bytes = paging.page_bytes;
  if (zero::shards_parameters(options)) {
    if (paging.prefetch_bytes != Options::kTwoLargestPages) {
      options.prefetch_bytes = paging.prefetch_bytes;
    }
    if (setting.parameters != Tier::kDevice) {
      options.secondary_shard_within = Options::kNoSecondaryShards;
    }
    return options;
  }
  return without_sharded_parameters(std::move(options));
}

}  // namespace zeropage
