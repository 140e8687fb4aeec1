// The server of this machine or container, found by the options that it was started with: for
// health checks that follow its port and its TLS by themselves.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/client_flags.h"
#include "server/inference_client.h"
#include "server/server_config.h"

namespace flashquant {

struct LocalTarget {
  std::string target;  // host:port
  ClientSecurity security;
};

// `sources`: what serve reads, its flags apart. A wildcard address is asked on loopback. With TLS
// the server's certificate is not checked: nothing secret is sent, and its name is seldom
// 127.0.0.1. Where it wants a client's certificate it gets that of `flags`, else the server's own.
// Errors of LoadServerConfig, LoadClientSecurity and of reading the certificate.
absl::StatusOr<LocalTarget> FindLocalTarget(const ConfigSources& sources, const ClientFlags& flags);

}  // namespace flashquant
