// What a rank sent, by the world in which it did: of those that have other samples, of the group of them that shares
// pages, of its replicas, of the group that shares a second copy, of those that have the same experts, of those that have
// all of them, of those that compute the same samples, and of those that have the other layers.
#pragma once

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/train_gpt/places.h"
#include "bench/train_gpt/trained_gpt.h"
#include "zeropage/world.h"
#include "zeropage/zeropage.h"

namespace train_gpt {

constexpr std::array<std::string_view, 9> kAxes = {"data",      "shard",        "replica",
                                                   "secondary", "same_experts", "expert",
                                                   "context",   "tensor",       "pipeline"};

// By kAxes; zeros for what there is not (--shard-within, --secondary-shard-within, --expert-parallel, --context, --tensor,
// --pipeline).
struct SentByAxis {
  std::array<zeropage::comm::WireTraffic, kAxes.size()> axes;

  zeropage::comm::WireTraffic total() const;
};

// Those worlds of a model but the last four, by their axes.
std::vector<std::pair<std::string_view, zeropage::World>> worlds_of(
    const zeropage::DistributedDataParallelBase& model);
SentByAxis sent_by_axis(TrainedGpt& trained, const Places& places);

// The operations that training uses, in the order of the JSON.
inline constexpr size_t kOperations = 6;
std::array<zeropage::comm::Traffic*, kOperations> operations(zeropage::comm::WireTraffic& sent);

// A rank's entry in "wire_bytes" or "wire_messages", and in "wire_bytes_by_axis".
nlohmann::json wire_json(int rank, const zeropage::comm::WireTraffic& sent,
                         int64_t zeropage::comm::Traffic::*figure);
nlohmann::json axes_json(int rank, const SentByAxis& sent);

}  // namespace train_gpt
