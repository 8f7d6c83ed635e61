// For programs whose arguments CLI11 parses.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>

#include "polykv/status.h"

namespace polykv {

/// Parses, and prints help or what is wrong. The code to exit with at once (docs/exit-codes.md), if any: 0 after help.
inline std::optional<int> parse_command_line(CLI::App& app, int argument_count, char** arguments) {
  try {
    app.parse(argument_count, arguments);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(POLYKV_ERR_INVALID_ARGUMENT);
  }
}

}  // namespace polykv
