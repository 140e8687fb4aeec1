// Reading values from text and JSON, merging the sources, and the rules between options.
#include "server/server_config.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <fstream>
#include <set>
#include <sstream>

#include "fmt/format.h"
#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"

extern char** environ;  // POSIX has no declaration of it in a header

namespace flashquant {
namespace {

constexpr size_t kMaxFileBytes = 1 << 20;
constexpr int kMaxJsonDepth = 8;

std::string RangeText(const ConfigOption& option) {
  if (!option.choices.empty()) {
    std::string text = "one of";
    for (size_t i = 0; i < option.choices.size(); ++i) {
      text += fmt::format("{} {}", i == 0 ? "" : ",", option.choices[i]);
    }
    return text;
  }
  if (std::holds_alternative<int32_t ServerConfig::*>(option.member) ||
      std::holds_alternative<int64_t ServerConfig::*>(option.member)) {
    return fmt::format("a whole number within {:.0f} and {:.0f}", option.min, option.max);
  }
  if (std::holds_alternative<double ServerConfig::*>(option.member)) {
    return fmt::format("a number within {} and {}", option.min, option.max);
  }
  if (std::holds_alternative<bool ServerConfig::*>(option.member)) return "true or false";
  return "a text";
}

absl::Status WrongValue(const ConfigOption& option, std::string_view found) {
  return FailedPreconditionError("{}: must be {}, got '{}'", option.key, RangeText(option),
                                 found.substr(0, 64));
}

template <typename T>
bool ParseWhole(std::string_view text, T* value) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), *value);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

// Reads a number within the option's range; NaN is in none.
template <typename T>
absl::Status SetNumber(const ConfigOption& option, std::string_view text, T* out) {
  T value = 0;
  if (!ParseWhole(text, &value)) return WrongValue(option, text);
  const auto number = static_cast<double>(value);
  if (!(number >= option.min && number <= option.max)) return WrongValue(option, text);
  *out = value;
  return absl::OkStatus();
}

absl::Status SetFromText(const ConfigOption& option, std::string_view text, ServerConfig* config) {
  if (const auto* whole = std::get_if<int32_t ServerConfig::*>(&option.member)) {
    return SetNumber(option, text, &(config->**whole));
  } else if (const auto* large = std::get_if<int64_t ServerConfig::*>(&option.member)) {
    return SetNumber(option, text, &(config->**large));
  } else if (const auto* real = std::get_if<double ServerConfig::*>(&option.member)) {
    return SetNumber(option, text, &(config->**real));
  } else if (const auto* flag = std::get_if<bool ServerConfig::*>(&option.member)) {
    if (text != "true" && text != "false") return WrongValue(option, text);
    config->** flag = text == "true";
  } else {
    const bool known =
        option.choices.empty() || std::any_of(option.choices.begin(), option.choices.end(),
                                              [&](const char* choice) { return text == choice; });
    if (!known) return WrongValue(option, text);
    config->*std::get<std::string ServerConfig::*>(option.member) = std::string(text);
  }
  return absl::OkStatus();
}

const ConfigOption* FindOption(std::string_view key) {
  for (const ConfigOption& option : ConfigOptions()) {
    if (key == option.key) return &option;
  }
  return nullptr;
}

// Levenshtein distance, one row at a time.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

absl::Status UnknownKey(std::string_view key) {
  const std::string_view shown = key.substr(0, 64);
  const ConfigOption* nearest = nullptr;
  size_t best = shown.size();
  for (const ConfigOption& option : ConfigOptions()) {
    const std::string_view known = option.key;
    // The last part alone counts too: people forget the section.
    const size_t distance = std::min(EditDistance(shown, known),
                                     EditDistance(shown, known.substr(known.find('.') + 1)));
    if (distance < best) {
      best = distance;
      nearest = &option;
    }
  }
  if (nearest == nullptr || best > 4) return FailedPreconditionError("unknown key '{}'", shown);
  return FailedPreconditionError("unknown key '{}', did you mean '{}'?", shown, nearest->key);
}

// Parses with the checks that nlohmann leaves out: keys given twice, depth.
absl::StatusOr<nlohmann::json> ParseStrict(std::string_view text) {
  if (text.size() > kMaxFileBytes) {
    return FailedPreconditionError("configuration: too long (limit {} bytes, got {})",
                                   kMaxFileBytes, text.size());
  }
  absl::Status error;
  std::vector<std::set<std::string>> seen;
  const auto check = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > kMaxJsonDepth && error.ok()) {
      error = FailedPreconditionError("configuration: nested deeper than {}", kMaxJsonDepth);
    }
    if (!error.ok()) return false;
    if (event == Event::object_start) seen.emplace_back();
    if (event == Event::object_end && !seen.empty()) seen.pop_back();
    if (event == Event::key && !seen.empty() && parsed.is_string()) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!seen.back().insert(key).second && error.ok()) {
        error = FailedPreconditionError("key '{}' given twice", key.substr(0, 64));
      }
    }
    return true;
  };
  nlohmann::json root = nlohmann::json::parse(text.begin(), text.end(), check,
                                              /*allow_exceptions=*/false, /*ignore_comments=*/true);
  if (!error.ok()) return error;
  if (root.is_discarded() || !root.is_object()) {
    return FailedPreconditionError("configuration: not a JSON object");
  }
  return root;
}

absl::Status ApplyJsonValue(const std::string& key, const nlohmann::json& value,
                            ServerConfig* config) {
  const ConfigOption* option = FindOption(key);
  if (option == nullptr) return UnknownKey(key);
  const bool is_text = std::holds_alternative<std::string ServerConfig::*>(option->member);
  const bool is_bool = std::holds_alternative<bool ServerConfig::*>(option->member);
  const bool fits = is_text ? value.is_string() : is_bool ? value.is_boolean() : value.is_number();
  // Invalid UTF-8 cannot occur: the parser refuses it.
  if (!fits) return WrongValue(*option, value.dump());
  return SetFromText(*option, is_text ? value.get_ref<const std::string&>() : value.dump(), config);
}

absl::Status ApplyJsonObject(const std::string& prefix, const nlohmann::json& object,
                             ServerConfig* config) {
  for (const auto& [name, value] : object.items()) {
    const std::string key = prefix.empty() ? name : prefix + "." + name;
    if (value.is_object() && FindOption(key) == nullptr) {
      FQ_RETURN_IF_ERROR(ApplyJsonObject(key, value, config));
    } else {
      FQ_RETURN_IF_ERROR(ApplyJsonValue(key, value, config));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFoundError("{}: cannot open the configuration file", path);
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad() || (file.fail() && !file.eof())) {
    return NotFoundError("{}: cannot read the configuration file", path);
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

// Variables that look like ours but are not, as warnings: orchestrators set FLASHQUANT_SERVICE_HOST
// and FLASHQUANT_PORT for a service of that name, which must not stop the start.
void WarnUnknownEnvironment(const std::map<std::string, std::string>& environment,
                            ServerConfig* config) {
  std::set<std::string> known = {"FLASHQUANT_CONFIG"};
  for (const ConfigOption& option : ConfigOptions()) known.insert(EnvironmentName(option));
  for (const auto& [name, value] : environment) {
    if (!name.starts_with("FLASHQUANT_") || known.contains(name)) continue;
    if (name.starts_with("FLASHQUANT_SERVICE_") || name.starts_with("FLASHQUANT_PORT")) continue;
    if (name.starts_with("FLASHQUANT_CLIENT_")) continue;  // client_flags.h
    config->warnings.push_back(
        fmt::format("environment variable {} is unknown and ignored", name.substr(0, 64)));
  }
}

}  // namespace

absl::Status ApplyConfigJson(std::string_view json, ServerConfig* config) {
  FQ_ASSIGN_OR_RETURN(const nlohmann::json root, ParseStrict(json));
  return ApplyJsonObject("", root, config);
}

std::map<std::string, std::string> OwnEnvironment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!text.starts_with("FLASHQUANT_")) continue;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return variables;
}

absl::StatusOr<ServerConfig> LoadServerConfig(const ConfigSources& sources) {
  ServerConfig config;
  std::string file = sources.file;
  if (const auto it = sources.environment.find("FLASHQUANT_CONFIG");
      file.empty() && it != sources.environment.end()) {
    file = it->second;
  }
  if (!file.empty()) {
    FQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(file));
    FQ_RETURN_IF_ERROR(Annotate(ApplyConfigJson(text, &config), file));
  }
  for (const ConfigOption& option : ConfigOptions()) {
    const std::string name = EnvironmentName(option);
    if (const auto it = sources.environment.find(name); it != sources.environment.end()) {
      FQ_RETURN_IF_ERROR(Annotate(SetFromText(option, it->second, &config), name));
    }
    if (const auto it = sources.flags.find(option.key); it != sources.flags.end()) {
      FQ_RETURN_IF_ERROR(Annotate(SetFromText(option, it->second, &config), option.flag));
    }
  }
  WarnUnknownEnvironment(sources.environment, &config);
  FQ_RETURN_IF_ERROR(config.Validate());
  return config;
}

EngineConfig ToEngineConfig(const ServerConfig& config) {
  EngineConfig engine;
  engine.context_length = config.context_length;
  engine.max_sequences = config.max_sequences;
  engine.token_budget = config.token_budget;
  engine.max_waiting = config.max_waiting;
  engine.block_tokens = config.block_tokens;
  engine.num_blocks = config.kv_blocks;
  engine.row_multiple = config.row_multiple;
  engine.run_ahead = config.run_ahead;
  engine.deterministic = config.deterministic;
  engine.prefix_cache = config.prefix_cache == "on";
  engine.priority_ageing_ms = static_cast<int32_t>(config.priority_ageing_seconds * 1000);
  engine.prompt_patience = config.prompt_patience;
  engine.fill_wait_ms = config.fill_wait_ms;
  engine.gap_target_ms = config.gap_target_ms;
  return engine;
}

absl::StatusOr<HostPort> ParseHostPort(std::string_view key, std::string_view address) {
  const size_t colon = address.rfind(':');
  HostPort parsed;
  int port = -1;
  if (colon == std::string_view::npos || colon == 0 ||
      !ParseWhole(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return FailedPreconditionError("{}: must be host:port with a port up to 65535, got '{}'", key,
                                   address.substr(0, 64));
  }
  std::string_view host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return FailedPreconditionError("{}: an IPv6 address needs brackets, [{}]:{}", key,
                                   host.substr(0, 64), port);
  }
  parsed.host = std::string(host);
  parsed.port = port;
  return parsed;
}

bool IsLoopback(std::string_view host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

namespace {

// An address that others can reach needs encryption and credentials, or leave.
absl::Status CheckBind(const ServerConfig& config, std::string_view key, std::string_view host,
                       const std::string& address) {
  const bool open_to_all = config.token_file.empty() && config.tls_client_ca_file.empty();
  const bool plain = config.tls_cert_file.empty();
  if (IsLoopback(host) || config.insecure_bind || (!plain && !open_to_all)) {
    return absl::OkStatus();
  }
  return FailedPreconditionError(
      "{}: refusing insecure bind to {} ({}{}{}): give {}{}{}, or use a loopback address, or "
      "--insecure-bind on a network you trust",
      key, address.substr(0, 64), plain ? "plain text" : "", plain && open_to_all ? ", " : "",
      open_to_all ? "no credentials" : "", plain ? "--tls-cert and --tls-key" : "",
      plain && open_to_all ? ", and " : "", open_to_all ? "--token-file or --tls-client-ca" : "");
}

}  // namespace

absl::Status ServerConfig::Validate() const {
  FQ_ASSIGN_OR_RETURN(const HostPort listen, ParseHostPort("listen.address", listen_address));
  if (tls_cert_file.empty() != tls_key_file.empty()) {
    return FailedPreconditionError(
        "tls.cert_file, tls.key_file: give both (--tls-cert, --tls-key) or neither");
  }
  if (!tls_client_ca_file.empty() && tls_cert_file.empty()) {
    return FailedPreconditionError("tls.client_ca_file: needs tls.cert_file and tls.key_file");
  }
  FQ_RETURN_IF_ERROR(CheckBind(*this, "listen.address", listen.host, listen_address));
  if (metrics_address != "off") {
    FQ_ASSIGN_OR_RETURN(const HostPort metrics, ParseHostPort("metrics.address", metrics_address));
    if (metrics.port == listen.port && listen.port != 0) {
      return FailedPreconditionError("metrics.address: port {} is already that of listen.address",
                                     metrics.port);
    }
  }
  if (admin_address != "off") {
    FQ_ASSIGN_OR_RETURN(const HostPort admin, ParseHostPort("admin.address", admin_address));
    if (admin.port != 0 && (admin.port == listen.port || admin_address == metrics_address)) {
      return FailedPreconditionError(
          "admin.address: port {} is already that of {}", admin.port,
          admin.port == listen.port ? "listen.address" : "metrics.address");
    }
    FQ_RETURN_IF_ERROR(CheckBind(*this, "admin.address", admin.host, admin_address));
  }
  if (slow_reader_seconds >= keepalive_timeout_seconds) {
    return FailedPreconditionError(
        "stream.slow_reader_seconds: must be below connection.keepalive_timeout_seconds ({}), got "
        "{}: else the kernel resets the whole connection first",
        keepalive_timeout_seconds, slow_reader_seconds);
  }
  if (token_budget < max_sequences) {
    return FailedPreconditionError(
        "engine.token_budget: must be at least engine.max_sequences ({}), got {}", max_sequences,
        token_budget);
  }
  if (model_path.empty()) return FailedPreconditionError("model.path: required (--model DIR)");
  return absl::OkStatus();
}

}  // namespace flashquant
