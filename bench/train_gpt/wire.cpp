#include "bench/train_gpt/wire.h"

#include <algorithm>

#include "zero/setup/sharded_model.h"

namespace train_gpt {

using zeropage::comm::Traffic;
using zeropage::comm::WireTraffic;

std::array<Traffic*, kOperations> operations(WireTraffic& sent) {
  return {&sent.all_gather, &sent.reduce_scatter, &sent.all_reduce,
          &sent.broadcast,  &sent.pair,           &sent.all_to_all};
}

WireTraffic SentByAxis::total() const {
  WireTraffic sum;
  for (WireTraffic of_axis : axes) {
    const auto from = operations(of_axis);
    const auto to = operations(sum);
    for (size_t index = 0; index < to.size(); ++index) {
      to[index]->bytes += from[index]->bytes;
      to[index]->messages += from[index]->messages;
    }
  }
  return sum;
}

std::vector<std::pair<std::string_view, zeropage::World>> worlds_of(
    const zeropage::DistributedDataParallelBase& model) {
  const zeropage::zero::PageWorlds& worlds = sharded_parameters_of(model).pages->worlds();
  std::vector<std::pair<std::string_view, zeropage::World>> found = {{"data", worlds.all}};
  if (worlds.replicas) {
    found.emplace_back("shard", worlds.shards);
    found.emplace_back("replica", *worlds.replicas);
  }
  if (worlds.same_experts) found.emplace_back("same_experts", *worlds.same_experts);
  if (worlds.secondary) found.emplace_back("secondary", *worlds.secondary);
  return found;
}

SentByAxis sent_by_axis(TrainedGpt& trained, const Places& places) {
  SentByAxis sent;
  const auto along = [&sent](std::string_view name) -> WireTraffic& {
    const auto axis = std::find(kAxes.begin(), kAxes.end(), name) - kAxes.begin();
    return sent.axes[static_cast<size_t>(axis)];
  };
  for (const auto& [name, world] : worlds_of(trained.model())) {
    along(name) = world.communicator().wire_traffic();
  }
  for (const char* axis : {"expert", "context", "tensor"}) {
    if (const zeropage::World* const world = places.along(axis)) {
      along(axis) = world->communicator().wire_traffic();
    }
  }
  along("pipeline") = trained.sent_along_pipeline();
  return sent;
}

nlohmann::json wire_json(int rank, const WireTraffic& sent, int64_t Traffic::*figure) {
  return {{"rank", rank},
          {"all_gather", sent.all_gather.*figure},
          {"reduce_scatter", sent.reduce_scatter.*figure},
          {"all_reduce", sent.all_reduce.*figure},
          {"broadcast", sent.broadcast.*figure},
          {"send", sent.pair.*figure},
          {"all_to_all", sent.all_to_all.*figure}};
}

nlohmann::json axes_json(int rank, const SentByAxis& sent) {
  nlohmann::json json = {{"rank", rank}};
  for (size_t axis = 0; axis < kAxes.size(); ++axis) {
    json[std::string(kAxes[axis])] = wire_json(rank, sent.axes[axis], &Traffic::bytes);
    json[std::string(kAxes[axis])].erase("rank");
  }
  return json;
}

}  // namespace train_gpt
