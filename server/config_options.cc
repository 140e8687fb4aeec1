// The table of options, and what is derived from it alone: names, texts, README's table.
#include <cctype>
#include <string>

#include "fmt/format.h"
#include "server/server_config.h"

namespace flashquant {
namespace {

using C = ServerConfig;
constexpr double kDay = 86400;

}  // namespace

const std::vector<ConfigOption>& ConfigOptions() {
  static const auto* const options = new std::vector<ConfigOption>{
      {"model.path", "--model", "folder of the checkpoint to serve (required)", &C::model_path},
      {"model.name", "--model-name", "name that requests may ask for; empty = the folder's name",
       &C::model_name},
      {"model.context_length", "--context-length",
       "tokens of prompt and answer together; 0 = the model's", &C::context_length, 0, 1 << 20},
      {"backend.kind",
       "--backend",
       "where the model runs",
       &C::backend,
       0,
       0,
       {"auto", "cpu", "cuda"}},
      {"backend.threads", "--threads", "threads of the CPU backend; 0 = one per core", &C::threads,
       0, 1024},
      {"listen.address", "--listen", "address of the gRPC service, host:port", &C::listen_address},
      {"listen.insecure_bind", "--insecure-bind",
       "allow plain text or calls without credentials on an address that others can reach",
       &C::insecure_bind},
      {"tls.cert_file", "--tls-cert", "certificate chain of the server, PEM; empty = plain text",
       &C::tls_cert_file},
      {"tls.key_file", "--tls-key", "its private key, PEM", &C::tls_key_file},
      {"tls.client_ca_file", "--tls-client-ca",
       "CAs, PEM; clients then need a certificate of one of them", &C::tls_client_ca_file},
      {"auth.token_file", "--token-file",
       "hashes of the bearer tokens that may call; empty = none is asked for", &C::token_file},
      {"listen.reflection", "--reflection", "offer gRPC server reflection", &C::reflection},
      {"metrics.address", "--metrics-listen", "address of the Prometheus metrics, or off",
       &C::metrics_address},
      {"admin.address", "--admin-listen",
       "address of AdminService (drain, open requests, prefix cache), as 127.0.0.1:50052, or off",
       &C::admin_address},
      {"limits.max_request_seconds", "--max-request-seconds", "longest run time of one call",
       &C::max_request_seconds, 0.01, kDay},
      {"limits.queue_timeout_seconds", "--queue-timeout-seconds",
       "a request that was not scheduled by then is refused; 0 = none", &C::queue_timeout_seconds,
       0, kDay},
      {"limits.max_waiting", "--max-waiting", "requests that may wait; beyond: QUEUE_FULL",
       &C::max_waiting, 1, 1 << 20},
      {"limits.max_streams_per_connection", "--max-streams-per-connection",
       "calls at once on one connection; more wait in the client", &C::max_streams_per_connection,
       1, 1 << 16},
      {"engine.max_sequences", "--max-sequences", "sequences in one step", &C::max_sequences, 1,
       4096},
      {"engine.token_budget", "--token-budget", "tokens in one step", &C::token_budget, 1, 1 << 16},
      {"engine.block_tokens", "--block-tokens", "tokens per KV block", &C::block_tokens, 1, 256},
      {"engine.kv_blocks", "--kv-blocks", "KV blocks; 0 = from --kv-cache-bytes", &C::kv_blocks, 0,
       1 << 24},
      {"engine.kv_cache_bytes", "--kv-cache-bytes",
       "size of the KV pool; 0 = what --max-sequences contexts need, at most what is left (CPU: a "
       "quarter of the free memory)",
       &C::kv_cache_bytes, 0, 1e15},
      {"engine.kv_cache_dtype",
       "--kv-cache-dtype",
       "keys and values; auto = FP32 on the CPU, BF16 on CUDA; fp8 (e4m3) halves BF16's bytes",
       &C::kv_cache_dtype,
       0,
       0,
       {"auto", "bf16", "fp8"}},
      {"engine.gpu_memory_fraction", "--gpu-memory-fraction",
       "of the GPU's memory, what this server takes at most", &C::gpu_memory_fraction, 0.01, 1},
      {"engine.gpu_reserve_bytes", "--gpu-reserve-bytes",
       "of the GPU's free memory, what stays free for the desktop and others",
       &C::gpu_reserve_bytes, 0, 1e15},
      {"engine.row_multiple", "--row-multiple",
       "rows of a decode step are padded to a multiple of it; 0 = the backend's", &C::row_multiple,
       0, 256},
      {"engine.run_ahead", "--run-ahead", "launch a step before the last one is collected",
       &C::run_ahead},
      {"engine.deterministic", "--deterministic",
       "a greedy answer is bit for bit that of its solo run, on a GPU too: decode steps of one "
       "size, "
       "prompts one by one, no prefix cache, no preemption",
       &C::deterministic},
      {"engine.prefix_cache",
       "--prefix-cache",
       "keep the KV blocks of prompts and answers for prompts that begin alike",
       &C::prefix_cache,
       0,
       0,
       {"on", "off"}},
      {"engine.priority_ageing_seconds", "--priority-ageing-seconds",
       "a step of priority is worth this much of waiting", &C::priority_ageing_seconds, 0.001,
       3600},
      {"engine.prompt_patience", "--prompt-patience",
       "a prompt lets shorter ones pass that arrive within this many times its own prefill, at "
       "most half of --priority-ageing-seconds; 0 = by arrival alone",
       &C::prompt_patience, 0, 1000},
      {"engine.fill_wait_ms", "--fill-wait-ms",
       "a decode step waits this long for requests that could fill its padding rows; 0 = off",
       &C::fill_wait_ms, 0, 1000},
      {"engine.gap_target_ms", "--gap-target-ms",
       "such a wait keeps the gap between two tokens of a stream below this", &C::gap_target_ms,
       0.1, 60000},
      {"stream.slow_reader_seconds", "--slow-reader-seconds",
       "a paused stream whose client does not read is aborted after this; 0 = at once",
       &C::slow_reader_seconds, 0, 3600},
      {"connection.keepalive_seconds", "--keepalive-seconds", "ping an idle connection after this",
       &C::keepalive_seconds, 1, kDay},
      {"connection.keepalive_timeout_seconds", "--keepalive-timeout-seconds",
       "close a connection that did not answer by then", &C::keepalive_timeout_seconds, 1, 3600},
      {"shutdown.drain_seconds", "--drain-seconds",
       "running answers may take this long to end after SIGTERM", &C::drain_seconds, 0, 3600},
      {"shutdown.core_files", "--core-files",
       "a crash may leave a core file, which holds prompts and tokens", &C::core_files},
      {"watchdog.stuck_step_seconds", "--stuck-step-seconds",
       "a step that takes longer ends the process with exit code 70; 0 = off",
       &C::stuck_step_seconds, 0, kDay},
      {"watchdog.probe_seconds", "--probe-seconds",
       "the server connects to itself this often; three failures end it with exit code 71; 0 = off",
       &C::probe_seconds, 0, 3600},
      {"log.level",
       "--log-level",
       "least level that is logged",
       &C::log_level,
       0,
       0,
       {"debug", "info", "warning", "error"}},
  };
  return *options;
}

std::string EnvironmentName(const ConfigOption& option) {
  std::string name = "FLASHQUANT_";
  for (const char* c = option.key; *c != '\0'; ++c) {
    name += *c == '.' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
  }
  return name;
}

std::string OptionText(const ConfigOption& option, const ServerConfig& config) {
  return std::visit(
      [&](auto member) -> std::string {
        using T = std::decay_t<decltype(config.*member)>;
        if constexpr (std::is_same_v<T, bool>) {
          return config.*member ? "true" : "false";
        } else {
          return fmt::format("{}", config.*member);
        }
      },
      option.member);
}

std::vector<std::string> DescribeConfig(const ServerConfig& config) {
  std::vector<std::string> lines;
  for (const ConfigOption& option : ConfigOptions()) {
    lines.push_back(fmt::format("{} = {}", option.key, OptionText(option, config)));
  }
  return lines;
}

std::string ConfigOptionsMarkdown() {
  const ServerConfig defaults;
  std::string text =
      "| flag | key in the JSON file | environment variable | default | meaning |\n"
      "|---|---|---|---|---|\n";
  for (const ConfigOption& option : ConfigOptions()) {
    std::string value = OptionText(option, defaults);
    if (value.empty()) value = "(none)";
    std::string meaning = option.help;
    for (size_t i = 0; i < option.choices.size(); ++i) {
      meaning += fmt::format("{}{}", i == 0 ? ": " : ", ", option.choices[i]);
    }
    text += fmt::format("| `{}` | `{}` | `{}` | {} | {} |\n", option.flag, option.key,
                        EnvironmentName(option), value, meaning);
  }
  return text;
}

}  // namespace flashquant
