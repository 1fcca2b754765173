// XXH3 of 64 bits. Free of torch.
#pragma once

#include <cstdint>
#include <string_view>

namespace zeropage::state::detail {

uint64_t hash_of(std::string_view bytes);

}  // namespace zeropage::state::detail
