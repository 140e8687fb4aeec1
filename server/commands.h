// The subcommands of the program that use gRPC, one file each; the off-line ones are declared in
// engine/tools/commands.h. Add*Command declares flags and help on `app`; when the user chose that
// subcommand, its callback runs it and stores the exit code (engine/base/exit_code.h).
#pragma once

#include "CLI/CLI.hpp"

namespace flashquant {

void AddServeCommand(CLI::App& app, int* exit_code);
void AddGenerateCommand(CLI::App& app, int* exit_code);
void AddHealthCommand(CLI::App& app, int* exit_code);
void AddLoadtestCommand(CLI::App& app, int* exit_code);
void AddTokenCommand(CLI::App& app, int* exit_code);

}  // namespace flashquant
