#include "planning/setting.h"

#include <algorithm>
#include <array>

namespace zeropage {

using memory::Tier;

int64_t WorldDescription::bytes_of_rank(memory::Tier tier) const {
  const int64_t sharing = std::min(ranks, ranks_per_host);
  switch (tier) {
    case Tier::kDevice:
      return device_memory_bytes;
    case Tier::kHost:
      return host_memory_bytes / sharing;
    case Tier::kNvme:
      break;
  }
  return nvme_bytes / sharing;
}

std::string_view name(CheckpointPolicy policy) {
  constexpr std::array<std::string_view, 3> kNames = {"none", "selective", "blocks"};
  return kNames[static_cast<size_t>(policy)];
}

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
  return text;
}

}  // namespace zeropage
