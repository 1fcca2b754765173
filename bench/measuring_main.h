// What main() of a benchmark does with its command line and its errors.
#pragma once

#include <functional>
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>

#include "zeropage/check.h"

namespace bench {

// The exit status: 0 (measured, or --help), 1 (could not run; the error is on stderr), 2 (command
// line).
inline int parse_and_measure(const std::string& program, CLI::App& app, int argc, char** argv,
                             const std::function<void()>& measure) {
  constexpr int kRuntimeError = 1;
  constexpr int kUsageError = 2;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  try {
    measure();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << program << ": " << zeropage::memory::message_of(error) << std::endl;
    return kRuntimeError;
  }
}

}  // namespace bench
