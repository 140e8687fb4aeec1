// flashquant serve: its flags, and what they ask for besides serving.
#include <map>
#include <memory>
#include <string>
#include <variant>

#include "engine/base/exit_code.h"
#include "fmt/format.h"
#include "server/commands.h"
#include "server/serve_process.h"
#include "server/server_config.h"
#include "server/server_security.h"

namespace flashquant {
namespace {

struct ServeFlags {
  std::map<std::string, std::string> values;  // by key
  std::string config_file;
  bool check_config = false;
  bool print_options = false;
};

int RunServe(const ServeFlags& flags) {
  if (flags.print_options) {
    fmt::print("{}", ConfigOptionsMarkdown());
    return 0;
  }
  ConfigSources sources;
  sources.flags = flags.values;
  sources.environment = OwnEnvironment();
  sources.file = flags.config_file;
  const absl::StatusOr<ServerConfig> config = LoadServerConfig(sources);
  if (!config.ok()) return ReportStatus(config.status());
  if (flags.check_config) {
    const auto security = ServerSecurity::Load(SecurityPathsOf(*config));
    if (!security.ok()) return ReportStatus(security.status());
    for (const std::string& warning : (*security)->warnings()) fmt::print(stderr, "{}\n", warning);
    for (const std::string& line : DescribeConfig(*config)) fmt::print("{}\n", line);
    return 0;
  }
  return ServeUntilStopped(*config);
}

void AddOptionFlag(const ConfigOption& option, ServeFlags* flags, CLI::App* command) {
  const std::string key = option.key;
  std::string help = option.help;
  for (size_t i = 0; i < option.choices.size(); ++i) {
    help += fmt::format("{}{}", i == 0 ? ": " : ", ", option.choices[i]);
  }
  const std::string value = OptionText(option, ServerConfig());
  if (std::holds_alternative<bool ServerConfig::*>(option.member)) {
    command->add_flag_callback(
        option.flag, [flags, key] { flags->values[key] = "true"; }, help);
    return;
  }
  if (!value.empty()) help += fmt::format(" [{}]", value);
  command
      ->add_option_function<std::string>(
          option.flag, [flags, key](const std::string& text) { flags->values[key] = text; }, help)
      ->type_name("");
}

}  // namespace

void AddServeCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* command = app.add_subcommand("serve", "Serve a model over gRPC");
  command->footer(
      "Every option is also a key of the JSON file (--config) and an environment variable "
      "(FLASHQUANT_...; see --print-options).\nOrder: flag > environment > file > default.");
  for (const ConfigOption& option : ConfigOptions()) AddOptionFlag(option, flags.get(), command);
  command->add_option("--config", flags->config_file, "JSON file with options [$FLASHQUANT_CONFIG]")
      ->type_name("");
  command->add_flag("--check-config", flags->check_config,
                    "print the effective options and stop; the model is not opened");
  command->add_flag("--print-options", flags->print_options,
                    "print the table of all options with keys and variables (Markdown)");
  command->callback([flags, exit_code] { *exit_code = RunServe(*flags); });
}

}  // namespace flashquant
