// Files of weights alone, whoever wrote them, into a wrapped model.
#pragma once

#include <filesystem>

#include "zeropage/detail/model_ref.h"
#include "zeropage/saving.h"

namespace zeropage::saving {

// Whether rank 0 finds such a file, or an index of some, and no folder of states. Collective.
bool is_plain_weights(const comm::World& texts, const std::filesystem::path& path);

// Each rank opens the path by open_weights(), and load_weights() takes it. Collective.
LoadReport load_plain_weights(const std::filesystem::path& path, const ModelRef& model,
                              const LoadOptions& options);

}  // namespace zeropage::saving
