// flashquant health: asks a running server whether it serves.
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "engine/base/exit_code.h"
#include "fmt/format.h"
#include "kernels/base/status_macros.h"
#include "server/client_flags.h"
#include "server/commands.h"
#include "server/inference_client.h"
#include "server/local_target.h"
#include "server/server_config.h"

namespace flashquant {
namespace {

struct HealthFlags {
  ClientFlags client;
  bool local = false;
  std::string config_file;
  std::string service;
  double timeout_seconds = 5;
};

absl::StatusOr<LocalTarget> FindTarget(const HealthFlags& flags) {
  if (flags.local) {
    ConfigSources sources;
    sources.environment = OwnEnvironment();
    sources.file = flags.config_file;
    return FindLocalTarget(sources, flags.client);
  }
  FQ_ASSIGN_OR_RETURN(ClientSecurity security, LoadClientSecurity(flags.client));
  return LocalTarget{flags.client.target, std::move(security)};
}

int RunHealth(const HealthFlags& flags) {
  const absl::StatusOr<LocalTarget> target = FindTarget(flags);
  if (!target.ok()) return ReportStatus(target.status());
  InferenceClient client(target->target, target->security);
  CallOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(flags.timeout_seconds * 1e3));
  CallResult result;
  switch (client.Health(flags.service, &result, options)) {
    case HealthState::kServing:
      fmt::print("serving\n");
      return 0;
    case HealthState::kNotServing:
      fmt::print("not serving\n");
      return kExitUnavailable;
    case HealthState::kNoSuchService:
      fmt::print("unknown service\n");
      return kExitUsage;
    case HealthState::kUnknown:
      fmt::print("unknown\n");
      return kExitUnavailable;
    case HealthState::kUnreachable:
      fmt::print("unreachable\n");
      fmt::print(stderr, "flashquant: {}: {}\n", target->target, result.message);
      return kExitUnavailable;
  }
  return kExitInternal;
}

}  // namespace

void AddHealthCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<HealthFlags>();
  CLI::App* command =
      app.add_subcommand("health", "Ask a server whether it serves; exit code 0 if it does");
  AddClientFlags(&flags->client, command);
  CLI::Option* local = command->add_flag(
      "--local", flags->local,
      "ask the server of this machine or container: its port and TLS from the same variables and "
      "file as serve's; its certificate is not checked");
  local->excludes("--target");
  command
      ->add_option("--config", flags->config_file, "with --local: JSON file [$FLASHQUANT_CONFIG]")
      ->needs(local);
  command->add_option("--service", flags->service,
                      "name: empty = the server, or model/<name>, or the service's full name");
  command->add_option("--timeout", flags->timeout_seconds, "seconds")
      ->check(CLI::Range(0.001, 3600.0))
      ->capture_default_str();
  command->callback([flags, exit_code] { *exit_code = RunHealth(*flags); });
}

}  // namespace flashquant
