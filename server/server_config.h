// ServerConfig: every option of `flashquant serve` with its default, once, and how it is read.
//
// One order for all of them: flag > environment (FLASHQUANT_*) > JSON file (--config) > default.
// One table (ConfigOptions) names key, flag, help and range; help text, parsing, the effective
// values printed at start and README's table all come from it. Read once, then immutable.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine_config.h"

namespace flashquant {

struct ServerConfig {
  std::string model_path;
  std::string model_name;      // empty = last part of model_path
  int32_t context_length = 0;  // 0 = the model's
  std::string backend = "auto";
  int32_t threads = 0;  // of the CPU backend; 0 = one per core

  std::string listen_address = "127.0.0.1:50051";
  bool insecure_bind = false;  // plain text or open to anybody where other machines can reach it
  std::string tls_cert_file;   // empty = plain text
  std::string tls_key_file;
  std::string tls_client_ca_file;  // empty = clients need no certificate
  std::string token_file;          // empty = no tokens are asked for
  bool reflection = false;
  std::string metrics_address = "127.0.0.1:9464";  // "off" = none
  std::string admin_address = "off";

  double max_request_seconds = 600;
  double queue_timeout_seconds = 60;  // 0 = none
  int32_t max_waiting = 1024;
  int32_t max_streams_per_connection = 256;

  int32_t max_sequences = 64;
  int32_t token_budget = 256;
  int32_t block_tokens = 16;
  int32_t kv_blocks = 0;       // 0 = from kv_cache_bytes
  int64_t kv_cache_bytes = 0;  // 0 = what max_sequences contexts need, at most what is left
  std::string kv_cache_dtype = "auto";
  double gpu_memory_fraction = 0.9;
  int64_t gpu_reserve_bytes = int64_t{512} << 20;
  int32_t row_multiple = 0;  // 0 = the backend's
  bool run_ahead = false;
  bool deterministic = false;
  std::string prefix_cache = "on";
  double priority_ageing_seconds = 2;
  double prompt_patience = 4;  // 0 = off
  double fill_wait_ms = 0;     // 0 = off
  double gap_target_ms = 50;

  double slow_reader_seconds = 10;
  double keepalive_seconds = 60;
  double keepalive_timeout_seconds = 20;
  double drain_seconds = 30;
  bool core_files = false;
  double stuck_step_seconds = 30;  // 0 = off
  double probe_seconds = 10;       // 0 = off
  std::string log_level = "info";

  // What does not stop the start but should be read.
  std::vector<std::string> warnings;

  // FAILED_PRECONDITION naming keys, for values that exclude each other: an address that is none,
  // the same port twice, a bind that others can reach without leave. Single values were checked
  // when they were read.
  absl::Status Validate() const;
};

// One option. `member` says where it goes and what type it has.
struct ConfigOption {
  const char* key;   // "limits.max_waiting": path in the JSON file
  const char* flag;  // "--max-waiting"
  const char* help;  // one line
  std::variant<std::string ServerConfig::*, int32_t ServerConfig::*, int64_t ServerConfig::*,
               double ServerConfig::*, bool ServerConfig::*>
      member;
  double min = 0;
  double max = 0;
  std::vector<const char*> choices = {};  // of a text; empty = any
};
const std::vector<ConfigOption>& ConfigOptions();

// "FLASHQUANT_LIMITS_MAX_WAITING"
std::string EnvironmentName(const ConfigOption& option);
// The value as text: "info", "64", "0.5", "true".
std::string OptionText(const ConfigOption& option, const ServerConfig& config);

// What the user gave: flags by key, and the environment.
struct ConfigSources {
  std::map<std::string, std::string> flags;        // key -> text; "true" for switches
  std::map<std::string, std::string> environment;  // whole environment
  std::string file;  // path of the JSON file, empty = $FLASHQUANT_CONFIG, else none
};

// The variables of this process that are ours: FLASHQUANT_...
std::map<std::string, std::string> OwnEnvironment();

// Reads, checks each value and merges; then Validate. FAILED_PRECONDITION with key, range and found
// value; NOT_FOUND when the file is missing.
absl::StatusOr<ServerConfig> LoadServerConfig(const ConfigSources& sources);

// Sets the values of a JSON text. Unknown keys are refused with the nearest known one; so are keys
// given twice, other types, texts over 1 MiB.
absl::Status ApplyConfigJson(std::string_view json, ServerConfig* config);

// "key = value" per option, for the start of the log.
std::vector<std::string> DescribeConfig(const ServerConfig& config);
// README's table: key, flag, environment variable, default, meaning.
std::string ConfigOptionsMarkdown();

// The engine's part. row_multiple 0 stays 0: the caller puts the backend's.
EngineConfig ToEngineConfig(const ServerConfig& config);

// "host:port" or "[v6]:port" taken apart.
struct HostPort {
  std::string host;
  int port = 0;
};
absl::StatusOr<HostPort> ParseHostPort(std::string_view key, std::string_view address);
// 127.0.0.0/8, ::1, localhost.
bool IsLoopback(std::string_view host);

}  // namespace flashquant
