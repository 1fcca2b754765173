#include "command_line/command_line.h"

#include <charconv>

#include <CLI/CLI.hpp>
#include <zeropage/bytes.h>
#include <zeropage/check.h>

namespace examples {
namespace {

// holds: of the number.
template <typename Holds>
CLI::Validator number_that(Holds holds, const std::string& expected, const std::string& name) {
  return {[holds, expected](const std::string& text) -> std::string {
            double number = 0;
            const auto [end, error] =
                std::from_chars(text.data(), text.data() + text.size(), number);
            const bool is_number = error == std::errc() && end == text.data() + text.size();
            return is_number && holds(number) ? "" : text + ": expected " + expected;
          },
          name};
}

}  // namespace

std::optional<int> parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  return std::nullopt;
}

CLI::Validator positive() {
  return number_that([](double number) { return number > 0; }, "a number above 0", "POSITIVE");
}

CLI::Validator non_negative() {
  return number_that([](double number) { return number >= 0; }, "0 or more", "NONNEGATIVE");
}

CLI::Option* add_bytes(CLI::App& app, const std::string& flag, int64_t& bytes, int64_t least,
                       const std::string& help) {
  return app.add_option_function<std::string>(
      flag,
      [&bytes, flag, least](const std::string& text) {
        try {
          bytes = zeropage::memory::parse_bytes(text);
        } catch (const std::exception& error) {
          throw CLI::ValidationError(flag + ": " + zeropage::memory::message_of(error));
        }
        if (bytes >= least) return;
        throw CLI::ValidationError(flag + " " + text + ": expected " +
                                   zeropage::memory::format_bytes(least) + " or more");
      },
      help);
}

}  // namespace examples
