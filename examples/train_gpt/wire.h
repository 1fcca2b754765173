// What a rank sent, by the world in which it did: of all ranks, of the group that shares pages, of its replicas.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "comm/world.h"
#include "zero/zeropage.h"

namespace train_gpt {

constexpr std::array<std::string_view, 3> kAxes = {"world", "shard", "replica"};

// By kAxes; zeros for what there is not (--shard-within).
struct SentByAxis {
  std::array<zeropage::comm::WireTraffic, kAxes.size()> axes;

  zeropage::comm::WireTraffic total() const;
};

// Those worlds of a model, beginning with all ranks.
std::vector<zeropage::World> worlds_of(const zeropage::DistributedDataParallelBase& model);
SentByAxis sent_by_axis(const zeropage::DistributedDataParallelBase& model);

// The operations that training uses, in the order of the JSON.
std::array<zeropage::comm::Traffic*, 4> operations(zeropage::comm::WireTraffic& sent);

// A rank's entry in "wire_bytes" or "wire_messages", and in "wire_bytes_by_axis".
nlohmann::json wire_json(int rank, const zeropage::comm::WireTraffic& sent,
                         int64_t zeropage::comm::Traffic::*figure);
nlohmann::json axes_json(int rank, const SentByAxis& sent);

}  // namespace train_gpt
