// What is wrong with a file of this folder: which file, where in it, what was expected and what is there.
// Free of LibTorch.
#pragma once

#include <stdexcept>
#include <string>

namespace zeropage::text {

class TextError : public std::runtime_error {
 public:
  // file: its path, or what else the text came from. what: expected, got and what to do.
  TextError(const std::string& file, const std::string& what)
      : std::runtime_error(file + ": " + what) {}
};

}  // namespace zeropage::text
