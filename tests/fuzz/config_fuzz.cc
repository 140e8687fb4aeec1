// Server configuration (target F9). Input: a byte, then a JSON file's text (even byte) or lines
// "key=value" (odd) that become flags and, when they start with FLASHQUANT_, the environment.
//
// Properties: no crash; what is refused is refused as wrong configuration and in words; what is
// accepted has every number in the range of its option, passes Validate, and can be described.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "server/server_config.h"
#include "tests/fuzz/fuzz_input.h"

namespace flashquant {
namespace {

void CheckAccepted(const ServerConfig& config) {
  for (const ConfigOption& option : ConfigOptions()) {
    std::visit(
        [&](auto member) {
          using Value = std::remove_cvref_t<decltype(config.*member)>;
          if constexpr (!std::is_same_v<Value, std::string> && !std::is_same_v<Value, bool>) {
            const auto value = static_cast<double>(config.*member);
            Require(value >= option.min && value <= option.max, option.key);
          }
        },
        option.member);
  }
  Require(DescribeConfig(config).size() == ConfigOptions().size(), "an option is not described");
}

void CheckRefused(const absl::Status& status) {
  Require(status.code() == absl::StatusCode::kFailedPrecondition, "code of a refusal");
  Require(!status.message().empty(), "refused without a word");
}

void RunOne(FuzzInput input) {
  if (input.Byte() % 2 == 0) {
    ServerConfig config;
    const absl::Status status = ApplyConfigJson(input.Rest(), &config);
    if (!status.ok()) return CheckRefused(status);
    return CheckAccepted(config);
  }
  ConfigSources sources;
  for (std::string_view text = input.Rest(); !text.empty();) {
    const std::string_view line = TakeUntil('\n', &text);
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string key(line.substr(0, equals));
    if (key == "FLASHQUANT_CONFIG") continue;  // would be opened
    auto& values = key.starts_with("FLASHQUANT_") ? sources.environment : sources.flags;
    values[key] = line.substr(equals + 1);
  }
  const absl::StatusOr<ServerConfig> config = LoadServerConfig(sources);
  if (!config.ok()) return CheckRefused(config.status());
  CheckAccepted(*config);
  Require(config->Validate().ok(), "accepted, but not valid");
  (void)ToEngineConfig(*config);
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::RunOne({data, size});
  return 0;
}
