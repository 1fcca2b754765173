// The generators of random numbers in a saved state: the host's, and the device's if that is an accelerator,
// of each rank by its places on the axes "data", "pipeline" and "tensor". So they come back to the ranks that
// do the same work, whatever the order of the axes. Along an axis whose ranks draw alike there is one.
//
// Threads: one for each rank. Errors: c10::Error.
#pragma once

#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <nlohmann/json.hpp>

#include "zeropage/detail/model_ref.h"

namespace zeropage::saving {

// This rank's places, and its generators as they are now.
nlohmann::json own_generators(const ModelRef& model);
// Those of all ranks as the manifest has them. by_rank: own_generators() of each.
nlohmann::json merged_generators(const std::vector<nlohmann::json>& by_rank);

// Why the generators of a state cannot be those of these ranks; empty if they can. Where the state has one
// for all ranks along "data" or "pipeline", those of now must be alike along it: ranks that were seeded apart
// shall not draw the same numbers from here on. by_rank: own_generators() of each.
std::string reason_to_stay(const nlohmann::json& saved, const std::vector<nlohmann::json>& by_rank);
// own: own_generators() of a model; its rank's generators go on where the state's did.
void set_generators(const nlohmann::json& saved, const nlohmann::json& own, const ModelRef& model);

// Seeds this rank's generators as those of all other ranks, for a load: whatever processes drew before, a state that has one
// generator for all ranks then fits them.
class SeededAlike {
 public:
  // device: the world's.
  explicit SeededAlike(c10::Device device);
  // The generators are again what they were: the load has left them alone.
  void put_back() const;

 private:
  const c10::Device device_;
  std::string host_state_;
  std::string device_state_;
};

}  // namespace zeropage::saving
