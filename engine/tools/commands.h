// The off-line subcommands of the program, one file each. Add*Command declares flags and help on
// `app`; when the user chose that subcommand, its callback runs it and stores the exit code
// (engine/base/exit_code.h).
#pragma once

#include "CLI/CLI.hpp"

namespace flashquant {

void AddQuantizeCommand(CLI::App& app, int* exit_code);
void AddInspectCommand(CLI::App& app, int* exit_code);
void AddTokenizeCommand(CLI::App& app, int* exit_code);
void AddPerplexityCommand(CLI::App& app, int* exit_code);
void AddCompareCommand(CLI::App& app, int* exit_code);
void AddCompleteCommand(CLI::App& app, int* exit_code);
void AddBenchCommand(CLI::App& app, int* exit_code);
// Of the command `bench`.
void AddBenchEngineCommand(CLI::App& bench, int* exit_code);
void AddBenchTuneCommand(CLI::App& bench, int* exit_code);

}  // namespace flashquant
