// Exchanges errors between ranks, so that all throw the same one.
#pragma once

#include <exception>
#include <functional>
#include <string>

#include <nlohmann/json.hpp>

#include "zeropage/world.h"

namespace zeropage::saving {

// Every rank gives what it has, or the error that it met; rank 0 makes one answer of all. Where a rank
// has an error, or rank 0 meets one, nothing is decided and all throw it: state::StateError, "rank 1: "
// in front where there are several ranks. decide: may throw. Collective.
using DecideJson = std::function<nlohmann::json(const std::vector<nlohmann::json>& by_rank)>;
nlohmann::json settle(const comm::World& world, const std::string& topic, const nlohmann::json& own,
                      const std::exception_ptr& error, const DecideJson& decide);

// Exchanges nothing but errors: returns if no rank has one.
void throw_alike(const comm::World& world, const std::string& topic,
                 const std::exception_ptr& error);

// Null if action ends.
std::exception_ptr error_of(const std::function<void()>& action);

}  // namespace zeropage::saving
