// flashquant: the one program. Subcommands only; each does its work in its own file and stores the
// exit code.
#include <exception>
#include <iostream>
#include <new>
#include <system_error>

#include "CLI/CLI.hpp"
#include "engine/base/exit_code.h"
#include "engine/tools/commands.h"
#include "server/commands.h"

int main(int argc, char** argv) {
  CLI::App app{"FlashQuant: serves INT4 language models with sparse outliers over gRPC."};
  app.name("flashquant");
  app.set_version_flag("--version", "flashquant " FQ_VERSION);
  app.require_subcommand(1);
  int exit_code = 0;
  flashquant::AddServeCommand(app, &exit_code);
  flashquant::AddGenerateCommand(app, &exit_code);
  flashquant::AddHealthCommand(app, &exit_code);
  flashquant::AddLoadtestCommand(app, &exit_code);
  flashquant::AddTokenCommand(app, &exit_code);
  flashquant::AddQuantizeCommand(app, &exit_code);
  flashquant::AddInspectCommand(app, &exit_code);
  flashquant::AddTokenizeCommand(app, &exit_code);
  flashquant::AddPerplexityCommand(app, &exit_code);
  flashquant::AddCompareCommand(app, &exit_code);
  flashquant::AddCompleteCommand(app, &exit_code);
  flashquant::AddBenchCommand(app, &exit_code);
  // CLI11 alone would say no more than that a subcommand is required.
  const auto is_asked_for = [&](const CLI::App* command) { return command->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_asked_for).empty()) {
    std::cerr << "flashquant: no subcommand '" << argv[1] << "' (flashquant --help lists them)\n";
    return flashquant::kExitUsage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 throws for --help and --version too, with code 0.
    return app.exit(error) == 0 ? 0 : flashquant::kExitUsage;
  } catch (const std::bad_alloc&) {
    std::cerr << "flashquant: out of memory\n";
    return flashquant::kExitSystem;
  } catch (const std::system_error& error) {
    // What the standard library throws when no thread can be made.
    std::cerr << "flashquant: a system resource is exhausted (threads?): " << error.what() << '\n';
    return flashquant::kExitSystem;
  } catch (const std::exception& error) {
    std::cerr << "flashquant: " << error.what() << '\n';
    return flashquant::kExitInternal;
  }
  return exit_code;
}
