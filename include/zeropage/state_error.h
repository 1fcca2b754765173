// What is wrong with state on disk: which file, where in it, what was expected and what is there; or
// which call of the operating system failed, and why. Free of torch.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace zeropage::state {

class StateError : public std::runtime_error {
 public:
  // offset: in the file, in bytes. what_to_do: "" or the end of the message.
  StateError(const std::string& file, uint64_t offset, const std::string& expected,
             const std::string& got, const std::string& what_to_do = "")
      : StateError(file, offset,
                   "byte " + std::to_string(offset) + ": expected " + expected + ", got " + got +
                       (what_to_do.empty() ? "" : "; " + what_to_do)) {}

  // what: the message without the file.
  StateError(const std::string& file, uint64_t offset, const std::string& what)
      : std::runtime_error(file + ": " + what), file_(file), offset_(offset) {}

  // The same error elsewhere, such as on another rank. message: as what() is to say it.
  static StateError as_said(const std::string& message, const std::string& file, uint64_t offset) {
    return {Said{message}, file, offset};
  }

  const std::string& file() const { return file_; }
  uint64_t offset() const { return offset_; }

 private:
  struct Said {
    const std::string& message;
  };
  StateError(const Said& said, const std::string& file, uint64_t offset)
      : std::runtime_error(said.message), file_(file), offset_(offset) {}

  std::string file_;
  uint64_t offset_;
};

}  // namespace zeropage::state
