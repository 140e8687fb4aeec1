// Runs flashquant quantize, inspect, compare and perplexity by their command lines, inside the
// test.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "engine/tools/commands.h"
#include "gtest/gtest.h"

namespace flashquant {

struct CommandResult {
  int exit_code = -1;
  std::string out;
  std::string err;
};

inline CommandResult RunCommand(std::vector<std::string> arguments) {
  CLI::App app;
  CommandResult result;
  AddQuantizeCommand(app, &result.exit_code);
  AddInspectCommand(app, &result.exit_code);
  AddCompareCommand(app, &result.exit_code);
  AddPerplexityCommand(app, &result.exit_code);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes a vector
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    result.exit_code = 64;
    result.err = error.what();
  }
  std::fflush(stdout);
  result.out = testing::internal::GetCapturedStdout();
  result.err += testing::internal::GetCapturedStderr();
  return result;
}

}  // namespace flashquant
