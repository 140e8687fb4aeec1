// Server credentials whose certificates come from a ServerSecurity, asked at every handshake, so
// that a reload needs no restart and breaks no connection.
//
// gRPC 1.51's own file watcher would put a key that does not match into use; its C interface asks
// for the certificates instead.
#pragma once

#include <memory>

#include "grpcpp/security/server_credentials.h"
#include "server/server_security.h"

namespace flashquant {

// To be kept until the server is gone: gRPC asks it, but does not hold it. `security` has TLS and
// outlives both. TLS 1.2 or newer; client certificates are asked for
// and verified when there is a client CA.
std::shared_ptr<grpc::ServerCredentials> MakeTlsServerCredentials(const ServerSecurity* security);

}  // namespace flashquant
