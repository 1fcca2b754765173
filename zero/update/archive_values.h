// What a LibTorch class saves of itself, as JSON, and back: options of optimizers, loss scalers. Not as
// LibTorch's file, which is a pickle.
//
// Numbers, booleans, text, nothing and lists of them; a tuple is a list. Doubles keep their bits,
// infinities and NaN included.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <nlohmann/json.hpp>
#include <torch/serialize/archive.h>

namespace zeropage::zero {

using Save = std::function<void(torch::serialize::OutputArchive&)>;
using Load = std::function<void(torch::serialize::InputArchive&)>;

// By name, as they were written, archives within the archive left out.
std::vector<std::pair<std::string, c10::IValue>> saved_values(const Save& save);
// The tensors among them, as `save` wrote them: no copies.
std::vector<at::Tensor> tensors_in_place(const Save& save);

// Calls load with what fill has written.
void load_filled(const Save& fill, const Load& load);

// Archives within the archive.
enum class Nested : uint8_t { kLeftOut, kRefused };

// Throws c10::Error, with `who`, for a value of another kind.
nlohmann::json saved_json(const std::string& who, const Save& save,
                          Nested nested = Nested::kLeftOut);

// json: of saved_json(). Throws what load throws of missing or other values.
void load_json(const nlohmann::json& json, const Load& load);

}  // namespace zeropage::zero
