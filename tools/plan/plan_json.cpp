#include "tools/plan/plan_json.h"

namespace zeropage::tools {
namespace {

using memory::Tier;
using nlohmann::json;

constexpr std::array kEachTier = {Tier::kDevice, Tier::kHost, Tier::kNvme};

json kinds(const memory::Breakdown& bytes) {
  json object = {{"total", bytes.total()}};
  for (size_t kind = 0; kind < memory::kKindCount; ++kind) {
    object[std::string(memory::name(static_cast<memory::Kind>(kind)))] = bytes.bytes[kind];
  }
  return object;
}

json by_tier(const memory::TierBytes& bytes) {
  json object;
  for (const Tier tier : kEachTier) object[std::string(memory::name(tier))] = kinds(bytes[tier]);
  return object;
}

json of(const comm::Traffic& traffic) {
  return {{"bytes", traffic.bytes}, {"messages", traffic.messages}};
}

json of(const Forecast& forecast) {
  const PlannedSetting& setting = forecast.setting;
  json missing;
  for (const Tier tier : kEachTier) {
    missing[std::string(memory::name(tier))] = forecast.missing_bytes[static_cast<size_t>(tier)];
  }
  return {{"stage", text_of(setting.stage)},
          {"offload_optimizer", memory::name(setting.optimizer)},
          {"offload_parameters", memory::name(setting.parameters)},
          {"checkpoint", name(setting.checkpointing)},
          {"held", by_tier(forecast.held)},
          {"at_peak", by_tier(forecast.at_peak)},
          {"reserved_bytes", forecast.reserved_bytes},
          {"sent",
           {{"within_host", of(forecast.sent.within_host)},
            {"between_hosts", of(forecast.sent.between_hosts)}}},
          {"flops", forecast.flops},
          {"seconds", forecast.seconds},
          {"fits", forecast.fits()},
          {"missing_bytes", missing}};
}

}  // namespace

json to_json(const Plan& plan) {
  json object = {{"parameters", plan.parameters},
                 {"has_steps", plan.has_steps},
                 {"world",
                  {{"ranks", plan.world.ranks},
                   {"ranks_per_host", plan.world.ranks_per_host},
                   {"context", plan.world.context},
                   {"expert", plan.world.expert},
                   {"device_memory_bytes", plan.world.device_memory_bytes},
                   {"host_memory_bytes", plan.world.host_memory_bytes},
                   {"nvme_bytes", plan.world.nvme_bytes},
                   {"allocator", name(plan.world.allocator.segments)},
                   {"workspace_bytes", plan.world.allocator.workspaces.of_products}}},
                 {"settings", json::array()}};
  for (const Forecast& forecast : plan.forecasts) object["settings"].push_back(of(forecast));
  const auto index_of = [&](const Forecast* forecast) {
    return forecast == nullptr ? json() : json(forecast - plan.forecasts.data());
  };
  object["choice"] = index_of(plan.choice());
  object["next_best"] = index_of(plan.next_best());
  return object;
}

}  // namespace zeropage::tools
