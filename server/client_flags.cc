// One definition for generate, health and whatever else calls a server.
#include "server/client_flags.h"

#include <string_view>

#include "kernels/base/status_macros.h"
#include "server/server_config.h"
#include "server/tls_files.h"
#include "server/token_file.h"

namespace flashquant {

void AddClientFlags(ClientFlags* flags, CLI::App* command) {
  command->add_option("--target", flags->target, "server, host:port")->capture_default_str();
  command->add_flag("--tls", flags->tls, "use TLS and trust the system's CAs")
      ->envname("FLASHQUANT_CLIENT_TLS");
  command->add_option("--tls-ca", flags->tls_ca, "use TLS and trust these CAs, PEM file")
      ->envname("FLASHQUANT_CLIENT_TLS_CA");
  command->add_option("--tls-cert", flags->tls_cert, "own certificate, for mutual TLS, PEM file")
      ->envname("FLASHQUANT_CLIENT_TLS_CERT");
  command->add_option("--tls-key", flags->tls_key, "its private key, PEM file")
      ->envname("FLASHQUANT_CLIENT_TLS_KEY");
  command
      ->add_option("--tls-server-name", flags->tls_server_name,
                   "name in the server's certificate, if not the target's host")
      ->envname("FLASHQUANT_CLIENT_TLS_SERVER_NAME");
  command
      ->add_option("--token-file", flags->token_file,
                   "file whose first line is the bearer token (not its hash)")
      ->envname("FLASHQUANT_CLIENT_TOKEN_FILE");
}

absl::StatusOr<ClientSecurity> LoadClientSecurity(const ClientFlags& flags) {
  ClientSecurity security;
  security.tls = flags.tls || !flags.tls_ca.empty() || !flags.tls_cert.empty();
  security.server_name = flags.tls_server_name;
  if (flags.tls_cert.empty() != flags.tls_key.empty()) {
    return InvalidArgumentError("--tls-cert, --tls-key: give both or neither");
  }
  if (!flags.tls_ca.empty()) {
    FQ_ASSIGN_OR_RETURN(security.ca_pem, ReadSmallFile(flags.tls_ca));
  }
  if (!flags.tls_cert.empty()) {
    FQ_ASSIGN_OR_RETURN(security.cert_pem, ReadSmallFile(flags.tls_cert));
    FQ_ASSIGN_OR_RETURN(security.key_pem, ReadSmallFile(flags.tls_key));
  }
  if (flags.token_file.empty()) return security;
  FQ_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(flags.token_file));
  const size_t end = text.find_first_of("\r\n");
  const std::string header = "Bearer " + text.substr(0, end);
  const auto token = BearerToken(header);
  if (!token) {
    return InvalidArgumentError("{}: its first line must be a token: 1 to 4096 visible characters",
                                flags.token_file);
  }
  security.token = std::string(*token);
  const std::string_view host = std::string_view(flags.target).substr(0, flags.target.rfind(':'));
  if (!security.tls && !IsLoopback(host) && host != "[::1]") {
    fmt::print(stderr, "flashquant: the token crosses the network in plain text; use --tls\n");
  }
  return security;
}

}  // namespace flashquant
