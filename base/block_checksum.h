// The checksum of a block: XXH3 of 64 bits, by its bytes alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace zeropage::base {

uint64_t block_checksum(const std::byte* data, int64_t bytes);
std::string to_hex(uint64_t checksum);  // 16 digits

}  // namespace zeropage::base
