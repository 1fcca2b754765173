// Bytes in memory as a file that parsers read.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "zeropage/saved_state.h"

namespace zeropage::testing {

class ByteText final : public state::ByteSource {
 public:
  explicit ByteText(std::string bytes, std::string name = "a file")
      : name_(std::move(name)), bytes_(std::move(bytes)) {}

  const std::string& name() const override { return name_; }
  uint64_t size() const override { return bytes_.size(); }
  void read(uint64_t offset, char* to, uint64_t bytes) const override {
    if (offset > bytes_.size() || bytes > bytes_.size() - offset) {
      throw std::logic_error("a parser read bytes that are not there");
    }
    bytes_.copy(to, bytes, offset);
  }

 private:
  const std::string name_;
  const std::string bytes_;
};

}  // namespace zeropage::testing
