// Bytes at offsets, wherever they come from.
#pragma once

#include <cstdint>
#include <string>

namespace zeropage::state {

// Where the bytes of a file come from. Free of what a file is, so that a parser's tests need none.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  virtual const std::string& name() const = 0;  // for errors
  virtual uint64_t size() const = 0;            // in bytes
  // [offset, offset + bytes) of it, which are there. Throws where they cannot be read.
  virtual void read(uint64_t offset, char* to, uint64_t bytes) const = 0;
};

}  // namespace zeropage::state
