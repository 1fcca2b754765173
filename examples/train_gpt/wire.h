// What a rank sent, by the world in which it did: of those that have other samples, of the group of them that shares
// pages, of its replicas, and of those that compute the same samples.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "comm/world.h"
#include "examples/train_gpt/places.h"
#include "zero/zeropage.h"

namespace train_gpt {

constexpr std::array<std::string_view, 4> kAxes = {"data", "shard", "replica", "tensor"};

// By kAxes; zeros for what there is not (--shard-within, --tensor).
struct SentByAxis {
  std::array<zeropage::comm::WireTraffic, kAxes.size()> axes;

  zeropage::comm::WireTraffic total() const;
};

// Those worlds of a model but the last one.
std::vector<zeropage::World> worlds_of(const zeropage::DistributedDataParallelBase& model);
SentByAxis sent_by_axis(const zeropage::DistributedDataParallelBase& model, const Places& places);

// The operations that training uses, in the order of the JSON.
std::array<zeropage::comm::Traffic*, 4> operations(zeropage::comm::WireTraffic& sent);

// A rank's entry in "wire_bytes" or "wire_messages", and in "wire_bytes_by_axis".
nlohmann::json wire_json(int rank, const zeropage::comm::WireTraffic& sent,
                         int64_t zeropage::comm::Traffic::*figure);
nlohmann::json axes_json(int rank, const SentByAxis& sent);

}  // namespace train_gpt
