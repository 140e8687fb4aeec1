// The flags by which a client command reaches a server: --target, TLS and token. All but --target
// have an environment variable (FLASHQUANT_CLIENT_...), which a flag overrides.
#pragma once

#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "server/inference_client.h"

namespace flashquant {

struct ClientFlags {
  std::string target = "127.0.0.1:50051";
  bool tls = false;
  std::string tls_ca;
  std::string tls_cert;
  std::string tls_key;
  std::string tls_server_name;
  std::string token_file;
};

// `flags` lives until the command has run.
void AddClientFlags(ClientFlags* flags, CLI::App* command);

// Reads the files. NOT_FOUND for a missing one, INVALID_ARGUMENT for flags that do not go together
// and for a token file that does not hold one token in its first line. Warns on stderr when a
// token would cross a network in plain text.
absl::StatusOr<ClientSecurity> LoadClientSecurity(const ClientFlags& flags);

}  // namespace flashquant
